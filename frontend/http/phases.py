"""The lines that a start prints: each phase with its seconds, which sum to the time since the program began."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from headrace.core.process.child_output import startup_table
from headrace.ipc.messages import Ready


class PhaseLog:
    """Thread-safe."""

    def __init__(self, first: str, began_s: float) -> None:
        """`began_s` is when the program began, in seconds since the epoch."""
        self._lock = threading.Lock()
        self._began_s = self._entered_s = began_s
        self._phase: str | None = first

    def enter(self, phase: str) -> None:
        """The phase before has ended: its line is printed."""
        with self._lock:
            self._end()
            self._phase = phase

    def finish(self, text: str) -> None:
        """The last phase has ended, and this is what the user waited for."""
        with self._lock:
            self._end()
            say(f"{text} ({self._entered_s - self._began_s:.2f} s)")

    def _end(self) -> None:
        now_s = time.time()
        if self._phase is not None:
            say(f"[{now_s - self._entered_s:7.3f} s] {self._phase}")
        self._entered_s, self._phase = now_s, None


def say_workers(ready: Ready) -> None:
    """Where the time of an engine's start went, process by process, if it has several."""
    if ready.ranks_startup_s:
        say(f"the engine's start by process\n{startup_table(ready.startup_s, ready.ranks_startup_s)}")


def say(text: str) -> None:
    """A line for the person who started the server."""
    print(f"headrace: {text}", file=sys.stderr, flush=True)


def process_began_s() -> float:
    """When this process was started, in seconds since the epoch; now, where the system does not say."""
    now_s = time.time()
    try:
        after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(after_name[19])  # field 22 of proc(5): since boot
        return now_s - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return now_s
