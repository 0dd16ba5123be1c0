"""Ranks as threads of the test process, which communicate through shared memory as ranks in processes do."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from headrace.core.options.engine_options import Options
from headrace.core.options.plan import MemoryReading, ModelDescription, Plan
from headrace.executor.cpu import decoder as cpu_decoder
from headrace.executor.cpu.rank import CpuRank
from headrace.executor.parallel.rank_place import (
    RankCoordinates,
    World,
    collectives_bytes,
    mark_failed,
    open_collectives,
)
from headrace.executor.parallel.rendezvous import Rendezvous
from headrace.executor.placement.base import Executor
from headrace.executor.rank import Report
from headrace.ipc.adapters import AdapterFacts
from headrace.ipc.messages import TokenizerBundle
from headrace.ipc.step import StepPlan, StepResult
from headrace.kernels.cpu.linear.linear import runtime

DEADLINE_S = 60


@pytest.fixture(autouse=True)
def pool_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each rank its own thread pool, as ranks in processes have: with a common pool, regions of different ranks
    would wait for each other. Applies to modules that import it.
    """
    monkeypatch.setattr(cpu_decoder, "runtime", runtime.__wrapped__)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")


def run_ranks(world: World, body: Callable[[RankCoordinates], Any], layer_partition: tuple[int, ...] = ()) -> list[Any]:
    """Runs `body` on every rank and returns the results. If one raises, the others stop waiting for it, and its error
    is raised."""
    fd = os.memfd_create("test")
    errors: list[BaseException] = []

    def one(rank: int) -> Any:
        try:
            link = open_collectives(fd, world, rank, deadline_s=DEADLINE_S)
            try:
                return body(
                    RankCoordinates.of(rank, world.tp_size, world.pp_size, layer_partition).with_collectives(link)
                )
            finally:
                link.close()
        except BaseException as error:
            errors.append(error)
            mark_failed(fd, rank)
            raise

    try:
        os.ftruncate(fd, collectives_bytes(world))
        with ThreadPoolExecutor(world.size) as pool:
            futures = [pool.submit(one, rank) for rank in range(world.size)]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]
    finally:
        os.close(fd)


class RankThreads(Executor):
    """An executor whose ranks are `CpuRank`s on separate threads, like `mp` with processes."""

    async_by_default = True
    rank_class: Any = CpuRank

    def __init__(self, options: Options) -> None:
        self._tp_size, self._pp_size = options.tensor_parallel_size, options.pipeline_parallel_size
        self.num_stages, self.max_steps_in_flight = self._pp_size, self._pp_size + 1
        places = [RankCoordinates.of_options(rank, options) for rank in range(self._tp_size * self._pp_size)]
        self._ranks = [self.rank_class(options, place=place) for place in places]
        self._replying = next(place.rank for place in places if place.replies)
        self._threads = [ThreadPoolExecutor(1, f"rank {place.rank}") for place in places]
        self._steps: deque[list[Future[StepResult]]] = deque()
        self._fd = os.memfd_create("test")

    def describe(self, report: Report) -> ModelDescription:
        return self._everywhere(lambda rank: rank.describe(report))[0]

    def tokenizer(self) -> TokenizerBundle | None:
        return self._ranks[0].tokenizer()

    def load(self, plan: Plan, report: Report) -> MemoryReading:
        world = World.of(plan, self._tp_size, self._pp_size)
        os.ftruncate(self._fd, collectives_bytes(world))
        ranks = range(world.size)
        self._everywhere(lambda rank: rank.join(Rendezvous(world, rank._place.rank, ranks, self._fd, DEADLINE_S)))
        readings = self._everywhere(lambda rank: rank.measure(rank.load(plan, report), report))
        return MemoryReading(
            total_bytes=readings[0].total_bytes,
            available_bytes=min(reading.available_bytes for reading in readings),
            weights_bytes=sum(reading.weights_bytes for reading in readings),
            activation_bytes=sum(reading.activation_bytes for reading in readings),
        )

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        self._everywhere(lambda rank: rank.allocate(num_blocks, max_model_len))

    def submit(self, plan: StepPlan) -> None:
        self._steps.append([self._start(number, lambda rank: _step(rank, plan)) for number in range(len(self._ranks))])

    def collect(self) -> StepResult:
        results = [future.result(DEADLINE_S) for future in self._steps.popleft()]
        for result in results[self._replying + 1 :]:  # of the same stage
            assert result.token_ids.tolist() == results[self._replying].token_ids.tolist()
        return results[self._replying]

    def load_adapter(self, slot: int, path: str, *, is_3d: bool = False) -> AdapterFacts:
        """Beside steps, on the caller's thread."""
        facts = [rank.load_adapter(slot, path, is_3d=is_3d) for rank in self._ranks]
        return facts[0]

    def drop_adapter(self, slot: int) -> None:
        for rank in self._ranks:
            rank.drop_adapter(slot)

    def stop(self) -> None:
        for thread in self._threads:
            thread.shutdown()
        for rank in self._ranks:
            rank.stop()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _everywhere(self, call: Callable[[CpuRank], Any]) -> list[Any]:
        futures = [self._start(number, call) for number in range(len(self._ranks))]
        return [future.result(DEADLINE_S) for future in futures]

    def _start(self, number: int, call: Callable[[CpuRank], Any]) -> Future[Any]:
        def run() -> Any:
            try:
                return call(self._ranks[number])
            except BaseException:
                mark_failed(self._fd, number)
                raise

        return self._threads[number].submit(run)


def _step(rank: CpuRank, plan: StepPlan) -> StepResult:
    rank.submit(plan)
    return rank.collect()
