"""A file that hangs whoever opens it, as one on a dead mount does."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def hanging(path: Path) -> Iterator[None]:
    """Within the block (45 s at most, by the system's lease-break-time), opening the file waits. Nobody may have it
    open: a lease is what the system asks its holder for before it lets others open a file."""
    descriptor = os.open(path, os.O_RDWR)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # what the holder is asked with
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        yield
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        os.close(descriptor)
        signal.signal(signal.SIGIO, before)
