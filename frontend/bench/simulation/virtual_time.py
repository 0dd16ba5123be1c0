"""An asyncio event loop whose time is a number: nothing waits, and a run with one seed is the same each time."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import time
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, TypeVar
from unittest import mock

Result = TypeVar("Result")
_START_S = 1_000.0
"""Not zero, which some code may take for never."""


class _VirtualSelector(selectors.BaseSelector):
    """Waits by moving the clock on. The loop's own pipe is all that is registered, and nothing ever comes by it."""

    def __init__(self) -> None:
        self.now_s = _START_S
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
        if timeout is None:
            raise RuntimeError("the simulation stands still: something waits for what nobody will send")
        self.now_s += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs callbacks in the order of their virtual times."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Seconds."""
        return self._virtual.now_s


def run_virtually(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` on virtual time, which `time.monotonic` and `time.time` tell meanwhile."""
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
