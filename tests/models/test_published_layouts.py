"""Architectures that transformers has no code of, from checkpoints laid out as published, against the model that
computes the same: token by token, with chunked prefill, preemption and the prefix cache at once."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import published_models
import pytest
import tiny_models
import torch
from all_at_once import TIGHT, generate_all_at_once, shared_prefix
from published_models import PUBLISHED
from rank_threads import RankThreads, pool_for_each_rank

from headrace import LLM, SamplingParams
from headrace.executor.cpu.decoder import why_not
from headrace.executor.models.families import spec_from_config

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
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    path = saved(folder, name)
    num_groups = len(tiny_models.cache_groups_of(path, TIGHT["max_model_len"]))
    blocks = tiny_models.blocks_of_one_request(path, TIGHT) + 2 + 2 * num_groups
    with LLM(str(path), **TIGHT, num_gpu_blocks_override=blocks, **options) as llm:
        outputs = generate_all_at_once(llm, shared_prefix(128), params)
        (again,) = llm.generate(shared_prefix(128)[2:], params, use_tqdm=False)
    for prompt, output in zip([*shared_prefix(128), shared_prefix(128)[2]], [*outputs, again], strict=True):
        answer = list(output.outputs[0].token_ids)
        logits = published_models.expected_logits(name, twin_of(name), prompt, answer)
        assert answer == logits.argmax(-1).tolist()
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
    assert again.num_cached_tokens
    assert len({token for output in outputs for token in output.outputs[0].token_ids}) > 10


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_engine_gives_the_tokens_of_the_same_model_in_transformers(folder: Path, name: str) -> None:
    assert why_not(spec_from_config(published_models.config_of(name)), torch.float32) == ""
    expect_answers_of_twin(folder, name)


@pytest.mark.system
@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_two_ranks_give_the_tokens_of_the_same_model_in_transformers(folder: Path, name: str, kind: str) -> None:
    ranks = {f"{kind}_parallel_size": 2, "distributed_executor_backend": THREADS}
    expect_answers_of_twin(folder, name, **ranks)
