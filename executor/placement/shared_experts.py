"""The executor of an engine core that shares its model's experts with other cores (data and expert parallelism).

Each core has the whole model, but only its part of the experts, and its own requests and cache. All cores compute every
step together (`executor/parallel/lock_step.py`), and exchange tokens in the layers with experts
(`executor/parallel/expert_exchange.py`). The ranks of a core run in workers, each of which exchanges with the workers
of the same rank in the other cores; summed over a core's ranks, this is the output of all experts for its tokens.

    core 0  --COUNTS (7, 0), STEP-->  workers 0, 1        core 1  --COUNTS (7, 0)-->  workers 0, 1
                                      |  |                                            |  |
                                      |  +--------------- exchange 1 -----------------+--+
                                      +------------------ exchange 0 -----------------+
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from headrace.core.options.engine_options import Options
from headrace.core.options.plan import MemoryReading, ModelDescription, Plan
from headrace.executor.gpu.hardware.visible_gpus import visible_gpus
from headrace.executor.parallel.lock_step import STOP, LockStep, meet
from headrace.executor.parallel.rank_place import DEADLINE_S, World, collectives_bytes
from headrace.executor.placement.base import Executor
from headrace.executor.placement.in_process import InProcessExecutor
from headrace.executor.placement.multiproc import MultiprocExecutor
from headrace.executor.placement.worker_messages import COUNTS, SharedExperts
from headrace.executor.rank import Report
from headrace.ipc.control import Sleep, UseWeights, WakeUp, WorkerAnswer, WorkerCommand
from headrace.ipc.failure import Failure, HeadraceError, OptionError
from headrace.ipc.messages import TokenizerBundle
from headrace.ipc.step import StepPlan, StepResult

if TYPE_CHECKING:  # they import torch, which a core with workers does without
    from headrace.executor.model_rank import ModelRank
    from headrace.executor.parallel.expert_exchange import ExpertExchange

logger = logging.getLogger(__name__)


class LocalRankExecutor(InProcessExecutor):
    """Runs a single rank in the core's own process."""

    rank: ModelRank
    workers: tuple[int, ...] = ()
    """Pids of the worker processes."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._options = options
        self._exchange: ExpertExchange | None = None
        self._on_failure: Callable[[Failure], None] = lambda failure: None

    def watch(self, on_failure: Callable[[Failure], None]) -> None:
        self._on_failure = on_failure

    def share_experts(self, memory_fd: int, plan: Plan) -> None:
        """Opens the exchange through the memory of all cores. Call it before `load`."""
        from headrace.executor.parallel.expert_exchange import ExpertExchange

        world = World.of_engines(plan, self._options.data_parallel_size, 1)
        self._exchange = ExpertExchange.open(memory_fd, world, 0, self._options.data_parallel_rank, DEADLINE_S)
        self.rank.share_experts(self._exchange)

    def begin(self, counts: tuple[int, ...]) -> None:
        """counts: each core's tokens in the step that is submitted next."""
        assert self._exchange is not None, "share_experts comes first"
        self._exchange.counts = counts

    def compute_for_others(self, counts: tuple[int, ...]) -> None:
        """Computes a step in which this core has no tokens."""
        self.begin(counts)
        self.rank.compute_for_others()

    def fail(self, failure: Failure) -> None:
        """Called when another core is lost: reports the failure to the watcher."""
        self._on_failure(failure)


class SharingWorkers(MultiprocExecutor):
    """Runs a worker process per rank, with the methods of `LocalRankExecutor`."""

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(child.pid for child in self._group.children)

    def share_experts(self, memory_fd: int, plan: Plan) -> None:
        options = self._options
        memory = f"/proc/{os.getpid()}/fd/{memory_fd}"  # created after the workers, so they cannot inherit it
        self._shared_experts = SharedExperts(memory, options.data_parallel_rank, options.data_parallel_size)

    def begin(self, counts: tuple[int, ...]) -> None:
        self._put(msgspec.msgpack.encode(counts), COUNTS)

    def compute_for_others(self, counts: tuple[int, ...]) -> None:
        self._under_way.append(self._put(msgspec.msgpack.encode(counts), COUNTS))
        self._take_result()

    def fail(self, failure: Failure) -> None:
        self._group.fail(failure)


def of_several_ranks(options: Options) -> Executor:
    """The executor for an engine of several ranks. With GPUs or a user's own worker_cls, experts are divided only among
    this engine's ranks. Raises OptionError like `SharedExpertsExecutor`."""
    on_gpus = options.device.startswith("cuda") or (options.device == "auto" and bool(visible_gpus()))
    if not on_gpus and options.worker_cls == "auto":
        return SharedExpertsExecutor(options)
    logger.info("experts are divided among this engine's ranks alone: among engines they are on a CPU")
    return MultiprocExecutor(options)


class SharedExpertsExecutor(Executor):
    """Runs one step at a time, since all cores compute it at once."""

    max_steps_in_flight = 1

    def __init__(self, options: Options) -> None:
        """Raises OptionError where data_parallel_meeting gives the engines no name to join under."""
        if not options.data_parallel_meeting:
            raise OptionError(
                "enable_expert_parallel with data_parallel_size divides experts among engines, which must meet: start "
                "them together, or each with the same data_parallel_meeting"
            )
        self._options = options
        self._num_ranks = options.tensor_parallel_size * options.pipeline_parallel_size
        self._ranks: LocalRankExecutor | SharingWorkers = (
            LocalRankExecutor(options) if self._num_ranks == 1 else SharingWorkers(options)
        )
        self.num_stages, self.has_own_memory = self._ranks.num_stages, self._ranks.has_own_memory
        self._lock_step: LockStep | None = None
        self._is_asleep = False

    def describe(self, report: Report) -> ModelDescription:
        return self._ranks.describe(report)

    def tokenizer(self) -> TokenizerBundle | None:
        return self._ranks.tokenizer()

    def load(self, plan: Plan, report: Report) -> MemoryReading:
        report("meet the engines that share experts")
        rank, size = self._options.data_parallel_rank, self._options.data_parallel_size
        world = World.of_engines(plan, size, self._num_ranks)
        self._lock_step = meet(
            self._options.data_parallel_meeting,
            rank,
            size,
            model=f"{plan.model.name} {plan.dtype} {world} {plan.options.expert_placement_strategy}",
            shared_bytes=collectives_bytes(world),
            limit_s=self._options.startup_timeout,
            workers=self._ranks.workers,
        )
        self._ranks.share_experts(self._lock_step.shared_fd, plan)
        return self._ranks.load(plan, report)

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        self._ranks.allocate(num_blocks, max_model_len)
        self.ranks_startup_s = self._ranks.ranks_startup_s

    def submit(self, plan: StepPlan) -> None:
        if plan.total_tokens:
            self._ranks.begin(self._joined.step(plan.total_tokens))
        self._ranks.submit(plan)

    def collect(self) -> StepResult:
        with self._joined.computing():
            return self._ranks.collect()

    def idle(self) -> bool:
        return self._ranks.idle()

    def watch(self, on_failure: Callable[[Failure], None]) -> None:
        self._ranks.watch(on_failure)
        self._joined.watch(self._ranks.fail)

    def on_call(self, callback: Callable[[], None]) -> None:
        self._joined.on_call = callback

    def take_part(self) -> None:
        if self._joined.is_called:
            counts = self._joined.step(0)
            with self._joined.computing():
                self._ranks.compute_for_others(counts)

    def may_leave(self) -> bool:
        return self._joined.announce(STOP)

    def control(self, command: WorkerCommand) -> tuple[WorkerAnswer, ...]:
        match command:
            case UseWeights():
                if not self._agree("use other weights", command.prepared) and command.prepared:
                    self._ranks.control(UseWeights(prepared=False))
                    raise HeadraceError("another engine that shares experts could not read its part of the weights")
            case Sleep():
                self._agree("sleep")
                self._is_asleep = True
            case WakeUp() if self._is_asleep:
                self._agree("wake up")
                answers = self._ranks.control(command)
                self._is_asleep = False
                return answers
        return self._ranks.control(command)

    def stop(self) -> None:
        if self._lock_step is not None:
            self._lock_step.close()
        self._lock_step = None
        self._ranks.stop()

    @property
    def _joined(self) -> LockStep:
        assert self._lock_step is not None, "load comes first"
        return self._lock_step

    def _agree(self, what: str, can: bool = True) -> bool:
        return self._joined.agree(what, can, self.take_part, self._options.control_timeout)
