"""When a row may get its next draft, and how long it may be, by how its last ones fared:

    all draft tokens accepted        twice as many, up to num_speculative_tokens
    the first n accepted             n + 1
    none accepted                    1, after a rest of 2, 4, 8 ... 64 tokens
    nothing found                    after a pause of 1, 2, 3 tokens
    found, but not worth its time    after a pause of 4 tokens

Text that is copied, edited or summarised has many repetitions; elsewhere drafts only cost time.
"""

from __future__ import annotations

import numpy as np

LONGEST_REST = 64
"""Most tokens before the next draft of a row whose drafts were rejected."""
LONGEST_PAUSE = 3
"""Most tokens before the next search of a row in which none was found: few, so that a repetition is noticed soon."""
PAUSE_FORGONE = 4
"""Tokens before the next search of a row whose draft was not likely enough."""


class Pacing:
    """Columns of all rows. num_tokens: a row's number of known tokens."""

    def __init__(self, num_rows: int, most_drafts: int) -> None:
        self._most_drafts = most_drafts
        self.limit = np.full(num_rows, most_drafts, np.int32)
        """[num_rows]: most tokens of the row's next draft"""
        self.due_at = np.zeros(num_rows, np.int32)
        """[num_rows]: number of tokens from which on the row may get a draft"""
        self._num_failed = np.zeros(num_rows, np.int32)  # consecutive drafts of which no token was accepted
        self._num_missed = np.zeros(num_rows, np.int32)  # consecutive searches that found nothing

    def begin(self, row: int) -> None:
        """A request enters the row."""
        self.limit[row] = self._most_drafts
        for column in (self.due_at, self._num_failed, self._num_missed):
            column[row] = 0

    def missed(self, row: int, num_tokens: int) -> None:
        """A search found nothing."""
        self._num_missed[row] += 1
        self.due_at[row] = num_tokens + min(int(self._num_missed[row]), LONGEST_PAUSE)

    def forgone(self, row: int, num_tokens: int) -> None:
        """What a search found was not likely enough."""
        self.due_at[row] = num_tokens + PAUSE_FORGONE

    def found(self, row: int) -> None:
        self._num_missed[row] = 0

    def judge(self, row: int, num_drafts: int, num_right: int, num_tokens: int) -> None:
        """num_right of num_drafts tokens were accepted."""
        if num_right:
            self._num_failed[row] = 0
            most = 2 * num_drafts if num_right == num_drafts else num_right + 1
            self.limit[row] = min(most, self._most_drafts)
        else:
            self._num_failed[row] += 1
            self.limit[row] = 1
            self.due_at[row] = num_tokens + min(LONGEST_REST, 2 ** int(self._num_failed[row]))
