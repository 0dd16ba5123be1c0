"""When a row may get its next draft, and how long it may be, by how its last ones fared:

    all draft tokens accepted        twice as many, up to num_speculative_tokens
    the first n accepted             n + 1
    none accepted                    1, after a rest of 2, 4, 8 ... 64 tokens
    nothing found                    after a pause of 1, 2, 3 tokens
    found, but not worth its time    after a pause of 4 tokens

A pause ends early when another row is searched: each search costs the step the repeated decode
(`core/schedule/repeated_decode.py`) that it could have been part of, so rows had better be searched in the same steps.

Text that is copied, edited or summarised has many repetitions; elsewhere drafts only cost time.
"""

from __future__ import annotations

import math

import numpy as np

LONGEST_REST = 64
"""Most tokens before the next draft of a row whose drafts were rejected."""
LONGEST_PAUSE = 3
"""Most tokens before the next search of a row in which none was found: few, so that a repetition is noticed soon."""
PAUSE_FORGONE = 4
"""Tokens before the next search of a row whose draft was not likely enough."""
MEMORY = 0.95
"""What a draft counts for after the next one of its kind."""
RIGHT, WRONG = 2.0, 0.2
"""What is believed of a kind before any draft of it, and again after many that were not tried: most are right."""


class Pacing:
    """Columns of all rows. num_tokens: a row's number of known tokens."""

    def __init__(self, num_rows: int, most_drafts: int) -> None:
        self._most_drafts = most_drafts
        self.limit = np.full(num_rows, most_drafts, np.int32)
        """[num_rows]: most tokens of the row's next draft"""
        self.due_at = np.zeros(num_rows, np.int32)
        """[num_rows]: number of tokens from which on the row may get a draft"""
        self._pauses = np.zeros(num_rows, bool)  # until due_at, unless another row is searched
        self._num_failed = np.zeros(num_rows, np.int32)  # consecutive drafts of which no token was accepted
        self._num_missed = np.zeros(num_rows, np.int32)  # consecutive searches that found nothing

    def begin(self, row: int) -> None:
        """A request enters the row."""
        self.limit[row] = self._most_drafts
        for column in (self.due_at, self._pauses, self._num_failed, self._num_missed):
            column[row] = 0

    def due(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """[num_rows] bool: which of `rows` may get a draft now, all of whose decodes are planned together."""
        due: np.ndarray = num_tokens >= self.due_at[rows]
        return due | self._pauses[rows] if due.any() else due

    def missed(self, row: int, num_tokens: int) -> None:
        """A search found nothing."""
        self._num_missed[row] += 1
        self.due_at[row] = num_tokens + min(int(self._num_missed[row]), LONGEST_PAUSE)
        self._pauses[row] = True

    def forgone(self, row: int, num_tokens: int) -> None:
        """What a search found was not likely enough."""
        self.due_at[row] = num_tokens + PAUSE_FORGONE
        self._pauses[row] = True

    def found(self, row: int) -> None:
        self._num_missed[row] = 0
        self._pauses[row] = False

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


class Confidence:
    """How likely draft tokens of some kind are right, as those before them turned out: decayed counts by kind. A draft
    of n tokens is a run of trials that ends with the first wrong one."""

    def __init__(self, num_kinds: int) -> None:
        self._right, self._wrong = [RIGHT] * num_kinds, [WRONG] * num_kinds

    def judge(self, kind: int, num_drafts: int, num_right: int) -> None:
        """num_right of num_drafts tokens were accepted."""
        self._right[kind] = MEMORY * self._right[kind] + num_right
        self._wrong[kind] = MEMORY * self._wrong[kind] + (num_right < num_drafts)

    def forgo(self, kind: int) -> None:
        """A draft was not tried. What is known of the kind grows old."""
        self._right[kind] += (1 - MEMORY) * (RIGHT - self._right[kind])
        self._wrong[kind] += (1 - MEMORY) * (WRONG - self._wrong[kind])

    def of(self, kind: int) -> float:
        """The probability that a token is right, if those before it in its draft are."""
        return self._right[kind] / (self._right[kind] + self._wrong[kind])

    def most_tokens(self, kind: int, least_likely: float) -> int:
        """How many tokens of a draft are right, all up to each of them, with at least this probability."""
        chance = self.of(kind)
        if least_likely <= 0 or chance >= 1:
            return 1 << 30
        return int(math.log(least_likely) / math.log(chance) + 1e-9) if chance > 0 else 0
