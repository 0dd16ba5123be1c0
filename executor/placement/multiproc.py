"""The executor of a world of several ranks on one host: one worker program per rank, driven through rings.

    core's loop                        shared memory                     worker, one per rank
      submit: encode the plan  -->  ring of steps (1 writer, N readers)  -->  decode, run its part
      collect: decode          <--  ring of results (1 writer, 1 reader) <--  only the rank that replies

No model runs in this process, so this imports no torch. A worker's death is noticed by the thread that watches it
(pidfd), a hang by a step's deadline; either ends `collect` with the cause.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from headrace.core.options.engine_options import Options
from headrace.core.options.plan import MemoryReading, ModelDescription, Plan
from headrace.executor.gpu.hardware.visible_gpus import check_gpus, visible_gpus
from headrace.executor.parallel.rank_place import RankCoordinates, World, collectives_bytes, mark_failed
from headrace.executor.placement.adapter_orders import agreed
from headrace.executor.placement.base import Executor
from headrace.executor.placement.step_codec import StepCodec
from headrace.executor.placement.worker_group import WorkerGroup
from headrace.executor.placement.worker_messages import (
    COMMAND,
    STEP,
    WORKER_SCHEMA_HASH,
    AllocateCache,
    Allocated,
    Answered,
    Described,
    FillSlot,
    LargeMessage,
    Loaded,
    LoadModel,
    MakeTokenizer,
    SharedExperts,
    SharedMemory,
    SlotFilled,
    StartWorker,
    TokenizerMade,
)
from headrace.executor.rank import Report
from headrace.ipc.adapters import AdapterFacts
from headrace.ipc.control import WorkerAnswer, WorkerCommand
from headrace.ipc.failure import Failure, HeadraceError, ModelError
from headrace.ipc.messages import TokenizerBundle
from headrace.ipc.process.host import host_memory
from headrace.ipc.step import StepPlan, StepResult, StepSizes, attachment_bytes, returned_bytes
from headrace.ipc.transport.ring import Mailbox, RingInterruptedError, RingLayout, RingReader, RingWriter, lay_out_ring
from headrace.ipc.wait import Deadline, WaitTimeoutError

logger = logging.getLogger(__name__)
STOP_S = 2.0
"""How long a worker may take to finish its current step and exit."""
OWN_FIELDS = ("kv_elements_per_token", "kv_rows_per_token", "kv_entry_elements", "state_page_bytes")
"""The fields of a ModelDescription that describe a rank's own part."""
LOGPROBS_IN_SLOT = 21
"""Logprobs per token for which a result's slot has room; results with more are sent over the socket."""
ATTACHMENT_IN_SLOT = 1 << 20
"""Most bytes of a slot that are kept for one kind of attachment."""


class MultiprocExecutor(Executor):
    """Owns the workers, the memory that they share, and the core's ends of the rings."""

    async_by_default = True

    def __init__(self, options: Options, ranks: range | None = None, store_fd: int | None = None) -> None:
        """Starts all workers, which import and find the model while the core goes on. Raises EngineStartError.

        ranks: this host's, where there are several hosts. store_fd: a listening socket for rank 0, where all ranks
        join.
        """
        self._options = options
        tp_size, pp_size = options.tensor_parallel_size, options.pipeline_parallel_size
        self._world_size = tp_size * pp_size
        self._ranks = ranks or range(self._world_size)
        if options.device.startswith("cuda"):  # checked before any worker starts
            check_gpus(options.device, len(self._ranks), visible_gpus())
        self._turns = secrets.token_hex(8)
        self._store: tuple[str, int] | None = None
        self._host = ""
        self.num_stages = pp_size
        self.max_steps_in_flight = pp_size + 1
        self._plan: Plan | None = None
        self._shared_experts: SharedExperts | None = None
        self._steps: RingWriter | None = None
        self._results: RingReader | None = None
        self._mailbox = Mailbox()
        self._under_way: deque[int] = deque()
        self._on_failure: Callable[[Failure], None] = lambda failure: None
        self._plans, self._answers = StepCodec(StepPlan), StepCodec(StepResult)
        replying = [rank for rank in self._ranks if RankCoordinates.of(rank, tp_size, pp_size).replies]
        self.replies = bool(replying)
        """Whether `collect` returns results: one of these workers is the rank that replies."""
        self._replying_worker = replying[0] - self._ranks.start if replying else 0
        self._is_stopped = False
        self._ending = threading.Lock()
        """Held while a worker's watching thread uses what `stop` closes."""
        self._memory = SharedMemory(*(os.memfd_create(f"headrace-{n}") for n in ("steps", "results", "collectives")))
        starts = [
            StartWorker(
                schema_hash=WORKER_SCHEMA_HASH,
                options=options,
                rank=rank,
                memory=self._memory,
                first_rank=self._ranks.start,
                num_ranks=len(self._ranks),
                began_s=time.monotonic(),
                store_fd=-1 if store_fd is None or rank else store_fd,
            )
            for rank in self._ranks
        ]
        try:
            self._group = WorkerGroup(starts, self._failed, self._take_large, self._unfinished)
        except BaseException:
            self._close_memory()
            raise

    def meet(self, store: tuple[str, int], host: str, turns: str) -> None:
        """For several hosts, before `load`: the address at which rank 0 waits for all ranks; this host's address; and
        the name of the turns to read weights, shared with any workers of other agents on this host."""
        self._store, self._host, self._turns = store, host, turns

    def watch(self, on_failure: Callable[[Failure], None]) -> None:
        """Calls back once, from another thread, when a worker has failed, even between steps."""
        self._on_failure = on_failure
        if self._group.failure is not None:
            on_failure(self._group.failure)

    def describe(self, report: Report) -> ModelDescription:
        report("start workers")
        described = self._group.gather(Described, report=report)
        found = [message.description for message in described]
        check_equal(found, "worker", self._ranks.start)
        self.has_own_memory = described[0].has_own_memory
        # Ranks that share the host's memory use the sum of their shares of a token. Otherwise the rank with the largest
        # share determines the number of blocks.
        count = max if self.has_own_memory else sum
        return merged(found, count)

    def tokenizer(self) -> TokenizerBundle | None:
        if self._options.skip_tokenizer_init:
            return None
        self._group.send(MakeTokenizer(), 0)
        (made,) = self._group.gather(TokenizerMade, ranks=range(1))
        return made.bundle

    def load(self, plan: Plan, report: Report) -> MemoryReading:
        self._plan = plan
        steps, results = ring_layouts(plan, len(self._ranks), self.max_steps_in_flight)
        world = World.of(plan, self._options.tensor_parallel_size, self._options.pipeline_parallel_size)
        shared_bytes = collectives_bytes(world) if self._world_size > 1 and self._store is None else 0
        try:
            lay_out_ring(self._memory.steps, steps)
            lay_out_ring(self._memory.results, results)
            os.ftruncate(self._memory.collectives, shared_bytes)
        except OSError as error:
            needed, count = steps.total_bytes + results.total_bytes + shared_bytes, len(self._ranks)
            raise ModelError(f"the {needed:,} bytes that {count} workers share cannot be allocated: {error}") from error
        order = LoadModel(
            plan=plan,
            steps=steps,
            results=results,
            turns=self._turns,
            store=self._store,
            host=self._host,
            shared_experts=self._shared_experts,
        )
        self._group.send(order)
        readings = [message.reading for message in self._group.gather(Loaded, report=report)]
        return (
            MemoryReading.tightest(readings, self._options.gpu_memory_utilization)
            if self.has_own_memory
            else self._sum(readings)
        )

    def allocate(self, num_blocks: int, max_model_len: int) -> None:
        assert self._plan is not None, "load comes before allocate"
        steps, results = ring_layouts(self._plan, len(self._ranks), self.max_steps_in_flight)
        self._results = RingReader(self._memory.results, results, 0, self._mailbox)
        self._steps = RingWriter(self._memory.steps, steps, self._send_large)
        self._group.send(AllocateCache(num_blocks=num_blocks, max_model_len=max_model_len))
        ready = self._group.gather(Allocated)
        self.ranks_startup_s = tuple(message.startup_s[0] for message in ready)
        self._group.serve()

    def submit(self, plan: StepPlan) -> None:
        """Never waits: the ring has a slot for each step that may be in flight."""
        self._under_way.append(self._put(self._plans.encode(plan), STEP))

    def collect(self) -> StepResult:
        return self._answers.decode(self._take_result())

    def _take_result(self) -> bytes | bytearray:
        """The result of the oldest message that returns one."""
        assert self._results is not None, "allocate comes before collect"
        number = self._under_way.popleft()
        try:
            _, data = self._results.take(Deadline(self._options.step_timeout))
        except RingInterruptedError:
            raise self._cause() from None
        except WaitTimeoutError:
            assert self._steps is not None, "a step was under way"
            raise self._hung(self._steps.behind(number) or [self._replying_worker]) from None
        return data

    def control(self, command: WorkerCommand) -> tuple[WorkerAnswer, ...]:
        self._put(msgspec.msgpack.encode(command), COMMAND)
        answers = self._group.gather(Answered)
        for answered in answers:
            if answered.failure is not None:
                raise HeadraceError(failure=answered.failure)
        return tuple(answered.answer for answered in answers if answered.answer is not None)

    def load_adapter(self, slot: int, path: str, *, is_3d: bool = False) -> AdapterFacts:
        self._group.send(FillSlot(slot=slot, path=path, is_3d=is_3d))
        return agreed(self._group.gather(SlotFilled))

    def drop_adapter(self, slot: int) -> None:
        self._group.send(FillSlot(slot=slot))

    def stop(self) -> None:
        with self._ending:
            if self._is_stopped:
                return
            self._is_stopped = True
        self._group.stop(STOP_S)
        for end in (self._steps, self._results):
            if end is not None:
                end.close()
        self._close_memory()

    def _put(self, data: bytes, kind: int) -> int:
        assert self._steps is not None, "allocate comes before the first step"
        if self._group.failure is not None:
            raise self._cause()
        try:
            return self._steps.put(data, Deadline(self._options.step_timeout), kind)
        except RingInterruptedError:
            raise self._cause() from None
        except WaitTimeoutError:
            raise self._hung(self._steps.blocking) from None

    def _cause(self) -> HeadraceError:
        failure = self._group.failure
        assert failure is not None, "the rings are interrupted by a failure only"
        return self._group.error(failure)

    def _hung(self, ranks: list[int]) -> HeadraceError:
        what = f"finish its part of a step within {self._options.step_timeout:g} s (step_timeout)"
        return self._group.error(self._group.fail(self._group.hung(ranks, what)))

    def _unfinished(self) -> list[int]:
        with self._ending:
            if self._is_stopped:
                return []
            return self._steps.behind(self._steps.last) if self._steps is not None else list(range(len(self._ranks)))

    def _failed(self, failure: Failure) -> None:
        """Ends every wait for the workers, including their waits for each other."""
        with self._ending:
            if self._is_stopped:
                return
            logger.error("%s", failure.message)
            if os.fstat(self._memory.collectives).st_size:
                mark_failed(self._memory.collectives, failure.rank)
            for end in (self._steps, self._results):
                if end is not None:
                    end.interrupt()
        self._on_failure(failure)

    def _send_large(self, number: int, data: bytes) -> None:
        self._group.send(LargeMessage(number=number, data=data), deadline=Deadline(self._options.step_timeout))

    def _take_large(self, message: LargeMessage) -> None:
        self._mailbox.put(message.number, message.data)

    def _sum(self, readings: list[MemoryReading]) -> MemoryReading:
        """The world's reading, where all ranks share one memory."""
        available = min(host_memory().available_bytes, *(reading.available_bytes for reading in readings))
        return msgspec.structs.replace(
            readings[0],
            available_bytes=available,
            weights_bytes=sum(reading.weights_bytes for reading in readings),
            activation_bytes=sum(reading.activation_bytes for reading in readings),
        )

    def _close_memory(self) -> None:
        for fd in (self._memory.steps, self._memory.results, self._memory.collectives):
            os.close(fd)


def ring_layouts(plan: Plan, num_workers: int, steps_in_flight: int) -> tuple[RingLayout, RingLayout]:
    """The layouts of the rings to and from the workers, with a slot for each step that may be in flight.

    A slot has room for a step of the plan's size: a decode of all rows, plus the prompt tokens that a step computes. A
    prompt that is longer than a step's budget is sent whole with its first step, and may need the socket, as may the
    masks of many rows.
    """
    seqs, tokens, groups = plan.max_num_seqs, plan.max_num_batched_tokens, len(plan.model.cache_groups)
    pages = sum(group.pages for group in plan.model.cache_groups)
    most_snapshots = 2 * seqs + tokens // plan.block_size
    sizes = StepSizes(seqs, tokens, plan.max_logits, plan.model.vocab_size, num_state_pages=pages * most_snapshots)
    attached_bytes, back_bytes = (
        sum(min(size, ATTACHMENT_IN_SLOT) for size in largest(sizes).values())
        for largest in (attachment_bytes, returned_bytes)
    )
    step_bytes = (
        1024
        + attached_bytes
        + seqs * (4 * 4 + 1 + 8 + 200 + 8 * pages)
        + tokens * 4
        + (tokens // plan.block_size + seqs) * 8 * groups
    )
    width = min(plan.max_logprobs + 1, LOGPROBS_IN_SLOT)
    result_bytes = 1024 + back_bytes + seqs * (4 + 4 + 4 + 4 + 8 * width)
    if (pooling := plan.model.pooling) is not None:
        vectors = seqs * (1 + 2 * ("embed_sparse" in pooling.kinds))
        vectors += tokens if any(kind.startswith("token_") for kind in pooling.kinds) else 0
        result_bytes += seqs * len(pooling.kinds) * 3 * 4 + vectors * 4 * pooling.largest_width
    slots = steps_in_flight + 1
    return RingLayout.holding(step_bytes, slots, num_workers), RingLayout.holding(result_bytes, slots, 1)


def merged(found: list[ModelDescription], count: Callable[[Iterable[int]], int]) -> ModelDescription:
    """The description of the whole model. count: combines the ranks' own parts of a token (`OWN_FIELDS`)."""
    shares = {name: count(getattr(each, name) for each in found) for name in OWN_FIELDS}
    return msgspec.structs.replace(found[0], **shares, device_bytes=min(each.device_bytes for each in found))


def check_equal(found: list[ModelDescription], who: str, first_number: int = 0) -> None:
    """Raises ModelError, with both values of the first difference, unless all have read the same model."""
    for number, description in enumerate(found, first_number):
        for name in description.__struct_fields__:
            first, other = getattr(found[0], name), getattr(description, name)
            if first != other and name not in (*OWN_FIELDS, "device_bytes"):
                raise ModelError(
                    f"{who} {first_number} read {name} {first!r} from the model, and {who} {number} read {other!r}"
                )
