"""At most `max_loras` distinct adapters among the rows that run at once.

Every running row is in nearly every step, so what bounds the rows bounds the steps. A request whose adapters would be
too many waits beside the queue until a row leaves, and others pass it meanwhile, for MOST_STEPS_PASSED steps at most.
"""

from __future__ import annotations

from collections import Counter

from headrace.core.schedule.features.feature import StepFeature
from headrace.core.schedule.requests import Request


class AdapterLimit(StepFeature):
    """Counts the rows of each slot. A slot has one version as long as a request with it waits or runs."""

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._num_rows: Counter[int] = Counter()  # by slot

    def bars(self, request: Request) -> bool:
        new = sum(each.slot not in self._num_rows for each in request.adapters)
        return new > 0 and len(self._num_rows) + new > self._max_loras

    def enter(self, row: int) -> None:
        self._num_rows.update(self._slots(row))

    def leave(self, row: int) -> None:
        for slot in self._slots(row):
            self._num_rows[slot] -= 1
            if not self._num_rows[slot]:
                del self._num_rows[slot]

    def _slots(self, row: int) -> list[int]:
        request = self.context.rows.requests[row]
        return [] if request is None else [each.slot for each in request.adapters]
