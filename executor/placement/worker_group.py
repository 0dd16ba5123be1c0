"""The worker programs of one engine as a group: started together, queried together, and failing as one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from headrace.core.process.child import Child, ChildOptions, ask_for_stacks
from headrace.executor.placement.worker_messages import (
    WAIT_FOR_CORE,
    WAIT_FOR_TURN,
    FromWorker,
    LargeMessage,
    StartWorker,
)
from headrace.executor.rank import Report, reader_of
from headrace.ipc.failure import PEER_LOST, EngineDeadError, EngineStartError, Failure, HeadraceError
from headrace.ipc.messages import Message, Progress
from headrace.ipc.transport.channel import ChannelClosedError
from headrace.ipc.wait import Deadline

M = TypeVar("M", bound=Message)
PROGRAM = ("-m", "headrace.executor.placement.worker", "--parent-fd")
CAUSE_GRACE_S = 1.0
"""How long to wait, after a worker reports that another one failed, for that other one's own failure."""
COMMAND_GRACE_S = 5.0
"""A wait for the answer to a command lasts this much longer than a worker may take for it."""
SLOW_AFTER_S = 5.0
"""Workers that lag this far behind others in a start-up phase are named."""


class WorkerGroup:
    """Thread-safe. The first worker to fail determines the group's failure; `on_failure` is called once with it."""

    def __init__(
        self,
        starts: list[StartWorker],
        on_failure: Callable[[Failure], None],
        on_large_message: Callable[[LargeMessage], None],
        unfinished: Callable[[], list[int]],
    ) -> None:
        """Starts all programs, which run at once. Raises EngineStartError when one cannot be started.

        unfinished: returns the workers that still have a part of some step to do. Workers are numbered from 0 here,
        whatever the rank of the first. They must all be ready within `startup_timeout`.
        """
        self._first_rank = starts[0].rank
        self.size = len(starts)
        self._startup_timeout_s = starts[0].options.startup_timeout
        self._control_timeout_s = starts[0].options.control_timeout
        self._start_ends = Deadline(self._startup_timeout_s)
        self._said = Replies(self.size, error=self.error, late=self._late, lagging=self._lagging)
        self._on_failure, self._on_large_message, self._unfinished = on_failure, on_large_message, unfinished
        self._changed = self._said.changed
        self._failures: dict[int, Failure] = {}
        self._is_stopping = False
        self._is_serving = False
        self.children: list[Child] = []
        try:
            for start in starts:
                self.children.append(self._start(start))
        except EngineStartError:
            self.stop(0.0)
            raise
        for child in self.children:
            child.on_exit(lambda failure, child=child: self._ended(child, failure))  # type: ignore[misc]

    def send(self, message: Message, rank: int | None = None, deadline: Deadline | None = None) -> None:
        """Sends to one worker or to all. One that has ended is skipped: waiting for its answer raises the failure."""
        for child in self.children if rank is None else [self.children[rank]]:
            try:
                child.send(message, deadline)
            except ChannelClosedError:
                continue

    @property
    def failure(self) -> Failure | None:
        """The failure that ended the group, if any."""
        return self._said.failure

    def gather(self, kind: type[M], *, ranks: range | None = None, report: Report | None = None) -> list[M]:
        """The next message of this kind from each worker, by rank. Raises the group's failure instead, if there is one.

        `report` receives the first worker's phases, and the names of workers that lag behind. Workers that miss the
        deadline, of the start or of a command, have failed.
        """
        deadline = Deadline(command_limit_s(self._control_timeout_s)) if self._is_serving else self._start_ends
        return self._said.gather(kind, of=ranks, report=report, deadline=deadline)

    def serve(self) -> None:
        """From now on a failure is the end of a running engine instead of a failed start."""
        self._is_serving = True

    def error(self, failure: Failure) -> HeadraceError:
        """The exception to raise for the failure."""
        return (EngineDeadError if self._is_serving else EngineStartError)(failure=failure)

    def fail(self, failure: Failure) -> Failure:
        """Makes this the group's failure unless it has one already; returns the group's failure."""
        if self._said.fail(failure) and not self._is_stopping:
            self._on_failure(failure)
        assert self.failure is not None, "it has one now"
        return self.failure

    def hung(self, ranks: list[int], what: str) -> Failure:
        """The failure of workers that did not do `what`, without those that only waited for another worker.

        Asks the others to log their stacks, which become the last lines of their logs.
        """
        echoes = self._wait_for_echoes(ranks)
        waiting = echoes | {rank for rank in ranks if self.children[rank].phase == WAIT_FOR_TURN}
        culprits = [rank for rank in ranks if rank not in waiting] or ranks
        ask_for_stacks([self.children[rank] for rank in culprits])
        first = self.children[culprits[0]]
        names = ", ".join(f"{self.children[rank].name} (pid {self.children[rank].pid})" for rank in culprits)
        stopped = [str(self._first_rank + rank) for rank in culprits if self.children[rank].is_stopped]
        return Failure(
            message=f"{names} did not {what}",
            type="Timeout",
            process="worker",
            rank=self._first_rank + culprits[0],
            pid=first.pid,
            phase="step" if self._is_serving else first.phase,
            log_tail=first.log_tail,
            hint=f"worker {' and '.join(stopped)} is stopped by a signal or a debugger" if stopped else "",
        )

    def stop(self, deadline_s: float) -> None:
        """Ends all workers together; kills those that are not gone within `deadline_s` or, after a failure, at once."""
        with self._changed:
            self._is_stopping = True
        for child in self.children:
            if self.failure is None and deadline_s > 0:
                child.ask_to_stop(deadline_s)
        end_s = time.monotonic() + deadline_s
        while self.failure is None and time.monotonic() < end_s and any(child.alive for child in self.children):
            with self._changed:
                self._changed.wait(0.01)
        for child in self.children:
            child.kill()

    def _start(self, start: StartWorker) -> Child:
        rank, memory, index = start.rank, start.memory, start.rank - self._first_rank
        store = (start.store_fd,) if start.store_fd >= 0 else ()
        return Child(
            f"worker {rank}",
            list(PROGRAM),
            start,
            ChildOptions(
                receives=FromWorker,
                on_message=lambda message: self._hear(index, message),
                pass_fds=(memory.steps, memory.results, memory.collectives, *store),
                process="worker",
                rank=rank,
            ),
        )

    def _hear(self, rank: int, message: Any) -> None:
        if isinstance(message, LargeMessage):
            self._on_large_message(message)
            return
        self._said.hear(rank, message)

    def _late(self, ranks: list[int]) -> None:
        what = f"become ready within {self._startup_timeout_s:g} s (startup_timeout)"
        if self._is_serving:
            what = f"answer a command within {self._control_timeout_s:g} s (control_timeout)"
        self.fail(self.hung(ranks, what))

    def _lagging(self, ranks: list[int]) -> str:
        return "wait for " + ", ".join(f"{child.name} ({child.phase})" for child in (self.children[r] for r in ranks))

    def _ended(self, child: Child, failure: Failure) -> None:
        """Runs on the child's watching thread when the child has ended without being asked to."""
        rank = child.options.rank - self._first_rank
        if failure.traceback:  # unexpected; without one it is a sentence for the user, which needs no such evidence
            how = f"{child.name} of {self.size} (pid {child.pid}) ended with exit status {child.status}"
            failure = msgspec.structs.replace(failure, hint=failure.hint or how, log_tail=child.log_tail)
        elif self._is_serving and rank in self._unfinished():  # workers announce no phase for each step
            failure = msgspec.structs.replace(failure, phase="step")
        with self._changed:
            self._failures[rank] = failure
            self._changed.notify_all()
        if failure.type != PEER_LOST:
            self.fail(failure)
            return
        timer = threading.Timer(CAUSE_GRACE_S, self._trace_echo, args=(failure,))
        timer.daemon = True
        timer.start()

    def _trace_echo(self, echo: Failure) -> None:
        """Handles a worker that gave up waiting for one that did not fail: that one hangs."""
        if self.failure is None and not self._is_stopping:
            left = [rank for rank in self._unfinished() if rank not in self._failures]
            self.fail(self.hung(left, "do its part of a step, and the others gave up waiting") if left else echo)

    def _wait_for_echoes(self, ranks: list[int]) -> set[int]:
        """The ranks that gave up waiting for another one, after giving them time to."""
        with self._changed:
            if len(ranks) > 1:
                self._changed.wait_for(lambda: len(self._failures.keys() & set(ranks)) >= len(ranks) - 1, CAUSE_GRACE_S)
            return {rank for rank in ranks if rank in self._failures and self._failures[rank].type == PEER_LOST}


class Replies:
    """Collects replies of several processes. Thread-safe: receivers call `hear` and `fail`, the asker `gather`."""

    def __init__(
        self,
        size: int,
        *,
        error: Callable[[Failure], HeadraceError],
        late: Callable[[list[int]], object],
        lagging: Callable[[list[int]], str],
    ) -> None:
        """size: number of processes, which are numbered from 0. error: makes the exception for a failure. late: must
        call `fail` for the given processes, which missed a deadline. lagging: describes processes that are behind, as a
        phase."""
        self.size = size
        self.failure: Failure | None = None
        self.changed = threading.Condition()
        """Held while any attribute changes, and notified afterwards."""
        self._error, self._late, self._lagging = error, late, lagging
        self._heard: list[list[Message]] = [[] for _ in range(size)]
        self._phases: list[Progress] = []  # the first process's, until they are reported

    def hear(self, number: int, message: Message) -> None:
        with self.changed:
            if not isinstance(message, Progress):
                self._heard[number].append(message)
            elif number == 0 and message.phase != WAIT_FOR_CORE:
                self._phases.append(message)
            self.changed.notify_all()

    def fail(self, failure: Failure) -> bool:
        """Ends every `gather` with the failure, unless there is one already; returns whether it was the first."""
        with self.changed:
            if self.failure is not None:
                return False
            self.failure = failure
            self.changed.notify_all()
            return True

    def check(self) -> None:
        """Raises the failure, if there is one."""
        if self.failure is not None:
            raise self._error(self.failure)

    def gather(
        self, kind: type[M], *, of: range | None = None, report: Report | None = None, deadline: Deadline | None = None
    ) -> list[M]:
        """The next message of this kind from each process, in order. Raises `error(failure)` for the first failure.

        `report` receives the first process's phases, and which processes lag behind. Processes that miss the deadline
        are a failure.
        """
        wanted = range(self.size) if of is None else of
        found: dict[int, M] = {}
        deadline = deadline or Deadline(None)
        lag = Deadline(None)
        while True:
            with self.changed:
                if not self._take(kind, wanted, found) and not (report and self._phases):
                    self.changed.wait(_sooner(deadline, lag))
                    self._take(kind, wanted, found)
                phases, self._phases = (self._phases, []) if report else ([], self._phases)
            self.check()
            for progress in phases if report else ():
                _tell(report, progress)
            missing = [number for number in wanted if number not in found]
            if not missing:
                return [found[number] for number in wanted]
            if deadline.passed:
                self._late(missing)
                if self.failure is None:  # the group is stopping and records no more failures
                    raise deadline.fail(f"{kind.__name__} from {len(missing)} processes")
            elif lag.passed and report:
                report(self._lagging(missing))
                lag = Deadline(float("inf"))  # reported once
            elif found and report and lag.total_s is None:
                lag = Deadline(SLOW_AFTER_S)

    def _take(self, kind: type[M], wanted: Sequence[int], found: dict[int, M]) -> bool:
        """Whether it found a new message, all of them, or a failure."""
        before = len(found)
        for number in wanted:
            message = next((each for each in self._heard[number] if isinstance(each, kind)), None)
            if number not in found and message is not None:
                self._heard[number].remove(message)
                found[number] = message
        return len(found) > before or len(found) == len(wanted) or self.failure is not None


def command_limit_s(control_timeout_s: float) -> float:
    """The time limit of a worker's answer to a command. A worker itself ends each part that may hang, of which a
    command has at most two: finding and reading a checkpoint, or stopping a profile and writing it."""
    return 2 * control_timeout_s + COMMAND_GRACE_S


def _tell(report: Report | None, progress: Progress) -> None:
    read = reader_of(report)
    if progress.total_bytes:
        if read is not None:
            read(progress.read_bytes, progress.total_bytes)
    elif report is not None:
        report(progress.phase)


def _sooner(*deadlines: Deadline) -> float | None:
    """Seconds until the first of them; None if none is set."""
    left = [each.remaining_s for each in deadlines if each.remaining_s is not None]
    return min(*left, threading.TIMEOUT_MAX) if left else None
