"""When steps began and ended on a device, in the host's time."""

from __future__ import annotations

import time

from headrace.executor.gpu.device_state import Device, Mark

MOST_LATE_S = 1e-3
"""A host that waited for a step comes back this long after its end at most; what seems longer is the clocks' drift."""


class DeviceClock:
    """Chains steps by the device's own clock, to a moment at which the host waited for one: what lies between two
    steps is then as exact as the device's clock, and the whole is never later than the host's."""

    def __init__(self, device: Device) -> None:
        self._last = device.mark()  # the step's before; it must not be recorded anew before the next call
        self._last.record()
        self._last.synchronize()
        self._last_s = time.monotonic()

    def times(self, began: Mark, ended: Mark, waited: bool) -> tuple[float, float]:
        """(began_s, ended_s) on time.monotonic(), of the next step; both marks have passed.

        waited: the host has just waited for the end, so that it is now.
        """
        now_s = time.monotonic()
        ended_s = self._last_s + ended.seconds_since(self._last)
        if ended_s > now_s or (waited and now_s - ended_s > MOST_LATE_S):
            ended_s = now_s
        self._last, self._last_s = ended, ended_s
        return ended_s - ended.seconds_since(began), ended_s
