"""An asyncio event loop on virtual time: it never sleeps, and runs with equal seeds are identical."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import heapq
import itertools
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, TypeVar
from unittest import mock

Result = TypeVar("Result")
_START_S = 1_000.0
"""Not zero, which some code may take for `never`."""
_MOST_CANCELLED = 100
"""Cancelled handles are removed from the queue when they are more than this, and more than half of it."""


class _NoFiles(selectors.BaseSelector):
    """A selector that never reports events: only the loop's own wake-up pipe is registered."""

    def __init__(self) -> None:
        self._files: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, fileobj if isinstance(fileobj, int) else fileobj.fileno(), events, data)
        self._files[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._files.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._files

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs callbacks in order of virtual time, and those of equal times in the order in which they were scheduled. It
    waits by advancing its clock.

    It has its own queue, because asyncio's compares handles with a Python method, a dozen times per callback, which
    would be most of the cost of a large fleet's messages.
    """

    _ready: collections.deque[asyncio.Handle]
    _stopping: bool

    def __init__(self) -> None:
        self._now_s = _START_S
        self._due: list[tuple[float, int, Callable[[Any], None] | None, Any]] = []
        """A heap of (time, running number, function, its argument), or (time, running number, None, handle)."""
        self._numbers = itertools.count()
        self._num_cancelled = 0  # cancelled handles in _due
        super().__init__(_NoFiles())

    def time(self) -> float:
        """The virtual time in seconds."""
        return self._now_s

    def post(self, when_s: float, deliver: Callable[[Any], None], what: Any) -> None:
        """`call_at` for a callback that is never cancelled. An exception in it ends the run."""
        heapq.heappush(self._due, (when_s, next(self._numbers), deliver, what))

    def call_at(  # type: ignore[override]  # the base ties the arguments' types to the callback's
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        handle._scheduled = True  # type: ignore[attr-defined]
        heapq.heappush(self._due, (when, next(self._numbers), None, handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Called by each handle when it is cancelled."""
        self._num_cancelled += handle._scheduled  # type: ignore[attr-defined]
        if self._num_cancelled > _MOST_CANCELLED and 2 * self._num_cancelled > len(self._due):
            self._due = [each for each in self._due if each[2] is not None or not each[3].cancelled()]
            heapq.heapify(self._due)
            self._num_cancelled = 0

    def _run_once(self) -> None:
        """One iteration: advances the clock if nothing is ready, then runs callbacks that are due and ready ones.

        Raises RuntimeError if nothing is ready or scheduled."""
        ready = self._ready
        if not (ready or self._stopping):
            if not self._due:
                raise RuntimeError("the simulation stands still: something waits for what nobody will send")
            self._now_s = max(self._now_s, self._due[0][0])
        while self._due and self._due[0][0] <= self._now_s:
            _, _, deliver, what = heapq.heappop(self._due)
            if deliver is not None:
                deliver(what)
            elif what.cancelled():
                self._num_cancelled -= 1
            else:
                what._scheduled = False
                ready.append(what)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()


def virtual_loop() -> VirtualLoop:
    """The running event loop, which must be a VirtualLoop."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop), "simulations run on virtual time"
    return loop


def run_virtually(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` on virtual time. Meanwhile `time.monotonic` and `time.time` return virtual time too."""
    loop = VirtualLoop()
    with _told_by(loop), contextlib.closing(loop):
        asyncio.set_event_loop(loop)
        try:
            return loop.run_until_complete(main)
        finally:
            _cancel_all(loop)
            asyncio.set_event_loop(None)


@contextlib.contextmanager
def _told_by(loop: VirtualLoop) -> Iterator[None]:
    with mock.patch.object(time, "monotonic", loop.time), mock.patch.object(time, "time", loop.time):
        yield


def _cancel_all(loop: VirtualLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
