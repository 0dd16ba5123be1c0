"""How long Python's garbage collector keeps this process from its work, and how to keep it from that."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator

_MADE_BETWEEN_WALKS = 50_000


@contextlib.contextmanager
def gc_watched(on_pause: Callable[[float], None]) -> Iterator[None]:
    """Calls back with the seconds of each collection, in the thread that it came to, until the block ends."""
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
    """Keeps the collector still within `with` blocks, in any number of threads.

    For work that makes many objects and drops them before it ends: the collector would walk through all of them again
    and again, and every thread waits while it does.
    """

    def __init__(self, longest_s: float) -> None:
        """longest_s: where one block follows on another for so long, young objects are collected within."""
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
def lasting_objects() -> Iterator[Callable[[], None]]:
    """For a program that makes millions of objects which live to its end, and then works with them: within the block
    the collector walks through nothing, until what the block is given is called; and from then on only through what was
    made since, some of it at a time."""
    was_enabled, thresholds = gc.isenabled(), gc.get_threshold()
    gc.disable()

    def made() -> None:
        gc.freeze()
        gc.set_threshold(_MADE_BETWEEN_WALKS, *thresholds[1:])
        gc.enable()

    try:
        yield made
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        gc.enable() if was_enabled else gc.disable()


class IdleCollector:
    """Has all objects walked through only while nothing runs: thousands of requests that are alive take 20 ms and more.

    Young ones are walked often, and few at a time. What refers to itself and has grown old waits for a quiet moment, or
    for some millions of objects.
    """

    IDLE_S = 1.0
    _YOUNG, _YOUNG_WALKS, _MOST_WALKS = 2_000, 2, 2_500
    _DUE_WALKS = 25
    """Of young objects, since the last of all."""

    def __init__(self) -> None:
        self._num_busy = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """What was made so far lives for ever, and need not be looked at again."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(self._YOUNG, self._YOUNG_WALKS, self._MOST_WALKS)

    def busy(self, change: int) -> None:
        """So much more runs, or less. In an event loop."""
        self._num_busy += change
        if self._num_busy == 0 and self._timer is None and gc.get_count()[2] >= self._DUE_WALKS:
            self._timer = asyncio.get_running_loop().call_later(self.IDLE_S, self._collect)

    def _collect(self) -> None:
        self._timer = None
        if self._num_busy == 0 and gc.isenabled():
            gc.collect()
