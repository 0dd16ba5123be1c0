"""A GpuRank on the simulated GPU and a CPU rank, driven by the same plans."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_parts import HostBackend
from plan_maker import PlanMaker
from pretend_cuda import DEVICE, GPU

from headrace.core.options.engine_options import Options
from headrace.core.options.resolve import resolve
from headrace.executor.cpu.rank import CpuRank
from headrace.executor.gpu.hardware.device import GpuFacts
from headrace.executor.gpu.rank import GpuRank
from headrace.executor.placement.in_process import InProcessExecutor
from headrace.ipc.adapters import RowAdapter
from headrace.kernels.registry import choose_reference

NUM_BLOCKS = 128
BLOCK_SIZE = 4
NEW_TOKENS = 6


class PretendGpu(InProcessExecutor):
    """For the option distributed_executor_backend: a GpuRank on the simulated GPU."""

    def __init__(self, options: Options) -> None:
        super().__init__(options, GpuRank(options, DEVICE))


@dataclass
class Request:
    prompt: list[int]
    sampling: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    adapters: tuple[RowAdapter, ...] = ()


@dataclass
class Answers:
    """The results of a run."""

    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[tuple[int, list[int], list[float]]] = field(default_factory=list)
    """(row, token ids, values); within a step those of prompts come first."""
    submit_syncs: list[str] = field(default_factory=list)
    collect_syncs: list[str] = field(default_factory=list)
    num_replays: int = 0


def executor_for(folder: Path, where: str = "gpu", **options: Any) -> Any:
    """Makes a rank that is loaded and has its blocks allocated.

    where: `gpu` is the simulated GPU; `cpu` the CPU's own path; `reference` the GPU's path with references on the CPU.
    """
    settings: dict[str, Any] = {
        "dtype": "float32", "block_size": BLOCK_SIZE, "max_num_seqs": 4, "max_model_len": 64,
        "max_num_batched_tokens": 16, "cudagraph_capture_sizes": () if where == "cpu" else (2, 4), **options,
    }  # fmt: skip
    asked = Options(model=str(folder), skip_tokenizer_init=True, **settings)
    if where == "gpu":
        executor: Any = GpuRank(asked, DEVICE)
    elif where == "cpu":
        executor = CpuRank(asked)
    else:
        backend = HostBackend(GpuFacts("NVIDIA H200", (9, 0), 8 << 30, 7 << 30))
        executor = GpuRank(asked, torch.device("cpu"), backend)
        executor.choose = _choose
    plan = resolve(asked, executor.describe(_ignore))
    executor.load(plan, _ignore)
    executor.allocate(NUM_BLOCKS, 64)
    torch.set_num_threads(1)  # undoes the CPU path's setting of all cores, which such small matrices do not need
    return executor


def _choose(op: str, **_: Any) -> Any:
    """Chooses the references. That of fp8 is wrapped, since the path would otherwise conclude that no fast version
    exists."""
    found = choose_reference(op)
    return partial(found) if op == "linear_fp8_dynamic" else found


def _ignore(*_: Any, **__: Any) -> None:
    pass


def drive(executor: Any, requests: list[Request], ahead: int, new_tokens: int = NEW_TOKENS) -> Answers:
    """Runs the requests until each has new_tokens, with `ahead` steps in flight. One request enters per step; the first
    one's prompt is computed in two chunks."""
    maker, answers, replays_before = PlanMaker.of(executor._plan, NUM_BLOCKS), Answers(), GPU.num_replays
    in_flight: deque[tuple[Any, list[int]]] = deque()

    def read() -> None:
        rows, columns = in_flight.popleft()
        GPU.syncs.clear()
        result = executor.collect()
        answers.collect_syncs += GPU.syncs
        assert not result.failures, result.failures[0].failure.message
        assert result.rows.tolist() == rows.tolist()
        for row, column, token in zip(rows.tolist(), columns, result.token_ids.tolist(), strict=True):
            maker.tokens[row][column] = token
        for run in result.prompt_logprobs:
            _add(answers, [run.row] * len(run.rows.ranks.numpy()), run.rows)
        if result.logprobs is not None:
            _add(answers, rows[result.logprob_indices].tolist(), result.logprobs)

    for step in range(100):
        if step < len(requests):
            request = requests[step]
            sampling = {"temperature": 0.0} | request.sampling
            maker.enter(step, list(request.prompt), seed=request.seed, adapters=request.adapters, **sampling)
        for row, tokens in maker.tokens.items():
            if len(tokens) < len(requests[row].prompt) + new_tokens:
                maker.compute(row, 4 if step == row == 0 else None)
        plan = maker.plan()
        if not len(plan.rows):
            break
        GPU.syncs.clear()
        executor.submit(plan)
        answers.submit_syncs += GPU.syncs
        rows = plan.rows[plan.sampled]
        in_flight.append((rows, [len(maker.tokens[row]) for row in rows.tolist()]))
        for row in rows.tolist():
            maker.tokens[row].append(-1)
        if len(in_flight) == ahead:
            read()
    while in_flight:
        read()
    answers.num_replays = GPU.num_replays - replays_before
    answers.tokens = [maker.tokens[row] for row in range(len(requests))]
    for row in range(len(requests)):
        maker.release(row)
    executor.submit(maker.plan())
    executor.collect()
    return answers


def _add(answers: Answers, rows: list[int], told: Any) -> None:
    ids, values = told.token_ids.numpy(), told.logprobs.numpy()
    answers.logprobs += [(row, ids[i].tolist(), values[i].tolist()) for i, row in enumerate(rows)]
