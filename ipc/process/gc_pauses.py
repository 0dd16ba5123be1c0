"""How long Python's garbage collector keeps this process from its work, and how to keep it from that."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator


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
