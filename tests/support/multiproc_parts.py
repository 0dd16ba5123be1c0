"""A multiproc executor without an engine: tests start it, step it with hand-written plans and inspect it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from null_rank import WORKER_CLS
from plan_maker import PlanMaker

from headrace.core.options.engine_options import Options
from headrace.core.options.memory import fit_cache
from headrace.core.options.plan import Facts, Plan
from headrace.core.options.resolve import resolve
from headrace.executor.placement.base import Executor
from headrace.executor.placement.multiproc import MultiprocExecutor
from headrace.ipc.failure import Failure
from headrace.ipc.step import StepResult

HERE = str(Path(__file__).parent)


def options(tp_size: int = 2, pp_size: int = 1, *, step_timeout: float = 30.0, **overrides: Any) -> Options:
    """Options of an engine whose ranks are NullRank; `overrides` are their fields, see null_rank."""
    return Options(
        model="null",
        skip_tokenizer_init=True,
        distributed_executor_backend="mp",
        worker_cls=WORKER_CLS,
        tensor_parallel_size=tp_size,
        pipeline_parallel_size=pp_size,
        step_timeout=step_timeout,
        hf_overrides=overrides,
        max_num_seqs=8,
    )


def bring_up(
    executor: Executor, asked: Options, report: Callable[[str], None] = lambda phase: None
) -> tuple[Plan, Facts]:
    """Describes, loads and allocates, as an engine core does before its first step."""
    plan = resolve(asked, executor.describe(report))
    facts = fit_cache(plan, executor.load(plan, report))
    executor.allocate(facts.num_blocks, facts.max_model_len)
    return plan, facts


class Ranks:
    """A started executor. If it is the only one (is_alone), leaving the `with` block checks that no descriptors, child
    processes or shared memory are left."""

    def __init__(self, asked: Options, *, is_alone: bool = True) -> None:
        self.options = asked
        self.failures: list[Failure] = []
        self.maker = PlanMaker(block_size=16)
        self._before = leftovers() if is_alone else None

    def __enter__(self) -> Ranks:
        self.executor = MultiprocExecutor(self.options)
        self.executor.watch(self.failures.append)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.executor.stop()
        self.executor.stop()  # twice is allowed
        if error is None and self._before is not None:
            wait_until_nothing_is_left(self._before)

    def bring_up(self, report: Callable[[str], None] = lambda phase: None) -> Ranks:
        bring_up(self.executor, self.options, report)
        return self

    def pid(self, rank: int) -> int:
        return self.executor._group.children[rank].pid

    def submit(self) -> None:
        """Submits one more step of one row."""
        if not self.maker.tokens:
            self.maker.enter(0, [5, 6, 7])
        self.maker.compute(0)
        self.executor.submit(self.maker.plan())
        self.maker.tokens[0].append(0)  # any token: the null model does not depend on it

    def step(self) -> StepResult:
        self.submit()
        return self.executor.collect()


def leftovers() -> tuple[int, int, list[str]]:
    """The numbers of open descriptors and child processes, and Headrace's files in shared memory."""
    children = [c for c in psutil.Process().children() if c.status() != psutil.STATUS_ZOMBIE]
    shared = sorted(name for name in os.listdir("/dev/shm") if "headrace" in name)
    return len(os.listdir("/proc/self/fd")), len(children), shared


def wait_until_nothing_is_left(before: tuple[int, int, list[str]]) -> None:
    """Waits until there are no more leftovers than before. There may be fewer, since garbage collection closes those of
    earlier tests."""
    what = f"no more than {before}; there is {leftovers()}"

    def nothing_more() -> bool:
        descriptors, children, shared = leftovers()
        return descriptors <= before[0] and children <= before[1] and set(shared) <= set(before[2])

    wait_until(nothing_more, 5.0, what)


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Waits for the condition. Returns the seconds that it took."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < timeout_s, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.01)
    return time.monotonic() - began_s
