"""MEAN: the mean of the hidden states of all tokens of the prompt."""

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
        total, count = before + hidden.sum(0, dtype=torch.float64), count + len(hidden)
        if is_end:
            return (total / count).float()[None]
        self._sums[row] = total, count
        return None

    def leave(self, row: int) -> None:
        self._sums.pop(row, None)
