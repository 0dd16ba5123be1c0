"""Ranks on GPUs, the CPU in each GPU's place and gloo in NCCL's: together they answer as one does, in graphs too."""

from __future__ import annotations

import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from gpu_rank_threads import GpuRankThreads

from headrace import LLM, SamplingParams
from headrace.core.options.engine_options import Options

RANKS: dict[str, Any] = {"cudagraph_capture_sizes": [4]}
THREADS = f"{GpuRankThreads.__module__}:{GpuRankThreads.__name__}"
# Little memory and small steps: prompts are read in chunks, and requests give way to each other.
TIGHT: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
    "max_model_len": 96,
    "skip_tokenizer_init": True,
}
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PARAMS = [
    GREEDY,
    SamplingParams(max_tokens=9, temperature=1.5, seed=3, top_p=0.9, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.8, seed=4, top_k=5, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(max_tokens=8, temperature=0, logprobs=3, prompt_logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=1.0, seed=5, min_tokens=5),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def saved(folder: Path, name: str) -> Path:
    return tiny_models.save(name, folder / name)


def prompts_of(lengths: tuple[int, ...] = (41, 2, 30, 17, 23)) -> list[list[int]]:
    """The third goes on as the first does, for the prefix cache."""
    numbers = random.Random(7)
    prompts = [[numbers.randrange(2, tiny_models.VOCAB_SIZE) for _ in range(length)] for length in lengths]
    prompts[2][:24] = prompts[0][:24]
    return prompts


def generate(model: Path, **options: Any) -> list[list[int]]:
    """Twice: the second time, graphs are there from the beginning."""
    blocks = tiny_models.blocks_of_one_request(model, TIGHT) + 12
    with LLM(str(model), in_process=True, **(TIGHT | {"num_gpu_blocks_override": blocks} | options)) as llm:
        outputs = [each for _ in range(2) for each in llm.generate(prompts_of(), PARAMS, use_tqdm=False)]
    return [list(output.outputs[0].token_ids) for output in outputs]


@cache
def alone(folder: Path, name: str) -> list[list[int]]:
    return generate(saved(folder, name), device="cpu")


@pytest.mark.parametrize(
    ("name", "tp_size", "pp_size"),
    [
        pytest.param("llama", 2, 1, marks=pytest.mark.system),
        pytest.param("gemma3", 1, 2, marks=pytest.mark.system),
        ("qwen3", 2, 2),
    ],
)
def test_ranks_on_gpus_answer_like_one_process(folder: Path, name: str, tp_size: int, pp_size: int) -> None:
    sizes = {"tensor_parallel_size": tp_size, "pipeline_parallel_size": pp_size}
    assert generate(saved(folder, name), distributed_executor_backend=THREADS, **RANKS, **sizes) == alone(folder, name)
    ranks = GpuRankThreads.latest.ranks
    for rank in ranks:
        assert rank.most_in_flight == 2
        assert rank.recorder.num_replays > 5
    assert len({rank.recorder.num_replays for rank in ranks}) == 1, "ranks run the same graphs"


@pytest.mark.system
@pytest.mark.usefixtures("drafts_at_any_cost")
def test_ranks_on_gpus_speculate_with_the_tokens_of_one_process(folder: Path) -> None:
    def answers(**options: Any) -> tuple[list[list[int]], int]:
        prompts = [([7, 8, 9 + index] * 8)[: 9 + 4 * index] for index in range(4)]
        params = [
            SamplingParams(max_tokens=40, temperature=0.7 * (index % 2), seed=index, allowed_token_ids=[20, 21, 22],
                           repetition_penalty=1.1 if index == 2 else 1.0, logprobs=1 if index > 1 else None)
            for index in range(4)
        ]  # fmt: skip
        with LLM(str(saved(folder, "llama")), in_process=True, **(TIGHT | options)) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs], llm.get_stats().num_accepted_tokens

    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    found = answers(distributed_executor_backend=THREADS, speculative_config=config, **RANKS, **sizes)
    assert found[0] == answers(device="cpu")[0]
    assert found[1] > 5


class OneCannotCapture(GpuRankThreads):
    """The second rank runs out of memory at its second graph; the first measures."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.ranks[1].recorder._fail_at = 2


@pytest.mark.system
def test_a_graph_that_one_rank_cannot_capture_is_used_by_none(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    sys.modules.setdefault("test_gpu_parallel", sys.modules[__name__])
    backend = f"test_gpu_parallel:{OneCannotCapture.__name__}"
    found = generate(saved(folder, "llama"), distributed_executor_backend=backend, **RANKS, pipeline_parallel_size=2)
    assert found == alone(folder, "llama")
    lines = sorted(
        line.message.rpartition(": ")[2] for line in caplog.records if "run without a CUDA graph" in line.message
    )
    assert lines == ["CUDA out of memory. Tried to allocate 2.00 GiB", "another rank could not capture it"]
