"""Facts about processes of this host, from Linux's /proc."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import NamedTuple


class Status(NamedTuple):
    state: str
    """The letter of proc(5), of its first thread: R running, S sleeping, T stopped, Z ended but not yet waited for by
    its parent."""
    started: int
    """Start time in clock ticks since boot: a process with the same pid and a later start is another process."""
    used_ticks: int
    """Processor time of all its threads, in clock ticks."""


def status_of(pid: int) -> Status | None:
    """None if there is no such process, or no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return Status(fields[0], int(fields[19]), int(fields[11]) + int(fields[12]))
    except (OSError, IndexError, ValueError):
        return None


def wants_to_run(pid: int) -> bool:
    """Whether a thread of this process runs, waits for a processor, or for its memory or files."""
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            if file.read_text().rpartition(") ")[2][:1] in {"R", "D"}:
                return True
    return False


def anonymous_bytes(pid: int) -> int:
    """Memory that a process and those that it started hold by themselves: without files that they map, which others may
    share and the kernel can drop. 0 if there is no such process, or no /proc."""
    import psutil

    pids = [pid]
    with contextlib.suppress(psutil.NoSuchProcess):
        pids += [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return sum(map(_anonymous_bytes, pids))


def _anonymous_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    return 0


_PF_EXITING, _SIGKILL_BIT = 0x4, 1 << (signal.SIGKILL - 1)


def is_dying(pid: int) -> bool:
    """The process has ended or is being ended: a SIGKILL that has been sent is pending, or it exits. False without
    /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return Path("/proc/self").exists()
    except OSError:
        return False
    pending = [int(line.split()[1], 16) for line in text.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING) or any(each & _SIGKILL_BIT for each in pending)


def oom_kill_count() -> int:
    """How many processes the kernel has killed for lack of memory since boot; 0 if it does not report this."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
