"""Returns freed memory to the system."""

from __future__ import annotations

import contextlib
import ctypes


def give_back_freed_memory() -> None:
    """Calls malloc_trim: glibc keeps freed memory between blocks in use, tens of megabytes after a burst of messages.

    Takes about 0.1 ms per megabyte returned. Does nothing if the C library has no malloc_trim.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
