"""Bounded waits: a deadline, and the processes whose death ends the wait early."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterable

from headrace.ipc.failure import HeadraceError


class WaitTimeoutError(HeadraceError, TimeoutError):
    """What was waited for did not come in time; the message says what and how long."""


class Deadline:
    """A point in time that several waits share. `None` seconds never comes."""

    __slots__ = ("_end_s", "total_s")

    def __init__(self, seconds: float | None) -> None:
        self.total_s = seconds
        self._end_s = None if seconds is None else time.monotonic() + seconds

    @property
    def remaining_s(self) -> float | None:
        return None if self._end_s is None else max(0.0, self._end_s - time.monotonic())

    @property
    def passed(self) -> bool:
        return self._end_s is not None and time.monotonic() >= self._end_s

    def fail(self, what: str) -> WaitTimeoutError:
        return WaitTimeoutError(f"{what} did not happen within {self.total_s:g} s")


def wait_readable(fd: int, deadline: Deadline, *, what: str, watch_pidfds: Iterable[int] = ()) -> bool:
    """Waits until `fd` can be read: True; or until a watched process ended: False.

    Raises WaitTimeoutError at the deadline. `fd` wins when both are ready, so a last message is not lost.
    """
    poller = select.poll()
    for each in (fd, *watch_pidfds):
        poller.register(each, select.POLLIN)
    remaining_s = deadline.remaining_s
    events = poller.poll(None if remaining_s is None else remaining_s * 1e3)
    if not events:
        raise deadline.fail(what)
    return any(ready == fd for ready, _ in events)


def open_pidfd(pid: int) -> int:
    """A file descriptor that becomes readable when the process ends (Linux). The caller closes it."""
    return os.pidfd_open(pid)
