"""How likely draft tokens of some kind are right, as those before them turned out."""

from __future__ import annotations

import math

MEMORY = 0.95
"""What a draft counts for after the next one of its kind."""
RIGHT, WRONG = 2.0, 0.2
"""What is believed of a kind before any draft of it, and again after many that were not tried: most are right."""


class Confidence:
    """Decayed counts by kind. A draft of n tokens is a run of trials that ends with the first wrong one."""

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
