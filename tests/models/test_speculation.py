"""Speculation with a model: tokens, log-probabilities, texts and ends are those without it."""

from __future__ import annotations

from typing import Any

import pytest
from all_at_once import generate_all_at_once

from headrace import LLM, SamplingParams
from headrace.core.options.parsing import parse_options
from headrace.core.options.speculation import NgramSpeculation, speculation_of
from headrace.ipc.failure import OptionError

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SUFFIX = {"method": "suffix", "suffix_decoding_max_spec_factor": 2.0, "suffix_decoding_min_token_prob": 0.0}
ENGINE = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "block_size": 4,
    "max_model_len": 96,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 40,
}
PROMPTS = [([5, 6, 7 + number] * 9)[: 7 + 3 * number] for number in range(8)]
"""Tokens that come again and again, of which some are longer than a step."""


def params() -> list[SamplingParams]:
    """One of each kind; a random model's greedy answers soon go round in circles."""
    common: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0}
    return [
        SamplingParams(**common),
        SamplingParams(**common | {"temperature": 0.7, "seed": 3}, logprobs=2),
        SamplingParams(**common, repetition_penalty=1.1, logprobs=0),
        SamplingParams(**common, frequency_penalty=0.1, presence_penalty=0.2),
        SamplingParams(**common, bad_words=None, logit_bias={9: 1.5, 31: -100.0}, prompt_logprobs=1),
        SamplingParams(**common, min_tokens=25, stop_token_ids=[*range(0, 256, 2)], logprobs=1),
        SamplingParams(**common | {"temperature": 1.2, "seed": 8, "n": 2}, top_k=3),
        SamplingParams(**common | {"temperature": 0.4, "seed": 9}, top_p=0.9, allowed_token_ids=[*range(20, 40)]),
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    import tiny_models

    return str(tiny_models.save("llama", tmp_path_factory.mktemp("models") / "llama"))


def heard(folder: str, **options: Any) -> tuple[tuple[list[Any], Any], Any]:
    """What requests of all kinds get: tokens and ends, and log-probabilities; and the engine's counters."""
    with LLM(folder, **ENGINE | options) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = generate_all_at_once(llm, prompts, params())
        stats = llm.get_stats()
    exact: list[Any] = []
    logprobs: list[float] = []
    for output in outputs:
        for each in output.outputs:
            reported = [*(each.logprobs or ()), *(position for position in output.prompt_logprobs or () if position)]
            exact.append((each.token_ids, each.finish_reason, each.stop_reason, [[*position] for position in reported]))
            logprobs += [value.logprob for position in reported for value in position.values()]
    return (exact, pytest.approx(logprobs, abs=1e-4)), stats


@pytest.fixture(scope="module")
def expected(checkpoint: str) -> tuple[list[Any], Any]:
    found, stats = heard(checkpoint, in_process=True)
    assert stats.num_preemptions > 0
    assert stats.num_drafts == 0
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"in_process": True},
        {"in_process": True, "async_scheduling": True},
        {"in_process": True, "enable_prefix_caching": False, "num_gpu_blocks_override": 200},
        {"in_process": True, "speculative_config": SUFFIX},
        {"in_process": True, "speculative_config": SUFFIX, "async_scheduling": True},
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.system),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.system),
        pytest.param({"pipeline_parallel_size": 2, "async_scheduling": False}, marks=pytest.mark.system),
    ],
    ids=str,
)
@pytest.mark.usefixtures("drafts_at_any_cost")
def test_every_answer_is_the_one_without_speculation(
    checkpoint: str, expected: tuple[list[Any], Any], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found, stats = heard(checkpoint, **{"speculative_config": NGRAM} | options)
    assert found[0] == expected[0]
    assert found[1].expected == expected[1]
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_accepted_tokens == sum(stats.num_accepted_tokens_per_pos)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, (3, 5, 5, None)),
        (
            {"speculative_config": '{"model": "[ngram]", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'},
            (3, 4, 4, None),
        ),
        (
            {
                "speculative_model": "[ngram]",
                "num_speculative_tokens": "6",
                "ngram_prompt_lookup_max": 4,
                "ngram_prompt_lookup_min": 2,
                "speculative_disable_by_batch_size": 9,
            },
            (6, 4, 2, 9),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*retired:FutureWarning")
def test_vllms_spellings_old_and_new_mean_the_same(options: dict[str, Any], expected: tuple[Any, ...]) -> None:
    found = speculation_of(parse_options(**options).speculative_config, on_gpu=False)
    assert isinstance(found, NgramSpeculation)
    assert (
        found.num_speculative_tokens,
        found.prompt_lookup_max,
        found.prompt_lookup_min,
        found.disable_by_batch_size,
    ) == expected


METHODS = "has {}; the methods are .*ngram.*suffix.* with a draft model"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"method": "eagle", "num_speculative_tokens": 3},
            METHODS.format("method='eagle'"),
        ),
        (
            {"model": "org/draft", "num_speculative_tokens": 3},
            METHODS.format("model='org/draft'"),
        ),
        ({"num_speculative_tokens": 3}, "names no method"),
        ({"method": "ngram"}, "needs num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens=0; it must be a whole number, 1 to"),
        ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 5, "prompt_lookup_max": 3}, "more than"),
        ({"method": "ngram", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 1}, "does not read"),
        ({"method": "suffix", "prompt_lookup_max": 3}, "prompt_lookup_max, which method suffix does not read"),
        (
            {"method": "suffix", "suffix_decoding_min_token_prob": 1.5},
            "prob=1.5; it must be a number, 0 to 1",
        ),
        (
            {"method": "suffix", "suffix_decoding_max_spec_factor": "much"},
            "factor='much'; it must be a number",
        ),
        (
            {"method": "suffix", "suffix_decoding_max_spec_factor": 10**400},
            "factor=1000+; it must be a number, at least 0",
        ),
        ({"method": "ngram", "num_speculative_tokens": 2, 3: 4}, "has 3, which method ngram does not read"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 0}, "max_tree_depth=0; it must be a whole number"),
        ({"method": "suffix", "model": "org/draft"}, "model='org/draft' with method suffix, which uses no model"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        speculation_of(config, on_gpu=False)
