"""Lock-step of engine cores that share a model's experts: they compute every step together. Imports no torch.

Unlike in vLLM's data parallelism, no core counts waves or idle steps: a step begins when the first core with tokens
votes for it, and the hub calls the others. A core without tokens votes 0, and runs its experts on the others' tokens.

    core 0 (has work)        hub, a thread of core 0        core 1 (idle)
      step(7) -- Vote(1, 7) -->                               waits for a message
                               -- Call(1) -->                 its loop wakes: step(0)
                               <-- Vote(1, 0) --
      <-- Go(1, (7, 0)) --        all have voted              -- Go(1, (7, 0)) -->
      computes its tokens, and its experts the others' tokens too; so does core 1

Whatever takes experts away or replaces them (sleeping, waking up, new weights, stopping) is done once all cores are
ready for it; until then the cores that are ready take part in the others' steps. A pause needs no agreement: a paused
core merely has no tokens of its own. When one core is lost, all fail, since none can compute without its experts. A
core that is stopped or hangs is waited for, and the others' logs name it.

The cores of one machine connect to a name in the kernel's abstract socket namespace, which leaves no file behind, and
rank 0 passes each the memory through which tokens are exchanged (`expert_exchange`).
"""

from __future__ import annotations

import errno
import logging
import os
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

import msgspec

from headrace.executor.parallel.rank_place import DEADLINE_S, PeerError, mark_failed
from headrace.ipc.failure import PEER_LOST, EngineStartError, Failure, HeadraceError, OptionError
from headrace.ipc.process.proc import status_of
from headrace.ipc.struct_types import threadsafe

logger = logging.getLogger(__name__)
MOST_BYTES = 1 << 16
RETRY_S = 0.05
SUSPECT_AFTER_S = 2.0
"""Cores that delay a step for this long are named in the log."""
HUB_ANSWERS_WITHIN_S = LOSS_HEARD_WITHIN_S = 1.0
STOP = "stop"


class Join(msgspec.Struct, frozen=True, tag=True):
    """A member's first message: its identity, and the model, which must be the same for all."""

    rank: int
    model: str
    workers: tuple[int, ...] = ()
    """Pids of this core's worker processes; empty if it computes in its own process."""


class Vote(msgspec.Struct, frozen=True, tag=True):
    step: int
    num_tokens: int


class MemberReady(msgspec.Struct, frozen=True, tag=True):
    """This member is ready for what all must do together or, without `can`, is unable to do it."""

    what: str
    can: bool


class MemberWithdraws(msgspec.Struct, frozen=True, tag=True):
    """The member no longer waits for what it was ready for."""


class AskMissing(msgspec.Struct, frozen=True, tag=True):
    """Asks which members have not voted yet."""


class Joined(msgspec.Struct, frozen=True, tag=True):
    """Sent with the memory's descriptor once all have joined; or the reason why this member may not join."""

    refusal: str = ""
    pids: tuple[tuple[int, ...], ...] = ()
    """By rank: the pids of the core and its workers."""


class Call(msgspec.Struct, frozen=True, tag=True):
    """Another core has tokens for this step."""

    step: int


class Go(msgspec.Struct, frozen=True, tag=True):
    step: int
    counts: tuple[int, ...]
    """Tokens of each rank in the step."""


class Agreed(msgspec.Struct, frozen=True, tag=True):
    what: str
    can: bool
    """Whether all members can."""


class Withdrawn(msgspec.Struct, frozen=True, tag=True):
    """The answer to Withdraw, unless Agreed was already sent."""


class Missing(msgspec.Struct, frozen=True, tag=True):
    """The answer to AskMissing: the ranks that have not voted."""

    ranks: tuple[int, ...]


class Lost(msgspec.Struct, frozen=True, tag=True):
    rank: int


ToHub = Join | Vote | MemberReady | MemberWithdraws | AskMissing
FromHub = Joined | Call | Go | Agreed | Withdrawn | Missing | Lost


def meet(
    name: str, rank: int, size: int, *, model: str, shared_bytes: int, limit_s: float, workers: tuple[int, ...] = ()
) -> LockStep:
    """Waits until all cores have joined under the name.

    model: a description that must be the same for all. shared_bytes: size of their shared memory. workers: pids of the
    processes that compute for this core.

    Raises EngineStartError when they do not come in time, and OptionError for a member that does not fit the others.
    """
    end_s = time.monotonic() + limit_s
    hub = Hub(name, size, model, shared_bytes, end_s) if rank == 0 else None
    try:
        while True:
            try:
                return _join(name, Join(rank, model, workers), hub, end_s)
            except (OSError, EOFError) as error:
                if hub is not None or time.monotonic() > end_s:
                    raise EngineStartError(
                        f"the {size} engines that share experts (enable_expert_parallel, data_parallel_size) did not "
                        f"meet within {limit_s:g} s: {error}"
                    ) from error
            time.sleep(RETRY_S)  # rank 0 listens only after reading the model
    except BaseException:
        if hub is not None:
            hub.close()
        raise


def _join(name: str, join: Join, hub: Hub | None, end_s: float) -> LockStep:
    """Raises OSError or EOFError where no hub listens, or where rank 0 ended before all had joined."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(max(0.01, end_s - time.monotonic()))
        connection.connect(_address(name))
        check_user(connection)
        connection.send(msgspec.msgpack.encode(join))
        data, fds, _, _ = socket.recv_fds(connection, MOST_BYTES, 1)
        if not data:
            raise EOFError("rank 0 ended before all came")
        joined = msgspec.msgpack.decode(data, type=threadsafe(Joined))
        if joined.refusal:
            raise OptionError(joined.refusal)
        connection.settimeout(None)
        return LockStep(connection, join.rank, joined.pids, fds[0], hub)
    except BaseException:
        connection.close()
        raise


def _address(name: str) -> str:
    return f"\0headrace-experts-{name}"


def check_user(connection: socket.socket) -> int:
    """The pid at the other end. Raises ConnectionRefusedError if it is another user's, as any may connect."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    if uid != os.getuid():
        raise ConnectionRefusedError(f"user {uid} is at the other end")
    return int(pid)


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process."""
    status = status_of(pid)
    return status is not None and status.state in "Tt"


class LockStep:
    """One core's membership. Its methods are for the core's loop; a thread receives messages from the hub."""

    def __init__(
        self, connection: socket.socket, rank: int, pids: tuple[tuple[int, ...], ...], shared_fd: int, hub: Hub | None
    ) -> None:
        self._connection, self._rank, self._pids, self._hub = connection, rank, pids, hub
        self._incoming = select.poll()
        self._incoming.register(connection, select.POLLIN)
        self.shared_fd = shared_fd
        """Descriptor of the memory that all cores share."""
        self.on_call: Callable[[], None] = lambda: None
        """Called from another thread when the loop should take part in a step, or check whether all are ready."""
        self._on_lost: Callable[[Failure], None] = lambda failure: None
        self._changed = threading.Condition()
        self._step = self._called = self._begun = 0  # the last step voted for, called for, begun by all
        self._counts: tuple[int, ...] = ()
        self._is_computing = False
        self._missing: tuple[int, ...] | None = None
        self._announced = ""
        self._agreed: Agreed | None = None
        self._is_withdrawn = False
        self._is_over = False
        self._failure: Failure | None = None
        self._thread = threading.Thread(target=self._hear, name="lock step", daemon=True)
        self._thread.start()

    def watch(self, on_lost: Callable[[Failure], None]) -> None:
        """`on_lost` is called once, from another thread, when a member is lost."""
        self._on_lost = on_lost
        if self._failure is not None:
            on_lost(self._failure)

    @property
    def is_called(self) -> bool:
        """Whether another core waits for this core's vote."""
        return self._called > self._step

    def step(self, num_tokens: int) -> tuple[int, ...]:
        """Votes for the next step and waits until all have voted; the step must be computed within `computing`.

        Returns each rank's number of tokens. Raises PeerError.
        """
        self._step += 1
        self._send(Vote(self._step, num_tokens))
        self._wait(self._has_begun, SUSPECT_AFTER_S)
        if not self._has_begun():
            self._wait_for_missing()
        return self._counts

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Wraps the computation of a step, in which cores wait for each other. If it fails because a core was lost or
        stopped, the error names that core."""
        try:
            yield
        except HeadraceError as error:
            if isinstance(error, PeerError) or (error.failure is not None and error.failure.type == PEER_LOST):
                self._wait(lambda: False, LOSS_HEARD_WITHIN_S)
            elif stopped := [rank for rank in self._stopped() if rank != self._rank]:
                said = f"{self._named(stopped)} did not come to the end of a step: {error}"
                raise PeerError(f"rank {self._rank} cannot go on: {said}") from error
            raise
        finally:
            self._is_computing = False

    def agree(self, what: str, can: bool, take_part: Callable[[], None], limit_s: float) -> bool:
        """Waits until all are ready, calling `take_part` for steps meanwhile; returns whether all can.

        Raises HeadraceError when not all are ready within the limit, and PeerError when one is lost.
        """
        end_s = time.monotonic() + limit_s
        self._agreed, self._is_withdrawn = None, False
        self._send(MemberReady(what, can))
        is_late = False
        while (agreed := self._agreed) is None and not self._is_withdrawn:
            left_s = end_s - time.monotonic()
            if left_s <= 0 and not is_late:
                is_late = True
                self._send(MemberWithdraws())
            self._wait(
                lambda: self._agreed is not None or self._is_withdrawn or self.is_called,
                DEADLINE_S if is_late else left_s,
            )
            if self.is_called:
                take_part()
        if agreed is None:
            raise HeadraceError(
                f"not all engines that share experts were ready to {what} within {limit_s:g} s: all must be asked to"
            )
        return agreed.can

    def announce(self, what: str) -> bool:
        """Like `agree`, but without waiting; returns whether all have announced it. Then `on_call` is called."""
        if not self._announced:
            self._announced = what
            self._send(MemberReady(what, True))
        return self._agreed is not None and self._agreed.what == what

    def close(self) -> None:
        """Leaves; the others fail unless all have agreed to stop."""
        with self._changed:
            self._is_over = True
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(1.0)
        self._connection.close()
        if self._hub is not None:
            self._hub.close()
        with suppress(OSError):
            os.close(self.shared_fd)

    def _send(self, message: ToHub) -> None:
        try:
            self._connection.send(msgspec.msgpack.encode(message))
        except OSError as error:
            self._wait(lambda: False, LOSS_HEARD_WITHIN_S)  # the receiving thread learns which core was lost
            raise PeerError(f"rank {self._rank} cannot go on: {error}") from error

    def _has_begun(self) -> bool:
        return self._begun >= self._step

    def _wait_for_missing(self) -> None:
        """Logs which cores have not voted, and goes on waiting. Raises PeerError at the deadline."""
        missing, since_s = self._ask_missing(), time.monotonic()
        if self._has_begun():
            return  # only this process had been suspended
        logger.warning("a step waits for %s", self._named(missing))
        self._wait(self._has_begun, DEADLINE_S)
        if not self._has_begun():
            raise PeerError(
                f"rank {self._rank} cannot go on: {self._named(self._ask_missing())} did not come to a step within "
                f"{DEADLINE_S:g} s"
            )
        logger.warning("all engines have joined the step, after %.1f s", SUSPECT_AFTER_S + time.monotonic() - since_s)

    def _ask_missing(self) -> tuple[int, ...]:
        self._missing = None
        self._send(AskMissing())
        self._wait(lambda: self._missing is not None, HUB_ANSWERS_WITHIN_S)
        return (0,) if self._missing is None else self._missing  # no answer: the hub runs in rank 0

    def _named(self, ranks: Iterable[int]) -> str:
        return " and ".join(f"the engine of data_parallel_rank {rank} ({self._processes(rank)})" for rank in ranks)

    def _processes(self, rank: int) -> str:
        pid, *workers = self._pids[rank]
        stopped = [str(each) for each in workers if is_stopped(each)]
        if is_stopped(pid):
            return f"pid {pid}, stopped by a signal or a debugger"
        if stopped:
            return f"pid {pid}, its worker of pid {' and '.join(stopped)} stopped by a signal or a debugger"
        return f"pid {pid}"

    def _stopped(self) -> list[int]:
        return [rank for rank, pids in enumerate(self._pids) if any(map(is_stopped, pids))]

    def _wait(self, condition: Callable[[], bool], limit_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or condition(), max(0.0, limit_s))
            if self._failure is not None and not condition():
                raise PeerError(failure=self._failure)

    def _watch_computing(self) -> None:
        """While a step is computed, waits for a message; if a stopped core delays the step, logs that and returns."""
        while self._is_computing and not self._incoming.poll(SUSPECT_AFTER_S * 1000):
            stopped = self._stopped()
            if stopped and self._is_computing:
                logger.warning("a step waits for %s", self._named(stopped))
                return

    def _hear(self) -> None:
        while True:
            self._watch_computing()
            try:
                data = self._connection.recv(MOST_BYTES)
            except OSError:
                data = b""
            message = msgspec.msgpack.decode(data, type=threadsafe(FromHub)) if data else Lost(0)
            if isinstance(message, Lost):
                self._lose(message.rank)
                return
            with self._changed:
                self._note(message)
                self._changed.notify_all()
            if isinstance(message, Call | Agreed):
                self.on_call()

    def _note(self, message: FromHub) -> None:
        match message:
            case Call():
                self._called = message.step
            case Go():
                self._begun, self._counts, self._is_computing = message.step, message.counts, True
            case Agreed():
                self._agreed = message
                self._is_over = self._is_over or message.what == STOP
            case Withdrawn():
                self._is_withdrawn = True
            case Missing():
                self._missing = message.ranks

    def _lose(self, rank: int) -> None:
        failure = Failure(
            message=f"the engine of data_parallel_rank {rank}, which has experts that this one needs, is gone",
            type=PEER_LOST,
            process="engine-core",
            rank=self._rank,
            pid=os.getpid(),
            phase="serve",
        )
        with self._changed:
            if self._is_over:
                return
            self._failure = failure
            self._changed.notify_all()
        mark_failed(self.shared_fd, rank)
        self._on_lost(failure)


class Hub:
    """Counts votes on a thread of rank 0, and ends when the first member is lost. It makes every decision, so that all
    members hear them in the same order."""

    def __init__(self, name: str, size: int, model: str, shared_bytes: int, end_s: float) -> None:
        """Raises EngineStartError if another hub still listens at the name at end_s (monotonic seconds)."""
        self._size, self._model = size, model
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._shared_fd = os.memfd_create("headrace-experts")
        os.ftruncate(self._shared_fd, shared_bytes)
        self._members: dict[int, socket.socket] = {}
        self._ranks: dict[socket.socket, int] = {}
        self._pids: dict[int, tuple[int, ...]] = {}
        self._step = 0
        self._votes: dict[int, int] = {}
        self._ready: dict[int, MemberReady] = {}
        self._is_complete = self._is_over = False
        self._bind(name, end_s)
        self._listener.listen(size)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._stop_read, self._stop_write = os.pipe()
        self._selector.register(self._stop_read, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="lock step hub", daemon=True)
        self._thread.start()

    def _bind(self, name: str, end_s: float) -> None:
        while True:
            try:
                self._listener.bind(_address(name))
                return
            except OSError as error:  # a previous hub still listens, but is about to end
                if error.errno != errno.EADDRINUSE or time.monotonic() > end_s:
                    raise EngineStartError(
                        f"the name {name!r} (data_parallel_meeting) cannot be used: {error}"
                    ) from error
            time.sleep(RETRY_S)

    def close(self) -> None:
        with suppress(OSError):
            os.write(self._stop_write, b"x")
        self._thread.join(1.0)

    def _serve(self) -> None:
        try:
            while not self._is_over:
                for key, _ in self._selector.select():
                    if key.fileobj == self._stop_read:
                        return
                    if key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, socket.socket):
                        self._hear(key.fileobj)
        finally:
            for connection in [*self._members.values(), self._listener]:
                connection.close()
            self._selector.close()
            for fd in (self._shared_fd, self._stop_read, self._stop_write):
                os.close(fd)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        try:
            check_user(connection)
        except ConnectionRefusedError:
            connection.close()
        else:
            self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> None:
        if connection.fileno() < 0:  # closed since it was selected
            return
        try:
            data = connection.recv(MOST_BYTES)
            message = msgspec.msgpack.decode(data, type=threadsafe(ToHub)) if data else None
        except (OSError, msgspec.MsgspecError):
            message = None
        rank = self._ranks.get(connection, -1)
        if message is None:
            self._lose(connection, rank)
        elif isinstance(message, Join):
            self._join(connection, message)
        elif rank >= 0 and self._is_complete:
            self._count(rank, message)

    def _join(self, connection: socket.socket, join: Join) -> None:
        refusal = ""
        if not 0 <= join.rank < self._size:
            refusal = f"data_parallel_rank {join.rank} came to a rendezvous of {self._size} engines"
        elif join.model != self._model:
            refusal = (
                f"engines that share experts must be alike: rank {join.rank} has {join.model}, rank 0 {self._model}"
            )
        if refusal:
            self._tell(connection, Joined(refusal))
            self._selector.unregister(connection)
            connection.close()
            return
        before = self._members.get(join.rank)
        if before is not None:  # an earlier process of this rank, which has died
            self._lose(before, join.rank)
        self._members[join.rank], self._ranks[connection] = connection, join.rank
        self._pids[join.rank] = (check_user(connection), *join.workers)
        if len(self._members) < self._size:
            return
        self._is_complete = True
        self._selector.unregister(self._listener)
        self._listener.close()
        pids = tuple(self._pids[rank] for rank in range(self._size))
        joined = msgspec.msgpack.encode(Joined(pids=pids))
        for each in self._members.values():
            with suppress(OSError):  # it has ended, which is noticed next
                socket.send_fds(each, [joined], [self._shared_fd])

    def _lose(self, connection: socket.socket, rank: int) -> None:
        self._selector.unregister(connection)
        connection.close()
        if rank < 0:
            return
        del self._ranks[connection]
        if self._members.get(rank) is connection:
            del self._members[rank]
        if self._is_complete:
            self._is_over = True
            self._tell_all(Lost(rank))

    def _count(self, rank: int, message: ToHub) -> None:
        match message:
            case Vote():
                self._votes[rank] = message.num_tokens
                if len(self._votes) == self._size:
                    self._step += 1
                    counts = tuple(self._votes[each] for each in range(self._size))
                    self._votes.clear()
                    self._tell_all(Go(self._step, counts))
                elif len(self._votes) == 1:
                    for each, connection in self._members.items():
                        if each != rank:
                            self._tell(connection, Call(message.step))
            case MemberReady():
                self._ready[rank] = message
                if len(self._ready) == self._size and len({each.what for each in self._ready.values()}) == 1:
                    can = all(each.can for each in self._ready.values())
                    self._ready.clear()
                    self._tell_all(Agreed(message.what, can))
            case MemberWithdraws():
                if self._ready.pop(rank, None) is not None:
                    self._tell(self._members[rank], Withdrawn())
            case AskMissing():
                missing = tuple(each for each in range(self._size) if each not in self._votes)
                self._tell(self._members[rank], Missing(missing))

    def _tell_all(self, message: FromHub) -> None:
        for connection in self._members.values():
            self._tell(connection, message)

    def _tell(self, connection: socket.socket, message: FromHub) -> None:
        with suppress(OSError):  # it has ended, which is noticed next
            connection.send(msgspec.msgpack.encode(message))
