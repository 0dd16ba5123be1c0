"""A multiproc executor without an engine: tests start it, step it with hand-written plans and inspect it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import psutil
from null_rank import WORKER_CLS
from patience import wait_until
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


class Leftovers(NamedTuple):
    """What this process has open: the targets of descriptors by number, child processes, files in shared memory."""

    descriptors: dict[int, str]
    children: set[int]
    shared: set[str]

    def beyond(self, before: Leftovers) -> Leftovers:
        """What is here and was not before. Descriptors only if there are more of them: earlier tests may have left some
        that are closed meanwhile, by the garbage collector or by threads that open others."""
        new = {
            number: target for number, target in self.descriptors.items() if before.descriptors.get(number) != target
        }
        is_more = len(self.descriptors) > len(before.descriptors)
        return Leftovers(new if is_more else {}, self.children - before.children, self.shared - before.shared)


def leftovers() -> Leftovers:
    descriptors = {}
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            descriptors[number] = os.readlink(f"/proc/self/fd/{number}")
    children = {each.pid for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE}
    return Leftovers(descriptors, children, shared_files())


def shared_files() -> set[str]:
    """Ours in /dev/shm, but for the folder that a user has there where /tmp cannot be written."""
    return {name for name in os.listdir("/dev/shm") if "headrace" in name} - {f"headrace-{os.getuid()}"}


def wait_until_nothing_is_left(before: Leftovers) -> None:
    """Waits until nothing is here that was not before."""
    wait_until(
        lambda: not any(leftovers().beyond(before)), 5.0, lambda: f"nothing left, but {leftovers().beyond(before)},"
    )
