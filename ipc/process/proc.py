"""What Linux tells of any process of this host."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple


class Status(NamedTuple):
    state: str
    """The letter of proc(5): R runs, S sleeps, T is stopped, Z has ended and was not asked for."""
    started: int
    """When, in clock ticks since boot: a process of the same number that started later is another."""


def status_of(pid: int) -> Status | None:
    """None for a process that is not there, or where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return Status(fields[0], int(fields[19]))
    except (OSError, IndexError, ValueError):
        return None


def oom_kill_count() -> int:
    """How many processes the kernel has killed for memory since boot; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
