"""MEAN and its relatives: sums of the hidden states of all tokens of the prompt, each times a weight."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor


class Mean:
    """The sums are in float64, so that it makes no difference in float32 how a prompt is divided."""

    reads_all: ClassVar[bool] = True

    def __init__(self) -> None:
        self._sums: dict[int, tuple[Tensor, int]] = {}  # by row: the sum so far, [width], and its number of tokens

    def wanted(self, begin: int, end: int, num_tokens: int) -> slice:
        return slice(begin, end)

    def add(self, row: int, hidden: Tensor, *, is_end: bool) -> Tensor | None:
        before, count = self._sums.pop(row, (0.0, 0))
        total, count = before + self.weighed(hidden, count).sum(0, dtype=torch.float64), count + len(hidden)
        if is_end:
            return (total / self.divisor(count)).float()[None]
        self._sums[row] = total, count
        return None

    def whole(self, states: list[Tensor]) -> Tensor:
        if len(states) == 1:  # the same numbers by fewer operations
            (hidden,) = states
            total = self.weighed(hidden, 0).sum(0, dtype=torch.float64)
            return (total / self.divisor(len(hidden))).float()[None]
        sums = torch.stack([self.weighed(hidden, 0).sum(0, dtype=torch.float64) for hidden in states])
        return (sums / torch.tensor([[self.divisor(len(hidden))] for hidden in states], dtype=torch.float64)).float()

    def leave(self, row: int) -> None:
        self._sums.pop(row, None)

    def weighed(self, hidden: Tensor, first: int) -> Tensor:
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

    def weighed(self, hidden: Tensor, first: int) -> Tensor:
        return hidden.double() * torch.arange(first + 1, first + len(hidden) + 1)[:, None]

    def divisor(self, count: int) -> float:
        return count * (count + 1) / 2
