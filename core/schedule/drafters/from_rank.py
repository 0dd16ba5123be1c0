"""Draft tokens of a model in the rank, such as a small model of the same vocabulary or heads trained for it.

The rank drafts after each step, for the rows that it sampled, and its drafts come back with the step's result
(`ipc/step.py:Drafts`). So a row is planned once the result of its last step is there.
"""

from __future__ import annotations

import numpy as np

from headrace.core.schedule.drafters.drafter import NOTHING, Drafter
from headrace.ipc.step import Drafts, StepResult


class RankDrafter(Drafter):
    def __init__(self) -> None:
        self._drafts: dict[int, tuple[int, np.ndarray]] = {}  # row -> its number of tokens, and what may follow them

    def wants(self, rows: np.ndarray) -> np.ndarray:
        return np.ones(len(rows), bool)

    def propose(self, row: int, limit: int, least_likely: float = 0.0) -> np.ndarray:
        num_tokens, draft = self._drafts.pop(row, (-1, NOTHING))
        # Steps whose results are not taken one by one, as with too many running rows, leave a draft behind.
        return draft[:limit] if num_tokens == self.table.num_known_tokens[row] else NOTHING

    def quiet_steps(self, rows: np.ndarray) -> int | None:
        return 0

    def take(self, result: StepResult) -> None:
        drafts = result.get(Drafts)
        if drafts is None:
            return
        counts = drafts.counts
        ends, tokens = np.cumsum(counts).tolist(), drafts.token_ids
        known = self.table.num_known_tokens[result.rows].tolist()
        for row, count, end, num_tokens in zip(result.rows.tolist(), counts.tolist(), ends, known, strict=True):
            self._drafts[row] = num_tokens, tokens[end - count : end]

    def leave(self, row: int) -> None:
        self._drafts.pop(row, None)
