"""A helper program that forks warm workers, for work that may crash, hang or fill the memory: each can be killed.

What the work needs (a library, a tokenizer) is loaded once, in the helper, which does no such work itself. When a
worker ends, the next takes milliseconds to fork. Each worker serves one lane.

    parent                                  helper program: loads, forks, and waits for the end of
    Helper.send   -- message -->              a worker per lane: works within limits that the kernel enforces
    Sent.receive <-- answer ----              (or the helper sends WorkerEnded, after the worker ended at its work)

The helper and its workers end with the parent, however that ends.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import msgspec

from headrace.ipc.failure import HeadraceError
from headrace.ipc.process.child import STOP_SIGNALS, die_with_parent, leave_signals_to_parent
from headrace.ipc.process.program import own_environment, python_command, starting_folder
from headrace.ipc.transport.channel import Channel, ChannelClosedError
from headrace.ipc.wait import Deadline, WaitTimeoutError, open_pidfd

START_S = 60.0
"""Longest wait for a helper's start, even on a busy machine."""
RENEW = 64
"""Exit status of a worker that asks to be forked anew, as it has much memory that nothing needs any more."""
LOOKING_S = 150e-6
"""How long a caller looks for an answer without sleeping."""
MOST_NOT_LOOKED = 63
"""Most answers in a row for which it sleeps at once."""
_LOST_LANE = 100
"""Exit status, with the lane added, of a helper of whose messages with a worker one may be in the channel by half, as
the worker has ended of itself in the middle."""
_IDLE, _RECEIVING, _WORKING, _ANSWERING = range(4)


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """The first message of each lane: the helper has loaded what the work needs."""


class WorkerEnded(msgspec.Struct, frozen=True, tag=True):
    """The answer to a message during whose work the worker ended."""

    status: int
    """Negative: the number of the signal that ended it."""


def is_from_outside(status: int) -> bool:
    """Whether somebody else ended a process of this status, as in WorkerEnded."""
    return status == -signal.SIGKILL or -status in STOP_SIGNALS


class HelperEndedError(ChannelClosedError):
    """The helper has ended, with all of its workers."""

    def __init__(self, message: str, lane: int | None) -> None:
        """lane: whose worker ended of itself and took the helper with it; None: nothing is known of the cause, such as
        if the helper was killed."""
        super().__init__(message)
        self.lane = lane


class Looking:
    """Whether a caller looks for its answer for a moment before it sleeps. To be woken takes as long as a short work
    does, but looking helps only where the worker has a processor meanwhile. So after each answer that did not come in
    time, more of them are waited for asleep."""

    def __init__(self) -> None:
        self._not_looked = self._left = 0

    def look(self, channel: Channel) -> None:
        if self._left:
            self._left -= 1
        elif channel.looks_for(LOOKING_S):
            self._not_looked = 0
        else:
            self._not_looked = self._left = min(2 * self._not_looked + 1, MOST_NOT_LOOKED)


@dataclass
class _Running:
    """A helper process and its channels, one per lane."""

    process: subprocess.Popen[bytes]
    channels: list[Channel]
    starting: set[int]
    """Lanes that have not reported yet that they are ready."""


class Helper:
    """Owns a helper process, which starts when it is needed. Thread-safe; one thread at a time uses a lane."""

    def __init__(
        self,
        module: str,
        messages: Any,
        num_lanes: int,
        *,
        beginning: Any = None,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        answers_soon: Collection[int] = (),
    ) -> None:
        """module: calls `run_helper`. messages: the union of those in both directions. beginning: the first message,
        for the helper itself. environment: variables in addition to this process's. pass_fds: files that it gets under
        the same numbers. answers_soon: lanes of which most work takes less than a caller takes to fall asleep and be
        woken."""
        self._module, self._messages, self._num_lanes = module, messages, num_lanes
        self._beginning, self._environment = beginning, environment or {}
        self._pass_fds = tuple(pass_fds)
        self._looking = {lane: Looking() for lane in answers_soon}
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._owner = os.getpid()
        self._is_stopped = False
        """`stop` was called."""

    @property
    def pid(self) -> int | None:
        """The process that forks the workers; None if none runs."""
        return None if self._running is None else self._running.process.pid

    def start(self) -> None:
        """Starts the process, without waiting, if it does not run."""
        self._begin()

    def send(self, lane: int, message: Any, most_wait_s: float) -> Sent:
        """Passes work to the lane's worker; one answer follows. Raises HelperEndedError if the helper has ended."""
        running = self._running
        if running is None or self._is_stopped:
            running = self._begin()
        try:
            running.channels[lane].send(message, Deadline(most_wait_s))
        except (ChannelClosedError, WaitTimeoutError) as error:
            raise HelperEndedError(str(error), self._end(running)) from error
        return Sent(running, lane, self._end, self._looking.get(lane))

    def end(self) -> None:
        """Ends the process; the next work starts another."""
        if (running := self._running) is not None:
            self._end(running)

    def stop(self) -> None:
        """Kills the process for good, which also ends calls that wait for it."""
        self._is_stopped = True
        running = self._running
        if running is not None and os.getpid() == self._owner:  # not in a forked copy of the parent
            running.process.kill()
            running.process.wait()

    def _begin(self) -> _Running:
        with self._lock:
            if self._is_stopped:
                raise HeadraceError("it is stopping, with its helper processes")
            if self._running is None:
                self._running = self._started()
                if self._is_stopped:  # another thread called `stop` meanwhile, before there was a process to kill
                    self.stop()
                    raise HeadraceError("it is stopping, with its helper processes")
            return self._running

    def _started(self) -> _Running:
        with contextlib.ExitStack() as theirs:
            pairs = [Channel.pair(self._messages) for _ in range(self._num_lanes)]
            numbers = [theirs.enter_context(sock).fileno() for _, sock in pairs]
            process = subprocess.Popen(
                python_command("-m", self._module, str(os.getpid()), *map(str, numbers)),
                cwd=starting_folder(),
                pass_fds=(*numbers, *self._pass_fds),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # what matters is in the answer, and nothing may hold the parent's pipes
                # Else each thread of a library reserves 128 MiB of address space, which counts towards the limit. And a
                # process that forks should have no other threads.
                env={**own_environment(), "MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1", **self._environment},
            )
        channels = [channel for channel, _ in pairs]
        if self._beginning is not None:
            with contextlib.suppress(ChannelClosedError):  # it was killed, which the next message finds out
                channels[0].send(self._beginning, Deadline(START_S))
        return _Running(process, channels, set(range(self._num_lanes)))

    def _end(self, running: _Running) -> int | None:
        """Ends the helper with its workers; a thread that waits for another lane learns that. Returns which lane it
        had lost, if that has ended it before."""
        with self._lock:
            if self._running is running:
                self._running = None
        if os.getpid() != self._owner:
            return None
        running.process.kill()
        lost = running.process.wait() - _LOST_LANE
        return lost if 0 <= lost < self._num_lanes else None


class Sent:
    """Work that was passed to a worker."""

    __slots__ = ("_end", "_lane", "_looking", "_running")

    def __init__(
        self, running: _Running, lane: int, end: Callable[[_Running], int | None], looking: Looking | None
    ) -> None:
        self._running, self._lane, self._end, self._looking = running, lane, end, looking

    def receive(self, most_wait_s: float, *, start_s: float = START_S, ends: bool = True) -> Any:
        """The answer, or WorkerEnded. start_s: how long to wait for the helper itself.

        Raises HelperEndedError if the helper has ended. Raises WaitTimeoutError if the answer takes longer; the
        helper is ended then, unless `ends` is False: then `receive` may be called again.
        """
        running, lane = self._running, self._lane
        channel = running.channels[lane]
        try:
            if lane in running.starting:
                channel.receive(Deadline(start_s))
                running.starting.discard(lane)
            elif self._looking is not None:
                self._looking.look(channel)
            return channel.receive(Deadline(most_wait_s))
        except WaitTimeoutError:
            if ends:
                self._end(running)
            raise
        except (HeadraceError, OSError, ValueError) as error:  # ValueError: its channel was closed
            raise HelperEndedError(f"the helper process was ended ({error})", self._end(running)) from error


# --- the helper's side ------------------------------------------------------------------------------------------------


class Work(Protocol):
    """What a worker does."""

    def begin(self, lane: int, former: int) -> None:
        """Called in each new worker, such as to limit its memory. former: the status of the lane's worker before it, as
        in WorkerEnded; 0 for the first."""
        ...

    def do(self, message: Any) -> Any:
        """The answer to a message."""
        ...

    def is_bloated(self) -> bool:
        """Whether the worker should be replaced, since it holds memory that it no longer needs."""
        ...


def run_helper(
    messages: Any, load: Callable[[Channel], Work], *, stack_bytes: Mapping[int, int] | None = None
) -> NoReturn:
    """Main function of a helper program: forks a worker per lane, each again when it ends, until the parent closes the
    channels or ends.

    load: loads what the work needs; its argument brings the beginning, if there is one. stack_bytes: of lanes whose
    workers work on a thread with a stack of this size.
    """
    leave_signals_to_parent()  # the parent ends this process by closing the channels
    parent, *numbers = map(int, sys.argv[1:])
    with contextlib.suppress(ChannelClosedError, ProcessLookupError):
        # The program reads the beginning, and each worker after it the work that follows.
        channels = [Channel.inherited(number, messages, reads_ahead=False) for number in numbers]
        parents_end = open_pidfd(parent)
        if os.getppid() == parent:
            work = load(channels[0])
            gc.freeze()  # else the first collection in each worker would copy all pages with objects
            for channel in channels:
                channel.send(WorkerReady())
            _fork_workers(channels, parents_end, work, stack_bytes or {})
    os._exit(0)


def _fork_workers(channels: Sequence[Channel], parents_end: int, work: Work, stack_bytes: Mapping[int, int]) -> None:
    states = mmap.mmap(-1, len(channels))
    poller = select.poll()
    poller.register(parents_end, select.POLLIN)
    workers: dict[int, tuple[int, int]] = {}  # lane and pid by pidfd

    helper = os.getpid()

    def fork(lane: int, former: int) -> None:
        states[lane] = _IDLE
        if (pid := os.fork()) == 0:
            die_with_parent(helper)
            _work(channels, lane, former, states, work, stack_bytes.get(lane))
        pidfd = open_pidfd(pid)
        poller.register(pidfd, select.POLLIN)
        workers[pidfd] = lane, pid

    for lane in range(len(channels)):
        fork(lane, 0)
    while workers:
        for ready, _ in poller.poll():
            if ready == parents_end:
                return
            lane, pid = workers.pop(ready)
            poller.unregister(ready)
            os.close(ready)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            state = states[lane]
            if state == _WORKING:
                channels[lane].send(WorkerEnded(status), Deadline(START_S))
            elif status == 0:
                continue  # the parent has closed this lane
            elif state != _IDLE:  # half a message is in the channel: the parent starts a new helper
                os._exit(0 if is_from_outside(status) else _LOST_LANE + lane)
            elif status > 0 and status != RENEW:
                return  # it cannot even begin
            fork(lane, status)


def _work(
    channels: Sequence[Channel], lane: int, former: int, states: mmap.mmap, work: Work, stack_bytes: int | None
) -> NoReturn:
    channel, status = channels[lane], 1
    for other in channels:
        if other is not channel:
            other.close()

    def serve() -> None:
        nonlocal status
        try:
            work.begin(lane, former)
            while True:
                channel.wait(Deadline(None))
                states[lane] = _RECEIVING
                message = channel.receive(Deadline(None))
                states[lane] = _WORKING
                answer = work.do(message)
                states[lane] = _ANSWERING
                channel.send(answer)
                states[lane] = _IDLE
                message = answer = None
                if work.is_bloated():
                    status = RENEW
                    return
        except ChannelClosedError:
            states[lane] = _IDLE
            status = 0

    try:
        if stack_bytes is None:
            serve()
        else:
            threading.stack_size(stack_bytes)
            thread = threading.Thread(target=serve)
            thread.start()
            thread.join()
    finally:
        os._exit(status)


def limit_memory(most_bytes: int) -> None:
    """Lets this process map so many bytes more than it has mapped so far."""
    with open("/proc/self/statm") as file:
        mapped_bytes = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = mapped_bytes + most_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
