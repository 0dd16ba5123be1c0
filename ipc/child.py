"""What every program that Headrace starts as a child does at its start and at its end."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends, should the orderly ways fail."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def leave(status: int) -> NoReturn:
    """Exits at once: everything is closed by now, and tearing the interpreter and torch down takes a second or two."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody may be left to read them
            stream.flush()
    os._exit(status)
