"""How many migrations may happen now: a token bucket, so that the loss of many engines does not flood the others."""

from __future__ import annotations

_BURST_S = 4.0
_LEAST_CAPACITY = 64
"""Requests: a fleet that runs fewer at once may still move as many as one of this size."""


class MigrationAllowance:
    """Fills with a share of the fleet's capacity each second, up to what comes in `_BURST_S`; it is full at first."""

    def __init__(self, per_capacity_s: float) -> None:
        self._per_capacity_s = per_capacity_s
        self._left: float | None = None  # until it is first asked, as the capacity is known only then

    def refill(self, since_s: float, capacity: int) -> None:
        """since_s: the time since the last refill. capacity: requests that all engines can run at once."""
        per_s = self._per_capacity_s * max(_LEAST_CAPACITY, capacity)
        most = _BURST_S * per_s
        self._left = min(most, (most if self._left is None else self._left) + since_s * per_s)

    def take(self, capacity: int) -> bool:
        """Whether one more request may move now, which is counted."""
        if self._left is None:
            self.refill(0.0, capacity)
        assert self._left is not None
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
