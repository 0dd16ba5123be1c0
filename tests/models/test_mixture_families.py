"""Families with experts or latent attention against transformers, from the files that it saves: token by token, with
chunked prefill, preemption and the prefix cache at once."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from all_at_once import TIGHT, generate_all_at_once, shared_prefix
from model_driver import DictSource
from rank_threads import RankThreads, pool_for_each_rank
from test_models import config_of, reference, reference_logits
from tiny_mixtures import FAMILIES
from tiny_models import state_of
from torch import Tensor

from headrace import LLM, SamplingParams
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.executor.parallel.rank_place import RankPlace
from headrace.ipc.failure import OptionError

__all__ = ["pool_for_each_rank"]  # a fixture for all of these tests

THREADS = f"{RankThreads.__module__}:{RankThreads.__name__}"
NEW_TOKENS = 10


class Counting(DictSource):
    """Notes which tensors are read."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.read: set[str] = set()

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        self.read.add(name)
        return super().get(name, rows, columns)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@cache
def model_of(name: str) -> Any:
    return tiny_models.make(FAMILIES[name])


@cache
def saved(folder: Path, name: str) -> Path:
    model_of(name).save_pretrained(folder / name)
    return folder / name


def expect_answers_of_transformers(folder: Path, name: str, **options: Any) -> None:
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    path = saved(folder, name)
    has_windows = len(tiny_models.cache_groups_of(path, TIGHT["max_model_len"])) > 1
    blocks = tiny_models.blocks_of_one_request(path, TIGHT) + (6 if has_windows else 4)
    with LLM(str(path), **TIGHT, num_gpu_blocks_override=blocks, **options) as llm:
        outputs = generate_all_at_once(llm, shared_prefix(128), params)
        assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
        (again,) = llm.generate(shared_prefix(128)[:1], params, use_tqdm=False)
    assert again.num_cached_tokens
    outputs.append(again)
    for prompt, output in zip([*shared_prefix(128), shared_prefix(128)[0]], outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        assert answer == reference_logits(model_of(name), prompt, answer).argmax(-1).tolist()
    assert len({token for output in outputs for token in output.outputs[0].token_ids}) > NEW_TOKENS


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_transformers(folder: Path, name: str) -> None:
    expect_answers_of_transformers(folder, name)


@pytest.mark.system
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_two_ranks_give_the_tokens_of_transformers(folder: Path, name: str, kind: str) -> None:
    ranks = {f"{kind}_parallel_size": 2, "distributed_executor_backend": THREADS}
    expect_answers_of_transformers(folder, name, **ranks)


EXPERT_PARALLEL = {
    "tensor_parallel_size": 2, "distributed_executor_backend": THREADS, "enable_expert_parallel": True
}  # fmt: skip


@pytest.mark.parametrize("name", ["glm4_moe", "gpt_oss", "llama4"])
def test_ranks_that_have_whole_experts_answer_as_transformers_does(folder: Path, name: str) -> None:
    """As one program and op by op; four experts of each rank, and shared experts that are divided by rows."""
    expect_answers_of_transformers(folder, name, **EXPERT_PARALLEL)


@pytest.mark.parametrize("name", ["glm4_moe", "llama4"])
def test_neighbours_among_experts_may_be_of_different_ranks(folder: Path, name: str) -> None:
    """As one program and op by op."""
    expect_answers_of_transformers(folder, name, **EXPERT_PARALLEL, expert_placement_strategy="round_robin")


def test_expert_parallelism_that_would_divide_nothing_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="needs tensor_parallel_size=2 or more"):
        LLM(str(saved(folder, "glm4_moe")), **TIGHT, enable_expert_parallel=True)
    with pytest.raises(OptionError, match="expert_placement_strategy=round_robin is of experts that are divided whole"):
        LLM(str(saved(folder, "glm4_moe")), **TIGHT, expert_placement_strategy="round_robin")
    with pytest.raises(OptionError, match="a LlamaForCausalLM has no experts to divide"):
        LLM(str(tiny_models.save("llama", tmp_path / "llama")), **TIGHT, **EXPERT_PARALLEL)


@pytest.mark.parametrize(("in_turn", "experts"), [(False, [[0, 1], [2, 3, 4]]), (True, [[0, 2, 4], [1, 3]])])
def test_a_rank_reads_its_own_experts_alone(folder: Path, in_turn: bool, experts: list[list[int]]) -> None:
    spec, state = spec_from_config(config_of("mixtral")), state_of(reference("mixtral"))
    read = []
    for rank in range(2):
        place = RankPlace(rank, 2, expert_parallel=True, experts_in_turn=in_turn)
        source = Counting(state)
        Decoder(spec, source, torch.float32, place=place)
        numbers = {int(each.split(".experts.")[1].split(".")[0]) for each in source.read if ".experts." in each}
        read.append(sorted(numbers))
    assert read == experts


@pytest.mark.system
@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_answer_as_transformers_does(folder: Path, name: str) -> None:
    expect_answers_of_transformers(folder, name, tensor_parallel_size=2, distributed_executor_backend=THREADS)
