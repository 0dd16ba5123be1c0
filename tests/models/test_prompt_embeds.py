"""Prompt embeddings with models: rows of the model's own table are answered as its tokens are, to the last bit."""

from __future__ import annotations

import base64
import io
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from all_at_once import generate_all_at_once
from rank_threads import RankThreads, pool_for_each_rank
from safetensors.torch import load_file
from tiny_families import FAMILIES
from tiny_mixtures import FAMILIES as MIXTURES
from tiny_recurrent import FAMILIES as RECURRENT
from torch import Tensor

from headrace import LLM, InvalidRequestError, RequestOutput, SamplingParams
from headrace.frontend.request.embeds import tensor_of
from headrace.ipc.codec import Tensor as Values
from headrace.ipc.failure import HeadraceError, OptionError
from headrace.ipc.row_inputs import PromptEmbeds, RowInput, first_not_finite, prompt_embeds_input

__all__ = ["pool_for_each_rank"]
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "in_process": True,
    "enable_prompt_embeds": True,
    "block_size": 4,
    "max_model_len": 96,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 60,
}
THREADS = {"distributed_executor_backend": f"{RankThreads.__module__}:{RankThreads.__name__}"}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
PROMPTS = [([5 + number, 6, 7, 8 + number] * 12)[: 1 + 6 * number] for number in range(8)]
"""From one token to more than a step computes."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def checkpoint(folders: Path, name: str = "llama") -> str:
    folder = folders / name
    if not folder.exists():
        tiny_models.save(name, folder)
    return str(folder)


def table_of(folder: str) -> Tensor:
    weights = load_file(next(Path(folder).glob("*.safetensors")))
    return next(weight for name, weight in weights.items() if "embed_tokens" in name)


def heard(llm: LLM, prompts: list[Any], params: SamplingParams = GREEDY) -> list[Any]:
    """Tokens and log-probabilities, which are compared exactly."""
    return compared(generate_all_at_once(llm, prompts, [params] * len(prompts)))


def compared(outputs: list[RequestOutput]) -> list[Any]:
    return [
        [(each.token_ids, [{id: value.logprob for id, value in row.items()} for row in each.logprobs or ()])]
        for output in outputs
        for each in output.outputs
    ]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        pytest.param("llama", {"dtype": "bfloat16"}, marks=pytest.mark.system),
        ("llama", {"dtype": "float16", "async_scheduling": True}),
        ("llama", {"num_gpu_blocks_override": 26}),  # requests are preempted, and computed again with their output
        ("llama", {"enable_prefix_caching": False, "enable_chunked_prefill": False, "max_num_batched_tokens": 96}),
        ("llama", {"model_impl": "transformers"}),
        ("llama", {"speculative_config": NGRAM}),
        ("llama", {"tensor_parallel_size": 2, **THREADS}),
        pytest.param("llama", {"pipeline_parallel_size": 2, **THREADS}, marks=pytest.mark.system),
        pytest.param("llama_gqa_tied", {}, marks=pytest.mark.system),
        ("llama_dynamic", {}),  # op by op
        pytest.param("mistral_window", {}, marks=pytest.mark.system),
        ("mixtral_window", {}),
        ("opt_projected_post_norm", {}),  # a projection after the table, and learned positions
    ],
)
@pytest.mark.usefixtures("drafts_at_any_cost")
def test_rows_of_the_table_are_answered_as_tokens_bit_by_bit(folders: Path, name: str, options: Any) -> None:
    folder = checkpoint(folders, name)
    table = table_of(folder)
    with LLM(folder, **ENGINE | options) as llm:
        expected = heard(llm, [{"prompt_token_ids": prompt} for prompt in PROMPTS])
        assert heard(llm, [{"prompt_embeds": table[prompt]} for prompt in PROMPTS]) == expected
        mixed = [
            {"prompt_embeds": table[ids] * (torch.arange(len(ids)) % 3 > 0)[:, None], "prompt_token_ids": ids}
            | {"prompt_is_token_ids": [at % 3 == 0 for at in range(len(ids))]}
            for ids in PROMPTS
        ]
        assert heard(llm, mixed) == expected
        if options.get("num_gpu_blocks_override"):
            assert llm.get_stats().num_preemptions > 0
        if "speculative_config" in options:
            assert llm.get_stats().num_accepted_tokens > 0


def test_a_scale_in_the_embedding_layer_is_in_what_is_given_and_others_are_applied(folders: Path) -> None:
    """As transformers' `get_input_embeddings()` gives them: Gemma's are scaled, Granite's are not."""
    ids = PROMPTS[3]
    models = {"gemma3": tiny_models.build("gemma3"), "granite": tiny_models.make(FAMILIES["granite"])}
    for name, reference in models.items():
        reference.save_pretrained(folder := folders / f"scaled {name}")
        with LLM(str(folder), **ENGINE | {"num_gpu_blocks_override": 100}) as llm, torch.inference_mode():
            embedded = reference.get_input_embeddings()(torch.tensor(ids))
            assert heard(llm, [{"prompt_embeds": embedded}]) == heard(llm, [{"prompt_token_ids": ids}]), name


def test_a_norm_in_the_embedding_layer_is_in_what_is_given(folders: Path) -> None:
    reference, ids = tiny_models.make(RECURRENT["inkling"]), PROMPTS[3]
    reference.save_pretrained(folders / "inkling")
    with torch.inference_mode():
        embedded = reference.get_input_embeddings()(torch.tensor(ids))
    with LLM(str(folders / "inkling"), **ENGINE | {"num_gpu_blocks_override": 200}) as llm:
        (given,), (as_tokens,) = heard(llm, [{"prompt_embeds": embedded}, {"prompt_token_ids": ids}])
    assert given[0] == as_tokens[0]
    for row, expected in zip(given[1], as_tokens[1], strict=True):
        assert row == pytest.approx(expected, abs=1e-4)


def test_layers_that_read_n_grams_take_no_embeddings(folders: Path) -> None:
    tiny_models.make(RECURRENT["qwen4_exp"]).save_pretrained(folders / "qwen4_exp")
    with pytest.raises(OptionError, match="takes no embeddings in the place of tokens: its layers read the token ids"):
        LLM(str(folders / "qwen4_exp"), **ENGINE)


def test_other_values_are_computed_as_transformers_does(folders: Path) -> None:
    folder = checkpoint(folders)
    reference = tiny_models.build("llama")
    given = torch.randn(19, table_of(folder).shape[1], generator=torch.Generator().manual_seed(1)) * 0.1
    with torch.inference_mode():
        logits = reference(inputs_embeds=given[None]).logits[0, -1].log_softmax(-1)
    with LLM(folder, **ENGINE) as llm:
        (output,) = llm.generate({"prompt_embeds": given[None]}, GREEDY, use_tqdm=False)  # a batch of one
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        for token_id, value in logprobs[0].items():
            assert value.logprob == pytest.approx(float(logits[token_id]), abs=2e-4)
        assert output.prompt_token_ids == [0] * 19


def test_prefixes_are_shared_among_equal_embeddings_alone(folders: Path) -> None:
    folder = checkpoint(folders)
    table = table_of(folder)
    ids = [5, 6, 7, 8] * 6

    def cached(llm: LLM, prompt: Any) -> int:
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)
        return int(output.num_cached_tokens)

    changed = table[ids].clone()
    changed[9] += 1
    with LLM(folder, **ENGINE) as llm:
        assert cached(llm, {"prompt_token_ids": ids}) == 0
        assert cached(llm, {"prompt_embeds": table[ids]}) == 0
        assert cached(llm, {"prompt_embeds": table[ids]}) == 20
        assert cached(llm, {"prompt_embeds": changed}) == 8
        assert cached(llm, {"prompt_embeds": table[ids], "cache_salt": "mine"}) == 0
        assert cached(llm, {"prompt_token_ids": [0] * 24}) == 0
        assert cached(llm, {"prompt_embeds": table[ids].numpy()[:13]}) == 12
        assert cached(llm, {"prompt_token_ids": ids}) == 20


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, r"the row input prompt_embeds, .*PromptEmbeds, failed in values for the positions \[.*ZeroDivisionError"),
        ({"tensor_parallel_size": 2, **THREADS}, "failed in values for the positions"),
        ({"pipeline_parallel_size": 2, **THREADS}, "highest logit is nan"),  # known to the first stage
    ],
)
def test_a_kind_that_fails_ends_its_request_alone_and_leaves_nothing_in_the_cache(
    folders: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], why: str
) -> None:
    folder = checkpoint(folders)
    table = table_of(folder)
    poor = table[PROMPTS[6]].clone()
    poor[0, 0] = 0.5
    content, own = prompt_embeds_input(tensor_of(poor)).tensors, PromptEmbeds.values

    def values(kind: PromptEmbeds, given: RowInput, first: int, last: int) -> Values:
        if given.tensors == content and last > 20:  # not at the first position, which the core looks at
            raise ZeroDivisionError("lab")
        return own(kind, given, first, last)

    prompts: list[Any] = [{"prompt_token_ids": ids} for ids in PROMPTS[:4]]
    with LLM(folder, **ENGINE | options) as llm:
        expected = heard(llm, prompts)
        monkeypatch.setattr(PromptEmbeds, "values", values)
        llm.pause_generation("keep", clear_cache=False)
        with ThreadPoolExecutor(2) as pool:
            failing = pool.submit(llm.generate, {"prompt_embeds": poor}, GREEDY, use_tqdm=False)
            others = pool.submit(llm.generate, prompts, GREEDY, use_tqdm=False)
            while llm.get_stats().num_waiting < 5:
                time.sleep(0.001)
            llm.resume_generation()
            with pytest.raises(HeadraceError, match=why):
                failing.result()
            assert compared(others.result()) == expected
        monkeypatch.undo()
        again = {"prompt_embeds": poor}
        assert heard(llm, [again]) == heard(llm, [again | {"cache_salt": "none has this"}])


def test_what_cannot_be_taken_fails_alone_and_says_why(folders: Path) -> None:
    folder = checkpoint(folders)
    table = table_of(folder)
    rows = table[PROMPTS[2]]
    ids = PROMPTS[2]
    infinite = rows.clone()
    infinite[3, 5] = float("inf")
    cases: list[tuple[Any, str, dict[str, Any]]] = [
        ({"prompt_embeds": infinite}, "row 3 has a value that is not finite", {}),
        (
            {"prompt_embeds": rows.double() * 1e300},
            "prompt_embeds: row 0 has a value that is not finite in float32",
            {},
        ),
        ({"prompt_embeds": rows.to_sparse()}, "`prompt_embeds` must be a dense tensor", {}),
        ({"prompt_embeds": rows.to("meta")}, "`prompt_embeds` must be a dense tensor", {}),
        ({"prompt_embeds": rows.to(torch.complex64).conj()}, "`prompt_embeds` dtype complex64", {}),
        ({"prompt_embeds": rows, "prompt_token_ids": ids, "prompt_is_token_ids": [2] * len(ids)}, r"ids\[0\] is 2", {}),
        ({"prompt_embeds": rows[:, :9]}, "hidden_size 9 does not match the model's hidden_size 64", {}),
        ({"prompt_embeds": rows[0]}, "must be a 2D tensor", {}),
        ({"prompt_embeds": rows.long()}, "dtype int64 is not a floating-point type", {}),
        ({"prompt_embeds": "rows"}, "must be a tensor", {}),
        ({"prompt_embeds": rows[:0]}, "prompt cannot be empty", {}),
        ({"prompt_embeds": table[[5] * 96]}, "maximum model length of 96", {}),
        ({"prompt_embeds": rows, "prompt_token_ids": [1]}, "had different lengths prompt_token_ids=1", {}),
        ({"prompt_embeds": rows, "prompt_is_token_ids": [True]}, "needs prompt_token_ids", {}),
        ({"prompt_embeds": rows, "prompt_token_ids": ids, "prompt_is_token_ids": [True]}, "same length", {}),
        ({"prompt_token_ids": ids, "prompt_is_token_ids": [True] * len(ids)}, "no 'prompt_embeds'", {}),
        ({"prompt_embeds": rows}, "prompt_logprobs is not compatible", {"prompt_logprobs": 1}),
    ]
    with LLM(folder, **ENGINE) as llm:
        for prompt, words, more in cases:
            with pytest.raises(InvalidRequestError, match=words):
                llm.generate(prompt, SamplingParams(max_tokens=2, **more), use_tqdm=False)
        expected = heard(llm, [{"prompt_token_ids": ids}])
        for same in (rows.double(), torch._neg_view(-rows)):
            assert heard(llm, [{"prompt_embeds": same}]) == expected
        (whole,) = llm.generate({"prompt_embeds": rows, "prompt_token_ids": ids}, GREEDY, use_tqdm=False)
        assert list(whole.prompt_token_ids) == [0] * len(ids)  # where a row stands, whatever was given


def test_values_too_large_for_the_models_type_are_refused(folders: Path) -> None:
    folder = checkpoint(folders)
    largest = torch.full((2, table_of(folder).shape[1]), 65519.0)
    with LLM(folder, **ENGINE | {"dtype": "float16"}) as llm:
        for given in (largest + 1, largest.double() * 1e300, largest.bfloat16()):
            with pytest.raises(InvalidRequestError, match="row 0 has a value that is not finite in float16") as caught:
                llm.generate({"prompt_embeds": given}, GREEDY, use_tqdm=False)
            assert caught.value.parameter == "prompt_embeds"
    values = tensor_of(largest)
    assert first_not_finite(values, "float16") is None
    most = torch.finfo(torch.float32).max
    for value in (3.3961e38, 3.3962e38, most):
        given = torch.full((1, 1), value)
        finite = bool(given.bfloat16().isfinite().all())
        assert (first_not_finite(tensor_of(given), "bfloat16") is None) == finite


def test_several_outputs_beams_and_truncation_read_the_embeddings_too(folders: Path) -> None:
    from headrace import BeamSearchParams

    folder = checkpoint(folders)
    table = table_of(folder)
    ids = PROMPTS[3]
    sampled = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=6, logprobs=0)
    with LLM(folder, **ENGINE) as llm:
        given, tokens = {"prompt_embeds": table[ids]}, {"prompt_token_ids": ids}
        assert heard(llm, [given], sampled) == heard(llm, [tokens], sampled)
        (last,) = llm.generate(given, SamplingParams(truncate_prompt_tokens=7, max_tokens=5), use_tqdm=False)
        assert len(last.prompt_token_ids) == 7
        short = SamplingParams(truncate_prompt_tokens=7, max_tokens=5, temperature=0.0, logprobs=1)
        assert heard(llm, [given], short) == heard(llm, [tokens], short)
        beams = BeamSearchParams(beam_width=2, max_tokens=4)
        found, expected = (llm.beam_search([prompt], beams)[0].sequences for prompt in (given, tokens))
        assert [each.tokens[len(ids) :] for each in found] == [each.tokens[len(ids) :] for each in expected]


def test_without_the_option_they_are_refused_and_a_model_that_reads_token_ids_in_its_layers_refuses_it(
    folders: Path,
) -> None:
    folder = checkpoint(folders)
    words = "You must set `--enable-prompt-embeds` to input `prompt_embeds`"
    with (
        LLM(folder, **ENGINE | {"enable_prompt_embeds": False}) as llm,
        pytest.raises(InvalidRequestError, match=words),
    ):
        llm.generate({"prompt_embeds": table_of(folder)[[5, 6]]}, GREEDY)
    for name, kind in (("gemma3n", FAMILIES["gemma3n"]), ("deepseek_v4", MIXTURES["deepseek_v4"])):
        tiny_models.make(kind).save_pretrained(folders / name)
        with pytest.raises(OptionError, match=r"enable_prompt_embeds: .* the token ids"):
            LLM(str(folders / name), **ENGINE)


def test_a_part_of_a_conversation_stands_where_the_template_writes_it(tmp_path: Path) -> None:
    folder = str(tiny_models.save("llama", tmp_path / "llama", tokenizer=True))
    table, ids = table_of(folder), [30, 31, 32, 33, 34]
    file = io.BytesIO()
    torch.save(table[ids], file)
    part = {"type": "prompt_embeds", "data": base64.b64encode(file.getvalue()).decode()}
    content = [{"type": "text", "text": "say "}, part, {"type": "text", "text": " now"}]
    conversation = [{"role": "user", "content": content}]
    joined = "{% for m in messages %}[{% for p in m.content %}{{ p.text }}{% endfor %}]{% endfor %}"
    dropping = "{% for m in messages %}[{% for p in m.content[:1] %}{{ p.text }}{% endfor %}]{% endfor %}"
    with LLM(folder, **ENGINE | {"skip_tokenizer_init": False}) as llm:
        (answer,) = llm.chat(conversation, GREEDY, chat_template=joined, use_tqdm=False)
        tokens = list(answer.prompt_token_ids)
        start = next(at for at in range(len(tokens)) if tokens[at : at + 5] == [0] * 5)
        assert 0 < start < len(tokens) - 5
        tokens[start : start + 5] = ids
        (expected,) = llm.generate({"prompt_token_ids": tokens}, GREEDY, use_tqdm=False)
        assert answer.outputs[0].token_ids == expected.outputs[0].token_ids
        assert answer.outputs[0].cumulative_logprob == expected.outputs[0].cumulative_logprob
        with pytest.raises(InvalidRequestError, match="Expected 1 prompt_embeds placeholder spans"):
            llm.chat(conversation, GREEDY, chat_template=dropping, use_tqdm=False)
