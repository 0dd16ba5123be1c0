"""For a simulation, which creates millions of objects that live until it ends, and then works with them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

_MADE_BETWEEN_WALKS = 50_000


@contextlib.contextmanager
def lasting_objects() -> Iterator[Callable[[], None]]:
    """Within the block the collector is disabled until the yielded function is called. From then on it traverses only
    objects created since, and runs less often."""
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
