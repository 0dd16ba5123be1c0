"""Limits the rate of migrations by a token bucket, so that the loss of many engines does not flood the others."""

from __future__ import annotations

_BURST_S = 4.0
_LEAST_CAPACITY = 64
"""Minimum capacity, in requests, that is assumed for a fleet, so that a small one may migrate at this rate too."""


class MigrationAllowance:
    """A bucket, full at first, that gains a share of the fleet's capacity per second, up to the gain of `_BURST_S`."""

    def __init__(self, per_capacity_s: float) -> None:
        self._per_capacity_s = per_capacity_s
        self._left: float | None = None  # None until the first call, when the capacity is known

    def refill(self, since_s: float, capacity: int) -> None:
        """since_s: seconds since the last refill. capacity: how many requests all engines can run at once."""
        per_s = self._per_capacity_s * max(_LEAST_CAPACITY, capacity)
        most = _BURST_S * per_s
        self._left = min(most, (most if self._left is None else self._left) + since_s * per_s)

    def take(self, capacity: int) -> bool:
        """Whether one more request may migrate now; if so, it is counted."""
        if self._left is None:
            self.refill(0.0, capacity)
        assert self._left is not None
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
