"""A scheduler that preempts when it is told to, and a drafter that knows the answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from headrace.core.schedule.drafters.drafter import NOTHING, Drafter
from headrace.core.schedule.scheduler import Scheduler
from headrace.ipc.step import StepPlan


class PreemptingScheduler(Scheduler):
    """Preempts the last request before each step whose number is in `preempts_at`."""

    preempts_at: ClassVar[frozenset[int]] = frozenset()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._calls = 0

    def schedule(self) -> StepPlan | None:
        self._calls += 1
        if self._calls in self.preempts_at and self.num_running and not self.num_in_flight:
            self.settle(ended=True)
            self.preempt(self.rows.last_served())
        return super().schedule()


class KnowingDrafter(Drafter):
    """Drafts what follows in one of `texts`, as `change` makes it of (tokens, position of the first)."""

    def __init__(self, texts: list[list[int]], change: Callable[[np.ndarray, int], np.ndarray]) -> None:
        self._texts, self._change = [np.array(text, np.int32) for text in texts], change

    def wants(self, rows: np.ndarray) -> np.ndarray:
        return np.ones(len(rows), bool)

    def propose(self, row: int, limit: int, least_likely: float = 0.0) -> np.ndarray:
        known = int(self.table.num_known_tokens[row])
        own = self.table.token_ids[row, :known]
        for text in self._texts:
            if len(text) > known and np.array_equal(text[:known], own):
                return self._change(text[known : known + limit].copy(), known)
        return NOTHING

    def quiet_steps(self, rows: np.ndarray) -> int | None:
        return 0
