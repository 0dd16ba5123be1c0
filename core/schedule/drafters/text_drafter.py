"""What drafters have in common that search the texts of rows: the index of those texts, and each row's pace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.core.schedule.drafters.drafter import Drafter
from headrace.core.schedule.drafters.pacing import Confidence, Pacing
from headrace.core.schedule.drafters.row_texts import RowTexts
from headrace.core.schedule.requests import RowTable
from headrace.ipc.step import StepPlan


class TextDrafter(Drafter):
    """Base class: searches are paced by how the row's last drafts fared. Derived classes `look_up` and `propose`, and
    divide drafts into kinds, some of which are righter than others."""

    def search(self, rows: RowTable, lengths: Sequence[int], most_drafts: int, *, counts: bool, num_kinds: int) -> None:
        """Called by `bind`. lengths, counts: of the index (`TokenIndex`). most_drafts: of a row and step. num_kinds: of
        drafts."""
        self._texts = RowTexts(rows, lengths, counts=counts)
        self.pacing = Pacing(len(rows.active), most_drafts)
        self.confidence = Confidence(num_kinds)
        self._kind = [0] * len(rows.active)  # by row: of the last draft

    def tried(self, row: int, kind: int, draft: np.ndarray) -> np.ndarray:
        """The draft of a row, which is of this kind. An empty one was not likely enough."""
        self._kind[row] = kind
        if len(draft):
            self.pacing.found(row)
        else:
            self.confidence.forgo(kind)
            self.pacing.forgone(row, int(self.table.num_known_tokens[row]))
        return draft

    def wants(self, rows: np.ndarray) -> np.ndarray:
        return self.pacing.due(rows, self.table.num_tokens[rows])

    def planned(self, plan: StepPlan) -> None:
        for new in plan.new_rows:
            self.pacing.begin(new.row)
            self._texts.begin(new.row)

    def quiet_steps(self, rows: np.ndarray) -> int | None:
        return max(0, int((self.pacing.due_at[rows] - self.table.num_tokens[rows]).min()))

    def judged(self, rows: np.ndarray, num_drafts: np.ndarray, num_right: np.ndarray) -> None:
        known = self.table.num_known_tokens[rows]
        for each in zip(rows.tolist(), num_drafts.tolist(), num_right.tolist(), known.tolist(), strict=True):
            row, num_drafted, num_accepted, _ = each
            self.confidence.judge(self._kind[row], num_drafted, num_accepted)
            self.pacing.judge(*each)
