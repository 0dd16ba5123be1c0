"""The executor whose one rank is in the core's own process."""

from __future__ import annotations

from headrace.core.options.engine_options import Options
from headrace.core.options.plan import MemoryReading, ModelDescription, Plan
from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.executor.placement.adapter_orders import load_in_time
from headrace.executor.placement.base import Executor
from headrace.executor.placement.make_rank import make_rank
from headrace.executor.rank import Rank, Report
from headrace.ipc.adapters import AdapterFacts
from headrace.ipc.control import WorkerAnswer, WorkerCommand
from headrace.ipc.messages import TokenizerBundle
from headrace.ipc.step import StepPlan, StepResult


class InProcessExecutor(Executor):
    """Drives one rank; by default the one that `make_rank` makes for the options' device."""

    def __init__(self, options: Options, rank: Rank | None = None) -> None:
        """Raises OptionError when the device cannot be used."""
        self.rank = rank or make_rank(options, RankCoordinates.of_options(0, options))
        self._control_timeout_s = options.control_timeout
        self.max_steps_in_flight = self.rank.max_steps_in_flight
        self.has_own_memory = self.rank.has_own_memory
        self.async_by_default = self.rank.async_by_default
        # Bound directly, since they run in each step: no call of ours between the core and the rank.
        self.submit, self.collect = self.rank.submit, self.rank.collect  # type: ignore[method-assign]

    def describe(self, report: Report) -> ModelDescription:
        return self.rank.describe(report)

    def tokenizer(self) -> TokenizerBundle | None:
        return self.rank.tokenizer()

    def load(self, plan: Plan, report: Report) -> MemoryReading:
        return self.rank.measure(self.rank.load(plan, report), report)

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        self.rank.allocate(num_blocks, max_model_len)

    def submit(self, plan: StepPlan) -> None:
        self.rank.submit(plan)

    def collect(self) -> StepResult:
        return self.rank.collect()

    def has_result(self) -> bool:
        return self.rank.has_result()

    def idle(self) -> bool:
        return self.rank.idle()

    def control(self, command: WorkerCommand) -> tuple[WorkerAnswer, ...]:
        return (self.rank.control(command),)

    def load_adapter(self, slot: int, path: str, *, is_3d: bool = False) -> AdapterFacts:
        return load_in_time(self.rank, slot, path, is_3d=is_3d, timeout_s=self._control_timeout_s)

    def drop_adapter(self, slot: int) -> None:
        self.rank.drop_adapter(slot)

    def stop(self) -> None:
        self.rank.stop()
