"""The protocol of drafters: they guess the tokens that follow a row's known ones.

A drafter has one of two homes. One in the core guesses from tokens (`ngram.py`, `suffix.py`; a grammar, which knows the
only tokens that it allows). One in the rank is a model of its own, whose drafts come back with a step's result
(`from_rank.py`). Whatever they guess, an answer has the same tokens as without drafts; they only decide how many steps
it takes. `features/drafts.py` shares out a step's room and asks them.
"""

from __future__ import annotations

import numpy as np

from headrace.core.schedule.requests import RowTable
from headrace.ipc.step import StepPlan, StepResult

NOTHING = np.empty(0, np.int32)


class Drafter:
    """Base class: a drafter that guesses nothing. `rows` are [num_rows] int; masks are [num_rows] bool."""

    def bind(self, rows: RowTable) -> None:
        """Called once, before any other method."""
        self.table = rows

    def wants(self, rows: np.ndarray) -> np.ndarray:
        """Mask of the rows that this drafter may have a draft for once their last token is known."""
        return np.zeros(len(rows), bool)

    def look_up(self, rows: np.ndarray) -> None:
        """Prepares `propose` for rows that it wants, all of whose tokens are known. The table's tokens do not change
        between the two."""

    def propose(self, row: int, limit: int, least_likely: float = 0.0) -> np.ndarray:
        """A draft for a row that was looked up, [num_drafts] int32: at most `limit` tokens, possibly none. Tokens that
        are right with a probability below `least_likely`, as far as this drafter can tell, are not worth their time.
        """
        return NOTHING

    def planned(self, plan: StepPlan) -> None:
        """Sees every plan that the scheduler's stages made."""

    def quiet_steps(self, rows: np.ndarray) -> int | None:
        """How many more tokens each of `rows` may get before this drafter may have a draft. None: any number. Called
        with the planned token of each row counted."""
        return None

    def judged(self, rows: np.ndarray, num_drafts: np.ndarray, num_right: np.ndarray) -> None:
        """Sees how many of this drafter's draft tokens were accepted, [num_rows] each; the rows' new tokens are in the
        table."""

    def take(self, result: StepResult) -> None:
        """Sees a result whose tokens are in the table."""

    def leave(self, row: int) -> None:
        """The row's request leaves it; the table still holds it."""
