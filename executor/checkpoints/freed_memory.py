"""Memory that packing has freed, given back to the system while a model is loaded: the C library keeps pieces of up to
32 MB for later, and those that lie between others in use can add up to a third of the packed weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

EVERY_BYTES = 16 << 20
"""Of packed weights, between one time and the next."""
_TRIM: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
"""glibc's; other C libraries keep less."""


class FreedMemory:
    def __init__(self) -> None:
        self._packed_bytes = 0

    def add(self, num_bytes: int) -> None:
        """So many bytes of weights have been packed, and what they were packed from has been freed."""
        self._packed_bytes += num_bytes
        if self._packed_bytes >= EVERY_BYTES and _TRIM is not None:
            _TRIM(0)
            self._packed_bytes = 0
