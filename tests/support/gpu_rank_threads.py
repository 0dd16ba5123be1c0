"""GPU ranks as threads of the test process, on the CPU in place of a GPU: like workers of `mp`, without processes."""

from __future__ import annotations

from collections import deque

from gpu_parts import GpuOnCpu
from rank_threads import RankThreads

from headrace.core.options.engine_options import Options
from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.ipc.step import StepPlan, StepResult


class Ahead(GpuOnCpu):
    """A rank that accepts any number of steps, with at most `max_steps_in_flight` of them on the device."""

    def __init__(self, options: Options, place: RankCoordinates) -> None:
        super().__init__(options, place)
        self._collected: deque[StepResult] = deque()
        self._started = 0
        self.most_in_flight = 0

    def submit(self, plan: StepPlan) -> None:
        if self._started == self.max_steps_in_flight:
            self._collected.append(self._collect_oldest())
        super().submit(plan)
        self._started += 1
        self.most_in_flight = max(self.most_in_flight, self._started)

    def collect(self) -> StepResult:
        return self._collected.popleft() if self._collected else self._collect_oldest()

    def _collect_oldest(self) -> StepResult:
        self._started -= 1
        return super().collect()


class GpuRankThreads(RankThreads):
    """For the option distributed_executor_backend."""

    rank_class = Ahead
    latest: GpuRankThreads

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        GpuRankThreads.latest = self

    @property
    def ranks(self) -> list[Ahead]:
        return self._ranks

    def submit(self, plan: StepPlan) -> None:
        self._steps.append([self._start(number, lambda rank: rank.submit(plan)) for number in range(len(self._ranks))])

    def collect(self) -> StepResult:
        results = self._everywhere(lambda rank: rank.collect())
        for started in self._steps.popleft():
            started.result()
        for result in results[self._replying + 1 :]:  # of the same stage
            assert result.token_ids.tolist() == results[self._replying].token_ids.tolist()
        return results[self._replying]

    def idle(self) -> bool:
        return any(self._everywhere(lambda rank: rank.idle()))
