"""The worker program, one per rank: `python -m headrace.executor.placement.worker --parent-fd N`, started by the core.

The parent's StartWorker message gives its rank. It loads its part of the model and runs every step from the ring until
a Stop or the parent's death. Exit status: 0 after an orderly stop, 1 when it could not start, 70 when it failed while
running.

    main thread     describe > (LoadModel) load > (AllocateCache) allocate > [take from ring > run > reply]*
    "parent"        reads the socket: start-up messages, messages too large for the ring, Stop, end of file
    "tokenizer"     makes the tokeniser while the main thread reads weights; in the first worker only
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

import msgspec

from headrace.executor.parallel.rank_place import PeerError, RankCoordinates, World
from headrace.executor.parallel.rendezvous import Rendezvous
from headrace.executor.placement.adapter_orders import carry_out
from headrace.executor.placement.load_turn import turn_to_load
from headrace.executor.placement.make_rank import make_rank
from headrace.executor.placement.step_codec import StepCodec
from headrace.executor.placement.worker_messages import (
    COMMAND,
    COUNTS,
    WAIT_FOR_CORE,
    WAIT_FOR_TURN,
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
    SlotFilled,
    StartWorker,
    TokenizerMade,
    ToWorker,
)
from headrace.executor.rank import Rank, Reporter
from headrace.ipc.control import PrepareWeights, WorkerCommand
from headrace.ipc.failure import EngineDeadError, Failure, HeadraceError, InconsistentError
from headrace.ipc.messages import ChildFailed, Message, Progress
from headrace.ipc.process.background import Background
from headrace.ipc.process.child import die_with_parent, leave, leave_signals_to_parent, show_stacks_when_asked
from headrace.ipc.process.deferred_imports import defer
from headrace.ipc.process.host import take_share
from headrace.ipc.process.log import protect_stderr, set_up_logging
from headrace.ipc.process.resources import give_back_freed_memory, release_unchanged_files, what_limits
from headrace.ipc.step import StepPlan, StepResult
from headrace.ipc.struct_types import threadsafe
from headrace.ipc.transport.channel import Channel, ChannelClosedError, obey_parent
from headrace.ipc.transport.ring import Mailbox, RingInterruptedError, RingReader, RingWriter
from headrace.ipc.wait import Deadline, WaitTimeoutError

logger = logging.getLogger(__name__)
EXIT_START_FAILED, EXIT_WORKER_FAILED = 1, 70
POLL_S = 20e-6
"""How often a computing device is polled for its result; only the reply waits for that."""
COLLECTIVES_GRACE_S = 0.2
"""A wait for another rank lasts this much longer than a step's deadline, so that the core notices first."""


class Worker:
    """One rank. `run` is called on the main thread, `stop` and `take_message` on the thread that reads the socket."""

    def __init__(self, channel: Channel, start: StartWorker) -> None:
        options = start.options
        self._channel, self._start, self._options = channel, start, options
        self._place = RankCoordinates.of_options(start.rank, options)
        self._orders: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # None: stop
        self._mailbox = Mailbox()
        self._rank: Rank | None = None
        self._begin_shared: Callable[[tuple[int, ...]], bool] = lambda counts: False
        """With shared experts: receives each core's number of tokens in the next step. Where this core has none, it
        computes the step and returns True."""
        self._adapters = Background("adapters")
        self._steps: RingReader | None = None
        self._results: RingWriter | None = None
        self._is_stopped = False
        self._phase_began_s = start.began_s
        self._startup_s: dict[str, float] = {}
        self._turns = ""
        self.phase = "start"

    def report(self, phase: str) -> None:
        now_s = time.monotonic()
        took_s = now_s - self._phase_began_s
        self._startup_s[self.phase] = self._startup_s.get(self.phase, 0.0) + took_s
        self._channel.send(Progress(phase=phase, seconds=took_s))
        self.phase, self._phase_began_s = phase, now_s

    def _read(self, read_bytes: int, total_bytes: int) -> None:
        self._channel.send(Progress(phase=self.phase, seconds=0.0, read_bytes=read_bytes, total_bytes=total_bytes))

    def stop(self, deadline_s: float) -> None:
        """Exits after the current step, or at once while loading, when there is nothing to finish."""
        self._is_stopped = True
        self._orders.put(None)
        ends = [end for end in (self._steps, self._results) if end is not None]
        if not ends:
            os._exit(0)
        for end in ends:
            end.interrupt()

    def take_message(self, message: Message) -> None:
        if isinstance(message, LargeMessage):
            self._mailbox.put(message.number, message.data)
        elif isinstance(message, MakeTokenizer):
            threading.Thread(target=self._make_tokenizer, name="tokenizer", daemon=True).start()
        elif isinstance(message, FillSlot):
            rank, limit_s = self._rank, self._options.control_timeout
            assert rank is not None, "the core loads adapters once it serves"
            told = self._tell_of_adapter
            self._adapters.submit(functools.partial(carry_out, rank, message, told, "worker", limit_s))
        else:
            self._orders.put(message)

    def run(self) -> None:
        """Runs the worker from loading the rank's class to the last step. Raises whatever went wrong."""
        self.report("import")
        rank = self._rank = make_rank(self._options, self._place)
        report = Reporter(self.report, self._read)
        description = rank.describe(report)
        self._channel.send(Described(description=description, has_own_memory=rank.has_own_memory))
        self.report(WAIT_FOR_CORE)
        load = self._orders.get()
        if load is None:
            return
        if not isinstance(load, LoadModel):
            raise InconsistentError(f"LoadModel is due, and {type(load).__name__} came")
        self._turns = load.turns
        self.report("meet the other ranks")
        self._connect(rank, load)
        self._share_experts(rank, load)
        with self._turn(lambda: self.report(WAIT_FOR_TURN)):
            reading = rank.load(load.plan, report)
        reading = rank.measure(reading, self.report)
        self._channel.send(Loaded(reading=reading))
        self.report(WAIT_FOR_CORE)
        allocate = self._orders.get()
        if allocate is None:
            return
        if not isinstance(allocate, AllocateCache):
            raise InconsistentError(f"AllocateCache is due, and {type(allocate).__name__} came")
        self.report("allocate")
        rank.allocate(allocate.num_blocks, allocate.max_model_len)
        start, memory = self._start, self._start.memory
        if self._place.replies:
            self._results = RingWriter(memory.results, load.results, self._send_large)
        self._steps = RingReader(memory.steps, load.steps, start.rank - start.first_rank, self._mailbox)
        self.report("idle")
        gc.freeze()  # so that no garbage collection scans these objects while tokens stream
        give_back_freed_memory()
        release_unchanged_files()
        # Adapters are loaded and weights are exchanged on threads of their own, and a step needs the interpreter after
        # each of its products: the default of 5 ms would stretch it.
        sys.setswitchinterval(2e-4)
        self._channel.send(Allocated(startup_s=(self._startup_s,)))
        with contextlib.suppress(RingInterruptedError):
            self._serve(rank, self._steps)
        rank.stop()

    def _turn(self, on_wait: Callable[[], object]) -> contextlib.AbstractContextManager[None]:
        return turn_to_load(self._turns, self._options.max_parallel_loading_workers, on_wait)

    def _connect(self, rank: Rank, load: LoadModel) -> None:
        start = self._start
        if self._place.world_size == 1:
            return
        rank.join(
            Rendezvous(
                world=World.of(load.plan, self._place.tp_size, self._place.pp_size),
                rank=start.rank,
                host_ranks=range(start.first_rank, start.first_rank + start.num_ranks),
                memory_fd=start.memory.collectives,
                deadline_s=self._options.step_timeout + COLLECTIVES_GRACE_S,
                address=load.store,
                host=load.host,
                listen_fd=start.store_fd if load.store is not None and start.rank == 0 else None,
            )
        )

    def _share_experts(self, rank: Rank, load: LoadModel) -> None:
        shared = load.shared_experts
        if shared is None:
            return
        from headrace.executor.model_rank import ModelRank  # imports torch, which other ranks may do without
        from headrace.executor.parallel.expert_exchange import ExpertExchange

        assert isinstance(rank, ModelRank), "ranks of the user's own share no experts"
        world = World.of_engines(load.plan, shared.size, self._place.world_size)
        limit_s = self._options.step_timeout + COLLECTIVES_GRACE_S
        with open(shared.memory, "r+b", buffering=0) as memory:
            exchange = ExpertExchange.open(memory.fileno(), world, self._start.rank, shared.rank, limit_s)
        rank.share_experts(exchange)

        def begin(counts: tuple[int, ...]) -> bool:
            exchange.counts = counts
            if exchange.is_idle:
                rank.compute_for_others()
            return exchange.is_idle

        self._begin_shared = begin

    def _serve(self, rank: Rank, steps: RingReader) -> None:
        """Runs steps and commands until a Stop, at which it may raise RingInterruptedError."""
        plans, answers, deadline = StepCodec(StepPlan), StepCodec(StepResult), Deadline(None)
        under_way = 0

        def collect() -> None:
            result = rank.collect()
            if self._results is not None:
                self._results.put(answers.encode(result), deadline)

        while not self._is_stopped:
            message = self._next(rank, steps, under_way)
            if message is None:
                collect()
                under_way -= 1
            elif message[0] == COMMAND:
                while under_way:  # the core has all results, which another rank may have sent before this one collects
                    self._await_result(rank)
                    collect()
                    under_way -= 1
                self._carry_out(rank, msgspec.msgpack.decode(message[1], type=threadsafe(WorkerCommand)))
            elif message[0] == COUNTS:
                self.phase = "step"
                counts = msgspec.msgpack.decode(message[1], type=tuple[int, ...])
                if self._begin_shared(counts) and self._results is not None:
                    self._results.put(b"", deadline)
            else:
                self.phase = "step"
                rank.submit(plans.decode(message[1]))
                under_way += 1
            if not under_way:
                self.phase = "idle"
            steps.finished(under_way)

    def _next(self, rank: Rank, steps: RingReader, under_way: int) -> tuple[int, bytearray | bytes] | None:
        """The next message; None when the oldest step in flight should be collected instead.

        Meanwhile a device that computes asynchronously gets the next step. A device that does not finish a step in time
        waits for another rank: raises PeerError.
        """
        if not under_way:
            return steps.take(Deadline(None))
        for _ in self._until_result(rank):
            if under_way == rank.max_steps_in_flight:
                time.sleep(POLL_S)
                continue
            with contextlib.suppress(WaitTimeoutError):
                return steps.take(Deadline(POLL_S))
        return None

    def _await_result(self, rank: Rank) -> None:
        """Waits for the oldest step in flight. Raises PeerError if the device does not finish it in time."""
        for _ in self._until_result(rank):
            time.sleep(POLL_S)

    def _until_result(self, rank: Rank) -> Iterator[None]:
        """Yields while the oldest step is not done. Raises PeerError if the device does not finish it in time."""
        limit_s = self._options.step_timeout + COLLECTIVES_GRACE_S
        deadline = Deadline(limit_s)
        while not rank.has_result():
            if deadline.passed:
                who = f"rank {self._place.rank}"
                raise PeerError(f"{who} cannot go on: its device did not finish a step within {limit_s:g} s")
            yield

    def _carry_out(self, rank: Rank, command: WorkerCommand) -> None:
        """Carries out a command. A failed command leaves the state unchanged (`Rank.control`), so the worker goes
        on."""
        reads = isinstance(command, PrepareWeights)
        try:
            with self._turn(lambda: None) if reads else contextlib.nullcontext():
                answer = rank.control(command)
            answered = Answered(answer=msgspec.structs.replace(answer, rank=self._place.rank))
        except EngineDeadError:
            raise  # the engine is dead, not only the command
        except HeadraceError as error:
            failure = Failure.of(error, process="worker", phase=type(command).__name__, rank=self._place.rank)
            answered = Answered(answer=None, failure=failure)
        self._channel.send(answered)

    def _make_tokenizer(self) -> None:
        assert self._rank is not None, "the core asks for the tokenizer once the model is described"
        try:
            bundle = self._rank.tokenizer()
        except BaseException as error:
            fail(self._channel, error, self._place.rank, "tokenizer")
        else:
            self._channel.send(TokenizerMade(bundle=bundle))

    def _tell_of_adapter(self, filled: SlotFilled) -> None:
        with contextlib.suppress(ChannelClosedError):  # the thread that listens to the parent ends this process
            self._channel.send(filled)

    def _send_large(self, number: int, data: bytes) -> None:
        self._channel.send(LargeMessage(number=number, data=data))


def fail(channel: Channel, error: BaseException, rank: int, phase: str) -> NoReturn:
    """Reports the error to the core and exits. May be called from any thread."""
    with contextlib.suppress(ChannelClosedError):
        told = what_limits(error) or error
        channel.send(ChildFailed(failure=Failure.of(told, process="worker", phase=phase, rank=rank)))
    leave(EXIT_WORKER_FAILED if phase in ("step", "idle") else EXIT_START_FAILED)


def main() -> None:
    if sys.argv[1:2] != ["--parent-fd"]:
        sys.exit("headrace.executor.placement.worker is started by an engine core: see tensor_parallel_size")
    defer()
    die_with_parent()
    protect_stderr()
    leave_signals_to_parent()
    show_stacks_when_asked()
    channel = Channel.inherited(int(sys.argv[2]), ToWorker)
    rank, phase = 0, "start"
    worker: Worker | None = None
    try:
        start = channel.receive(Deadline(10.0))
        if not isinstance(start, StartWorker):
            raise InconsistentError(f"StartWorker is due, and {type(start).__name__} came")
        if start.schema_hash != WORKER_SCHEMA_HASH:
            raise HeadraceError(
                f"the engine core speaks version {start.schema_hash} of the messages to its workers, and this worker "
                f"{WORKER_SCHEMA_HASH}: Headrace was changed while it ran; start the engine again"
            )
        rank = start.rank
        set_up_logging(f"worker {rank}", "WARNING")
        take_share(rank - start.first_rank, start.num_ranks)
        os.environ.update(LOCAL_RANK=str(rank - start.first_rank), LOCAL_WORLD_SIZE=str(start.num_ranks))
        worker = Worker(channel, start)
        threading.Thread(
            target=obey_parent,
            args=(channel, worker.stop, EXIT_WORKER_FAILED, worker.take_message),
            name="parent",
            daemon=True,
        ).start()
        worker.run()
    except ChannelClosedError:
        leave(EXIT_START_FAILED)  # the parent is gone, so there is nobody to report to
    except BaseException as error:
        fail(channel, error, rank, worker.phase if worker is not None else phase)
    leave(0)


if __name__ == "__main__":
    main()
