"""How long a test waits for what takes so long on a quiet machine."""

from __future__ import annotations

import os


def within(seconds: float) -> float:
    """The seconds, times as many threads as want each processor now or did in the last minute."""
    with open("/proc/loadavg") as file:
        average, _, _, running, _ = file.read().split()
    wanting = max(float(average), float(running.partition("/")[0]))
    return seconds * max(1.0, wanting / (os.cpu_count() or 1))
