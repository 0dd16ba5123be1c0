"""RWKV-7 against its equations in float64: greedy tokens, with chunks that end anywhere, snapshots of states, drafts
and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rwkv_models
import torch
from all_at_once import TIGHT, generate_all_at_once, shared_prefix
from rank_threads import RankThreads, pool_for_each_rank

from headrace import LLM, SamplingParams
from headrace.executor.models.families import spec_from_config
from headrace.ipc.failure import ModelError

__all__ = ["pool_for_each_rank"]  # a fixture for all of these tests

THREADS = f"{RankThreads.__module__}:{RankThreads.__name__}"
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rwkv_models.save(tmp_path_factory.mktemp("rwkv"))


def expect_answers(prompts: list[list[int]], outputs: list[Any]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        logits = rwkv_models.logits(prompt + answer[:-1])[len(prompt) - 1 :]
        assert answer == logits.argmax(-1).tolist()
    assert len({token for output in outputs for token in output.outputs[0].token_ids}) > 8


def test_greedy_tokens_are_those_of_the_equations(folder: Path) -> None:
    """Of short and long prompts, in one step and in chunks that end anywhere."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, 128, (n,), generator=generator).tolist() for n in (1, 2, 15, 16, 17, 64, 65, 257, 700)]
    for tokens in (1024, 40):
        with LLM(str(folder), **(TIGHT | {"max_model_len": 768, "max_num_batched_tokens": tokens})) as llm:
            expect_answers(prompts, generate_all_at_once(llm, prompts, PARAMS))


@pytest.mark.system
@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}},
        {"tensor_parallel_size": 2, "distributed_executor_backend": THREADS},
    ],
    ids=["drafts", "ranks"],
)
def test_drafts_ranks_and_snapshots_change_no_token(folder: Path, options: dict[str, Any]) -> None:
    with LLM(str(folder), **TIGHT, **options) as llm:
        outputs = generate_all_at_once(llm, shared_prefix(128), PARAMS)
        (again,) = llm.generate(shared_prefix(128)[:1], PARAMS, use_tqdm=False)
    assert again.num_cached_tokens
    expect_answers([*shared_prefix(128), shared_prefix(128)[0]], [*outputs, again])


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"attn": {"layers": [1]}}, "attn has layers of attention"),
        ({"value_dim": [32, 48, 32]}, "value_dim differs"),
        ({"num_heads": 3}, "3 heads of 8 are not its hidden_size of 32"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"decay_low_rank_dim": 0}, "decays's rank must be at least 1"),
    ],
)
def test_what_its_configs_say_otherwise_is_refused(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        spec_from_config(rwkv_models.CONFIG | changed)
