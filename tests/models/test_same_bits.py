"""A request's logits have the same bits however its steps are planned: in chunks of any size, with the prefix cache or
without, preempted at any step, with right and wrong drafts, alone or in a batch, on one thread or two. Those of models
that run op by op are near."""

from __future__ import annotations

import itertools
import random
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import published_models
import pytest
import tiny_models
from all_at_once import generate_all_at_once
from odd_scheduling import KnowingDrafter, PreemptingScheduler
from tiny_families import FAMILIES as DENSE
from tiny_mixtures import FAMILIES as MIXTURES
from tiny_models import TINY_MODELS, TinyModel
from tiny_recurrent import FAMILIES as RECURRENT

from headrace import LLM, SamplingParams
from headrace.core.schedule.features import drafts

MODELS: dict[str, TinyModel | str] = {
    "dense": TINY_MODELS["llama"],
    "windowed": TINY_MODELS["mistral_window"],
    "inputs of each layer and shared caches": DENSE["gemma4"],
    "keys as values": DENSE["gemma4_dense"],
    "experts beside a dense FFN": DENSE["gemma4_experts"],
    "rows of hidden values": DENSE["gemma3n"],
    "residuals that skip layers": "solar",
    "ALiBi of the root": "step1",
    "scores that grow": "grok_2",
    "chunks": "rnj1",
    "experts of the input": "arctic",
    "norms of groups": "k2_horizon_dense",
    "sinks with values": "pangu_pro",
    "factorised queries": "step3",
    "two caches": "iquest_loopcoder",
    "projected states": "plamo2",
    "latent": MIXTURES["minicpm3"],
    "latent and experts": TINY_MODELS["deepseek_v3_moe"],
    "short convolutions": RECURRENT["lfm2"],
    "short convolutions and experts": RECURRENT["lfm2_moe"],
    "recurrent": RECURRENT["mamba2"],
    "gated delta rule": RECURRENT["qwen3_5"],
    "delta rule by channel": RECURRENT["kimi_linear"],
    "lightning": RECURRENT["minimax"],
    "selective scans": RECURRENT["jamba"],
    "attention beside recurrence": RECURRENT["falcon_h1"],
    "gated linear units": RECURRENT["recurrent_gemma"],
    "shared transformers": RECURRENT["zamba2"],
    "int8 keys beside states": RECURRENT["qwen3_5"],
    "fp8 latents beside states": RECURRENT["kimi_linear"],
    "relative biases": RECURRENT["inkling"],
    "n-grams and pools": RECURRENT["qwen4_exp"],
}
"""By what distinguishes them; those of `published_models` by name."""
CACHES = {"int8 keys beside states": "int8", "fp8 latents beside states": "fp8"}
"""Types of caches in which a row's keys lie beside its scales, in the pages that states share."""
ASKED = ("latent", "latent and experts", "delta rule by channel", "fp8 latents beside states")
"""Models that take one form of latent attention, whatever the chunk, only with batch_invariant."""
OP_BY_OP = ("relative biases", "n-grams and pools")
"""Models that no program computes: torch's products depend on the number of their rows, and so do the last bits."""
LENGTHS = (40, 1, 17, 33, 16, 50, 44)
NEW_TOKENS = 10
ENGINE: dict[str, Any] = {
    "dtype": "float32", "block_size": 8, "max_num_seqs": 7, "max_model_len": 64, "skip_tokenizer_init": True,
    "in_process": True, "logprobs_mode": "raw_logits", "max_logprobs": -1, "num_gpu_blocks_override": 240,
    "scheduler_cls": f"{PreemptingScheduler.__module__}:{PreemptingScheduler.__name__}",
}  # fmt: skip
PARAMS = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=-1)
DRAFTS = {
    "right": lambda tokens, position: tokens,
    "wrong": lambda tokens, position: (tokens + 1) % 100,
    "some right": lambda tokens, position: np.where(np.arange(len(tokens)) < position % 4, tokens, (tokens + 1) % 100),
}


class Plan(NamedTuple):
    """How the steps of a run differ from those of the plain one."""

    chunk: int = 1024
    caches: bool = False
    preempts_at: frozenset[int] = frozenset()
    drafts: str = ""
    together: bool = False
    threads: int = 1


def _preempted(seed: int) -> frozenset[int]:
    return frozenset([3, *random.Random(seed).sample(range(4, 40), 12)])


EVERY = [
    Plan(*each)
    for each in itertools.product(
        (1, 3, 16, 17, 1024),
        (False, True),
        (frozenset(), _preempted(1), _preempted(2)),
        ("", *DRAFTS),
        (False, True),
        (1, 2),
    )
]
SAMPLE = [
    Plan(chunk=3, caches=True, preempts_at=_preempted(1), drafts="some right"),
    Plan(chunk=17, caches=True, drafts="right", together=True, threads=2),
    Plan(chunk=1, preempts_at=_preempted(2), drafts="wrong"),
]
MANY = random.Random(5).sample(EVERY, 60)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def saved(folder: Path, name: str) -> Path:
    kind = MODELS[name]
    if isinstance(kind, str):
        return published_models.save(kind, folder / name)
    tiny_models.make(kind, vocab_size=128).save_pretrained(folder / name)
    return folder / name


def prompts() -> list[list[int]]:
    """The last begins with the first's 32 tokens."""
    numbers = random.Random(3)
    found = [[numbers.randrange(2, 128) for _ in range(length)] for length in LENGTHS]
    found[-1][:32] = found[0][:32]
    return found


Heard = list[tuple[list[int], np.ndarray]]
"""Of each request its tokens, and their logits [tokens, vocab_size]."""


def heard(outputs: list[Any]) -> Heard:
    found = []
    for output in outputs:
        (answer,) = output.outputs
        rows = [[each[token].logprob for token in sorted(each)] for each in answer.logprobs]
        found.append((list(answer.token_ids), np.array(rows)))
    return found


def run(path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch, texts: list[list[int]]) -> list[Heard]:
    """What the requests get; with the cache, of two passes."""
    monkeypatch.setenv("OMP_NUM_THREADS", str(plan.threads))
    monkeypatch.setattr(PreemptingScheduler, "preempts_at", plan.preempts_at)
    options: dict[str, Any] = {"batch_invariant": path.name in ASKED, "kv_cache_dtype": CACHES.get(path.name, "auto")}
    if plan.drafts:
        monkeypatch.setattr(drafts, "drafter_of", lambda _: KnowingDrafter(texts, DRAFTS[plan.drafts]))
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 4}
    if not plan.together:
        options["max_num_seqs"] = 1
    most = max(plan.chunk, 7 if plan.together else 1)
    engine = ENGINE | {"max_num_batched_tokens": most, "enable_prefix_caching": plan.caches} | options
    with LLM(str(path), **engine) as llm:
        passes = [heard(generate_all_at_once(llm, prompts(), PARAMS)) for _ in range(1 + plan.caches)]
        stats = llm.get_stats()
    assert bool(plan.preempts_at) == bool(stats.num_preemptions)
    has_room = most > 1  # a step of one token has none for drafts
    assert (stats.num_accepted_tokens > 0) == (has_room and plan.drafts in ("right", "some right"))
    return passes


@cache
def plain(path: Path) -> Heard:
    with pytest.MonkeyPatch.context() as monkeypatch:
        (found,) = run(path, Plan(), monkeypatch, [])
    return found


def expect_the_same_bits(path: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(path)
    texts = [prompt + answer for prompt, (answer, _) in zip(prompts(), expected, strict=True)]
    for found in run(path, plan, monkeypatch, texts):
        for (tokens, logits), (own_tokens, own_logits) in zip(found, expected, strict=True):
            assert tokens == own_tokens
            if path.name in OP_BY_OP:
                assert np.allclose(logits, own_logits, rtol=1e-4, atol=1e-4)
            else:
                assert np.array_equal(logits, own_logits)


def is_kept(place: int, name: str) -> bool:
    """Those that run op by op take as long as all others, and only have to be near: other tests tell their tokens."""
    return place % 2 == 0 and name not in OP_BY_OP


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, marks=[] if at == place % 3 and is_kept(place, name) else [pytest.mark.system])
        for place, name in enumerate(MODELS)
        for at, plan in enumerate(SAMPLE)
    ],
    ids=str,
)
@pytest.mark.usefixtures("drafts_at_any_cost")
def test_logits_do_not_depend_on_how_steps_are_planned(
    folder: Path, name: str, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    expect_the_same_bits(saved(folder, name), plan, monkeypatch)


@pytest.mark.system
@pytest.mark.parametrize("plan", MANY, ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("drafts_at_any_cost")
def test_logits_do_not_depend_on_any_plan(folder: Path, name: str, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    expect_the_same_bits(saved(folder, name), plan, monkeypatch)
