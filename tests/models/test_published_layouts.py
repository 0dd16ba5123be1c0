"""Architectures that transformers has no code of, from checkpoints laid out as published, against the model that
computes the same: token by token, with chunked prefill, preemption and the prefix cache at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import published_models
import pytest
import tiny_models
import torch
from all_at_once import TIGHT, generate_all_at_once, shared_prefix
from odd_scheduling import KnowingDrafter
from published_models import PUBLISHED
from rank_threads import RankThreads, pool_for_each_rank
from thinned import every, thinned
from transformers import AutoConfig, AutoModelForCausalLM

from headrace import LLM, SamplingParams
from headrace.core.schedule.features import drafts
from headrace.executor.cpu import rank as cpu_rank
from headrace.executor.cpu.decoder import why_not
from headrace.executor.models.families import spec_from_config
from headrace.executor.models.families._model_types import COMPUTED_BY
from headrace.ipc.failure import OptionError

__all__ = ["pool_for_each_rank"]  # a fixture for all of these tests

THREADS = f"{RankThreads.__module__}:{RankThreads.__name__}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


@cache
def saved(folder: Path, name: str) -> Path:
    return published_models.save(name, folder / name)


@cache
def twin_of(name: str) -> Any:
    return published_models.twin_of(name)


def expect_answers_of_twin(folder: Path, name: str, **options: Any) -> None:
    twin = twin_of(name)
    expect_answers(
        saved(folder, name),
        lambda prompt, answer: published_models.expected_logits(name, twin, prompt, answer),
        **options,
    )


def expect_answers(path: Path, logits_of: Callable[[list[int], list[int]], torch.Tensor], **options: Any) -> None:
    """logits_of: a prompt and its answer, after the prompt and after each token of the answer but the last."""
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    groups = tiny_models.cache_groups_of(path, TIGHT["max_model_len"], TIGHT["block_size"])
    blocks = tiny_models.blocks_of_one_request(path, TIGHT) + 2 + sum(group.pages or 2 for group in groups)
    with LLM(str(path), **TIGHT, num_gpu_blocks_override=blocks, **options) as llm:
        outputs = generate_all_at_once(llm, shared_prefix(128), params)
        (again,) = llm.generate(shared_prefix(128)[2:], params, use_tqdm=False)
    for prompt, output in zip([*shared_prefix(128), shared_prefix(128)[2]], [*outputs, again], strict=True):
        answer = list(output.outputs[0].token_ids)
        assert answer == logits_of(prompt, answer).argmax(-1).tolist()
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
    # Where rows keep states there is no room for the copies of them that a prefix needs.
    assert again.num_cached_tokens or any(group.pages for group in groups)
    assert len({token for output in outputs for token in output.outputs[0].token_ids}) > 10


REASONS = {
    "k2_horizon_mova": "the program has no op for NormedHeads.",
    "longcat_flash_ngram": "the program embeds tokens alone, not n-grams.",
}
"""Why some run op by op."""


@pytest.mark.parametrize("name", every(3, PUBLISHED))
def test_an_engine_gives_the_tokens_of_the_same_model_in_transformers(folder: Path, name: str) -> None:
    reason = why_not(spec_from_config(published_models.config_of(name)), torch.float32)
    assert reason == REASONS.get(name, "")
    expect_answers_of_twin(folder, name)


ONE_STAGE = ("iquest_loopcoder",)
"""Models whose later layers read the cache of the first one."""


def cases(names: Iterable[str], *kinds: str) -> list[tuple[str, str]]:
    """Each name with each kind of ranks that it has."""
    return [(name, kind) for name in names for kind in kinds if kind != "pipeline" or name not in ONE_STAGE]


@pytest.mark.system
@pytest.mark.parametrize(("name", "kind"), cases(PUBLISHED, "tensor", "pipeline"))
def test_two_ranks_give_the_tokens_of_the_same_model_in_transformers(folder: Path, name: str, kind: str) -> None:
    ranks = {f"{kind}_parallel_size": 2, "distributed_executor_backend": THREADS}
    expect_answers_of_twin(folder, name, **ranks)


@pytest.mark.parametrize("name", [name for name, each in PUBLISHED.items() if each.logits is not None])
def test_logits_that_are_scaled_or_capped_give_the_probabilities_of_the_same_model(folder: Path, name: str) -> None:
    prompt = shared_prefix(128)[0]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=3)
    with LLM(str(saved(folder, name)), **TIGHT) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    found = output.outputs[0]
    assert found.logprobs is not None
    expected = published_models.expected_logits(name, twin_of(name), prompt, list(found.token_ids)).log_softmax(-1)
    for position, each in enumerate(found.logprobs):
        for token, given in each.items():
            assert given.logprob == pytest.approx(expected[position, token].item(), abs=1e-4)


OWN_OPS = (
    "arctic",
    "grok_1",
    "grok_2",
    "k2_horizon_dense",
    "pangu_pro",
    "rnj1",
    "solar",
    "step1",
    "step3",
    "iquest_loopcoder",
    "plamo2",
)
"""Models with ops that no model of transformers has, and whose forms op by op nothing else compares."""


KINDS = ("no", "tensor", "pipeline")


def is_kept(case: tuple[str, str]) -> bool:
    """Each name, and each kind."""
    name, kind = case
    at = OWN_OPS.index(name) % 3
    return kind == (KINDS[at] if name not in ONE_STAGE else "tensor")


@pytest.mark.parametrize(("name", "kind"), thinned(cases(OWN_OPS, *KINDS), is_kept))
def test_layers_op_by_op_give_the_tokens_of_the_same_model_in_transformers(
    folder: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_rank, "why_not", lambda spec, dtype, place: "the test says so.")
    ranks = {f"{kind}_parallel_size": 2, "distributed_executor_backend": THREADS}
    expect_answers_of_twin(folder, name, **({} if kind == "no" else ranks))


@pytest.mark.parametrize("name", ONE_STAGE)
def test_a_model_that_stages_cannot_share_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(OptionError, match=r"read the cache of its first layer.*: pipeline_parallel_size must be 1"):
        expect_answers_of_twin(folder, name, pipeline_parallel_size=2, distributed_executor_backend=THREADS)


@pytest.mark.usefixtures("drafts_at_any_cost")
def test_embeddings_of_n_grams_read_drafts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens before a draft are drafts, too, of which every fourth is wrong."""
    path, count = saved(folder, "longcat_flash_ngram"), 20
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    engine = {**TIGHT, "max_num_seqs": 1, "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    prompt, twin = shared_prefix(128)[0][:30], twin_of("longcat_flash_ngram")
    answer: list[int] = []
    while len(answer) < count:
        logits = published_models.expected_logits("longcat_flash_ngram", twin, prompt, [*answer, 0])
        answer.append(int(logits[-1].argmax()))
    drafter = KnowingDrafter([prompt + answer], lambda tokens, first: tokens + (np.arange(len(tokens)) % 4 == 3))
    monkeypatch.setattr(drafts, "drafter_of", lambda _: drafter)
    with LLM(str(path), **engine) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        assert llm.get_stats().num_accepted_tokens > 8
    assert list(output.outputs[0].token_ids) == answer


COMPUTED_BY_OTHERS: dict[str, dict[str, Any]] = {
    "exaone": {"num_key_value_heads": 2},
    "sarvam_moe": {"num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 8},
    "sarvam_mla": {
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "moe_intermediate_size": 32, "num_experts": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", COMPUTED_BY_OTHERS)
def test_a_folder_names_the_class_of_another_family_that_computes_it(kind: str, tmp_path: Path) -> None:
    """As transformers saves it: with the other class's architecture, and the model's own names of weights."""
    torch.manual_seed(0)
    own = {**published_models.SMALL, "initializer_range": 0.2, "pad_token_id": None, **COMPUTED_BY_OTHERS[kind]}
    config = AutoConfig.for_model(kind, num_hidden_layers=3, num_attention_heads=4, **own)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_()
    model.save_pretrained(tmp_path / "model")

    @torch.inference_mode()
    def logits_of(prompt: list[int], answer: list[int]) -> torch.Tensor:
        found: torch.Tensor = model(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0]
        return found[len(prompt) - 1 :]

    named = json.loads((tmp_path / "model" / "config.json").read_text())
    assert named["architectures"] == [COMPUTED_BY[kind]]
    expect_answers(tmp_path / "model", logits_of)
