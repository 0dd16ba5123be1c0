"""A step's begin and end on the device, in the host's time."""

from __future__ import annotations

import time

from headrace.executor.gpu.device_state import Device, Mark

MOST_LATE_S = 1e-3
"""A host that waited for a step returns at most this long after its end; any longer difference is clock drift."""


class DeviceClock:
    """Converts the device's times to the host's, starting from a moment at which the host waited for a step: intervals
    between steps are as exact as the device's clock, and no time is later than the host's now."""

    def __init__(self, device: Device) -> None:
        self._last = device.mark()  # of the previous step; must not be recorded again before the next call
        self._last.record()
        self._last.synchronize()
        self._last_s = time.monotonic()

    def times(self, began: Mark, ended: Mark, waited: bool) -> tuple[float, float]:
        """(began_s, ended_s) of the next step, on time.monotonic(); both marks have passed.

        waited: the host has just waited for the end, which was therefore now.
        """
        now_s = time.monotonic()
        ended_s = self._last_s + ended.seconds_since(self._last)
        if ended_s > now_s or (waited and now_s - ended_s > MOST_LATE_S):
            ended_s = now_s
        self._last, self._last_s = ended, ended_s
        return ended_s - ended.seconds_since(began), ended_s
