"""Draft tokens by prompt lookup: if a row's last tokens also occur earlier in it, the tokens after them are the draft.

(Saxena, "Prompt Lookup Decoding", 2023.) The longest run counts, of prompt_lookup_max tokens at most. Among equally
long ones, that at the distance of the last draft wins, so that a copy goes on at its place; else the latest.
"""

from __future__ import annotations

import numpy as np

from headrace.core.options.speculation import NgramSpeculation
from headrace.core.schedule.drafters.drafter import NOTHING
from headrace.core.schedule.drafters.row_texts import continued
from headrace.core.schedule.drafters.text_drafter import TextDrafter
from headrace.core.schedule.requests import RowTable
from headrace.ipc.step import StepPlan

MOST_LENGTHS = 8
"""Most lengths of runs that are indexed. If prompt_lookup_min and prompt_lookup_max lie further apart, runs of lengths
between those indexed count as the next shorter one."""


class NgramDrafter(TextDrafter):
    def __init__(self, speculation: NgramSpeculation) -> None:
        self.speculation = speculation

    def bind(self, rows: RowTable) -> None:
        super().bind(rows)
        num_rows, speculation = len(rows.active), self.speculation
        longest = max(1, rows.token_ids.shape[1] - 1)  # of a row's tokens, with another run before
        fewest, most = (min(each, longest) for each in (speculation.prompt_lookup_min, speculation.prompt_lookup_max))
        spread = np.linspace(fewest, most, MOST_LENGTHS).round()
        lengths = sorted({int(each) for each in spread})
        self.search(rows, lengths, speculation.num_speculative_tokens, counts=False, num_kinds=2 * len(lengths))
        self._distance = np.zeros(num_rows, np.int64)  # how many tokens back the last draft was found
        self._found = np.zeros(num_rows, np.int64)  # how many tokens back the next draft is; 0: there is none
        self._length = np.zeros(num_rows, np.int64)  # which of the index's lengths was found

    def look_up(self, rows: np.ndarray) -> None:
        self._texts.update(rows)
        runs, distances = self._texts.runs(rows), np.zeros(len(rows), np.int64)
        for nth, length in reversed(list(enumerate(self._texts.index.lengths))):
            missing = distances == 0
            if not missing.any():
                break
            lacking = rows[missing]
            latest, last = self._texts.find(lacking, runs[missing], length), self._distance[lacking]
            distances[missing] = np.where(self._matches(lacking, last, length), last, latest)
            self._length[lacking] = nth
        self._found[rows] = distances
        for row in rows[distances == 0].tolist():
            self.pacing.missed(row, int(self.table.num_known_tokens[row]))

    def _matches(self, rows: np.ndarray, distances: np.ndarray, length: int) -> np.ndarray:
        """[num_rows] bool: whether a row's last `length` tokens also stand `distances` tokens before."""
        ends = self.table.num_known_tokens[rows].astype(np.int64)
        fits = (distances > 0) & (ends - distances >= length)
        at = np.maximum(ends[:, None] + np.arange(-length, 0), 0)
        before = np.maximum(at - distances[:, None], 0)
        tokens = self.table.token_ids
        matches: np.ndarray = fits & (tokens[rows[:, None], at] == tokens[rows[:, None], before]).all(axis=1)
        return matches

    def propose(self, row: int, limit: int, least_likely: float = 0.0) -> np.ndarray:
        distance, limit = int(self._found[row]), min(limit, int(self.pacing.limit[row]))
        if not distance or limit <= 0:
            return NOTHING
        goes_on = distance == int(self._distance[row])  # a copy that was found before is righter than a new one
        kind = 2 * int(self._length[row]) + goes_on
        size = min(limit, self.confidence.most_tokens(kind, least_likely))
        self._distance[row] = distance
        return self.tried(row, kind, continued(self._texts.text(row), distance, size))

    def planned(self, plan: StepPlan) -> None:
        super().planned(plan)
        for new in plan.new_rows:
            self._distance[new.row] = 0
