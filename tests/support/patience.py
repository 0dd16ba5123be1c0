"""Waits of tests, on machines that may be busy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

import psutil

LEAST_PAUSE_S, MOST_PAUSE_S = 0.01, 0.25
"""Between two looks at a condition: three times as long as the look took."""


def within(seconds: float) -> float:
    """The seconds, times as many threads as want each processor now or did in the last minute."""
    with open("/proc/loadavg") as file:
        average, _, _, running, _ = file.read().split()
    wanting = max(float(average), float(running.partition("/")[0]))
    return seconds * max(1.0, wanting / (os.cpu_count() or 1))


def wait_until(
    condition: Callable[[], bool], timeout_s: float, what: str | Callable[[], str], most_pause_s: float = MOST_PAUSE_S
) -> float:
    """Waits for the condition, longer on a busy machine. Returns the seconds that it took."""
    began_s = asked_s = time.monotonic()
    while not condition():
        answered_s = time.monotonic()
        if answered_s - began_s > within(timeout_s):
            raise AssertionError(f"{what if isinstance(what, str) else what()} did not happen within {timeout_s:g} s")
        # What is asked of a server, such as its metrics, keeps it and the tests beside this one from their work.
        time.sleep(min(max(LEAST_PAUSE_S, 3 * (answered_s - asked_s)), most_pause_s))
        asked_s = time.monotonic()
    return time.monotonic() - began_s


def still_alive(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that have not ended in time. Zombies have: their parent, or process 1 for orphans, may be slow to wait."""
    alive, began_s = list(processes), time.monotonic()
    while alive := [each for each in alive if not has_ended(each)]:
        if time.monotonic() - began_s > within(timeout_s):
            break
        time.sleep(0.01)
    return alive


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True
