"""How long Python's garbage collector keeps this process from its work."""

from __future__ import annotations

import contextlib
import gc
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
