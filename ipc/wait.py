"""Bounded waits: each has a deadline."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from headrace.ipc.failure import HeadraceError

T = TypeVar("T")


class WaitTimeoutError(HeadraceError, TimeoutError):
    """The awaited event did not happen in time; the message names it and the time limit."""


class Deadline:
    """A point in time shared by several waits. With `None` seconds it never passes."""

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

    def poll(self, poller: select.poll, what: str) -> None:
        """Waits until one of the poller's files is ready. Raises WaitTimeoutError."""
        left_ms = None if self._end_s is None else max(0.0, 1e3 * (self._end_s - time.monotonic()))
        if not poller.poll(left_ms):
            raise self.fail(what)

    def fail(self, what: str) -> WaitTimeoutError:
        return WaitTimeoutError(f"{what} did not happen within {self.total_s:g} s")


def wait_readable(fd: int, deadline: Deadline, *, what: str) -> None:
    """Waits until `fd` is readable. Raises WaitTimeoutError at the deadline."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    deadline.poll(poller, what)


def open_pidfd(pid: int) -> int:
    """A file descriptor that becomes readable when the process ends (Linux). The caller closes it."""
    return os.pidfd_open(pid)


class BoundedCalls:
    """Runs calls that may hang, such as file access on a dead network mount or user code, with a deadline.

    Used by one caller at a time. A call that exceeds the deadline continues in its own thread, where nothing can end
    it; its result is dropped, and further calls are refused until it has ended.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._hanging: tuple[str, threading.Thread] | None = None

    def run(self, what: str, call: Callable[..., T], *arguments: Any) -> T:
        """Returns the call's result. Raises what the call raises, and WaitTimeoutError. `what` begins a sentence."""
        if self._hanging is not None and self._hanging[1].is_alive():
            raise HeadraceError(f"{self._hanging[0]} of before still hangs; try again when it has ended")
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(call(*arguments))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name=what, daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if thread.is_alive():
            self._hanging = what, thread
            raise WaitTimeoutError(
                f"{what} did not end within {self._timeout_s:g} s (control_timeout); the engine goes on without it"
            )
        if errors:
            raise errors[0]
        return results[0]
