"""Measures how long Python's garbage collector pauses a process, and shortens or defers those pauses."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def gc_watched(on_pause: Callable[[float], None]) -> Iterator[None]:
    """Until the block ends, calls back with the seconds of each collection, in the thread that ran it."""
    began_s = 0.0

    def on_gc(phase: str, info: dict[str, int]) -> None:
        nonlocal began_s
        if phase == "start":
            began_s = time.perf_counter()
        else:
            on_pause(time.perf_counter() - began_s)

    gc.callbacks.append(on_gc)
    try:
        yield
    finally:
        gc.callbacks.remove(on_gc)


class CollectorHold:
    """Disables the collector within `with` blocks, in any number of threads.

    For work that creates many objects and drops them before it ends: the collector would traverse them again and
    again, while every thread waits.
    """

    def __init__(self, longest_s: float) -> None:
        """longest_s: after this time of uninterrupted (overlapping) blocks, the young generations are collected."""
        self._longest_s = longest_s
        self._lock = threading.Lock()
        self._num_held = 0
        self._began_s = 0.0

    def __enter__(self) -> None:
        with self._lock:
            now_s = time.monotonic()
            if self._num_held == 0:
                gc.disable()
                self._began_s = now_s
            elif now_s - self._began_s > self._longest_s:
                gc.collect(1)
                self._began_s = now_s
            self._num_held += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_held -= 1
            if self._num_held == 0:
                gc.enable()


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Turns garbage collection off. For large imports, whose objects all stay: the collector would walk through them
    again and again, which takes a tenth of the processor time of importing torch."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class IdleCollector:
    """Runs full collections only while no request runs: with thousands of live requests one takes 20 ms or more.

    Young objects are collected often, a few at a time. Old reference cycles remain until an idle moment, or until some
    millions of objects were created.
    """

    IDLE_S = 1.0
    _YOUNG, _YOUNG_WALKS, _MOST_WALKS = 2_000, 2, 2_500
    _DUE_WALKS = 25
    """Due after this many collections of young objects since the last full one."""

    def __init__(self) -> None:
        self._num_busy = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Freezes all objects created so far: they are assumed to live until the process ends."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(self._YOUNG, self._YOUNG_WALKS, self._MOST_WALKS)

    def busy(self, change: int) -> None:
        """Adds `change`, which may be negative, to the number of running requests. Call in an event loop."""
        self._num_busy += change
        if self._num_busy == 0 and self._timer is None and gc.get_count()[2] >= self._DUE_WALKS:
            self._timer = asyncio.get_running_loop().call_later(self.IDLE_S, self._collect)

    def _collect(self) -> None:
        self._timer = None
        if self._num_busy == 0 and gc.isenabled():
            gc.collect()
