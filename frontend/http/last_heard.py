"""Heartbeats in a store that processes share: is the process that generates a response or runs a batch still alive?

Times are those of the system's monotonic clock, which all processes of a machine share. The wall clock may be set,
which must not make a process look dead.
"""

from __future__ import annotations

import time

SILENT_S = 30.0
"""A process that has sent no heartbeat for this long counts as gone: its work fails or is taken over."""

NEVER_S = -1e9
"""The heartbeat of work that its process has given up in good order: others may take it over at once."""


def now_s() -> float:
    """The time to store as a heartbeat."""
    return time.monotonic()


def is_silent(heard_s: float) -> bool:
    """Whether the process is gone. A time in the future was stored before the machine booted, so its process is too."""
    return not 0.0 <= time.monotonic() - heard_s <= SILENT_S
