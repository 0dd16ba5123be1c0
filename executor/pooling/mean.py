"""MEAN and its relatives: sums of the hidden states of all tokens of the prompt, each times a weight."""

from __future__ import annotations

from typing import ClassVar

import numpy as np


class Mean:
    """The sums are in float64, so that it makes no difference in float32 how a prompt is divided."""

    reads_all: ClassVar[bool] = True

    def __init__(self) -> None:
        self._sums: dict[int, tuple[np.ndarray, int]] = {}  # by row: the sum so far, [width], and its number of tokens

    def wanted(self, begin: int, end: int, num_tokens: int) -> slice:
        return slice(begin, end)

    def add(self, row: int, hidden: np.ndarray, *, is_end: bool) -> np.ndarray | None:
        before, count = self._sums.pop(row, (0.0, 0))
        total, count = before + self._sum(hidden, count), count + len(hidden)
        if is_end:
            return (total / self.divisor(count)).astype(np.float32)[None]
        self._sums[row] = total, count
        return None

    def whole(self, states: list[np.ndarray]) -> np.ndarray:
        made = [(self._sum(hidden, 0) / self.divisor(len(hidden))).astype(np.float32) for hidden in states]
        return made[0][None] if len(made) == 1 else np.stack(made)

    def leave(self, row: int) -> None:
        self._sums.pop(row, None)

    def _sum(self, hidden: np.ndarray, first: int) -> np.ndarray:
        """[width] float64: of the tokens from position `first` on."""
        total: np.ndarray = np.add.reduce(self.weighed(hidden, first), axis=0, dtype=np.float64)
        return total

    def weighed(self, hidden: np.ndarray, first: int) -> np.ndarray:
        """The hidden states [num_tokens, width] of the tokens from position `first` on, times their weights."""
        return hidden

    def divisor(self, count: int) -> float:
        return count


class MeanSquareRoot(Mean):
    """The sum over the square root of the number of tokens."""

    def divisor(self, count: int) -> float:
        return count**0.5


class WeightedMean(Mean):
    """The n-th token has the weight n."""

    def weighed(self, hidden: np.ndarray, first: int) -> np.ndarray:
        return hidden * np.arange(first + 1.0, first + len(hidden) + 1)[:, None]

    def divisor(self, count: int) -> float:
        return count * (count + 1) / 2
