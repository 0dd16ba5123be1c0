"""What several processes say, kept until somebody waits for it: the one wait loop for workers and for nodes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from headrace.executor.placement.base import Report, reader_of
from headrace.executor.placement.worker_messages import WAIT_FOR_CORE
from headrace.ipc.failure import Failure, HeadraceError
from headrace.ipc.messages import Message, Progress
from headrace.ipc.wait import Deadline

M = TypeVar("M", bound=Message)
SLOW_AFTER_S = 5.0
"""When some lag this far behind others at a start-up phase, they are named."""


class Replies:
    """Thread-safe: `hear` and `fail` are for the threads that listen, `gather` for the one that asked."""

    def __init__(
        self,
        size: int,
        *,
        error: Callable[[Failure], HeadraceError],
        late: Callable[[list[int]], object],
        lagging: Callable[[list[int]], str],
    ) -> None:
        """size: of the processes, which are numbered from 0. `error` is what to raise for a failure; `late` calls
        `fail` with what to say of those that missed a deadline; `lagging` describes those behind, as a phase.
        """
        self.size = size
        self.failure: Failure | None = None
        self.changed = threading.Condition()
        """Held while any of this changes; notified after."""
        self._error, self._late, self._lagging = error, late, lagging
        self._heard: list[list[Message]] = [[] for _ in range(size)]
        self._phases: list[Progress] = []  # of the first, until they are reported

    def hear(self, number: int, message: Message) -> None:
        with self.changed:
            if not isinstance(message, Progress):
                self._heard[number].append(message)
            elif number == 0 and message.phase != WAIT_FOR_CORE:
                self._phases.append(message)
            self.changed.notify_all()

    def fail(self, failure: Failure) -> bool:
        """Ends every `gather`, unless something has already; whether it was this."""
        with self.changed:
            if self.failure is not None:
                return False
            self.failure = failure
            self.changed.notify_all()
            return True

    def check(self) -> None:
        """Raises what ended it all, if anything did."""
        if self.failure is not None:
            raise self._error(self.failure)

    def gather(
        self,
        kind: type[M],
        *,
        of: range | None = None,
        report: Report | None = None,
        deadline: Deadline | None = None,
    ) -> list[M]:
        """The next message of this kind from each, in order. Raises what `error` makes of the first failure.

        `report` is told the first one's phases, and which lag behind the others. Those that are missing at the
        deadline are a failure.
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
                if self.failure is None:  # it is stopping, and blames nobody any more
                    raise deadline.fail(f"{kind.__name__} from {len(missing)} processes")
            elif lag.passed and report:
                report(self._lagging(missing))
                lag = Deadline(float("inf"))  # said once
            elif found and report and lag.total_s is None:
                lag = Deadline(SLOW_AFTER_S)

    def _take(self, kind: type[M], wanted: Sequence[int], found: dict[int, M]) -> bool:
        """Whether there is something to go on with."""
        before = len(found)
        for number in wanted:
            message = next((each for each in self._heard[number] if isinstance(each, kind)), None)
            if number not in found and message is not None:
                self._heard[number].remove(message)
                found[number] = message
        return len(found) > before or len(found) == len(wanted) or self.failure is not None


def _tell(report: Report | None, progress: Progress) -> None:
    read = reader_of(report)
    if progress.total_bytes:
        if read is not None:
            read(progress.read_bytes, progress.total_bytes)
    elif report is not None:
        report(progress.phase)


def _sooner(*deadlines: Deadline) -> float | None:
    """Seconds until the first of them; None where there is none to wait for."""
    left = [each.remaining_s for each in deadlines if each.remaining_s is not None]
    return min(*left, threading.TIMEOUT_MAX) if left else None
