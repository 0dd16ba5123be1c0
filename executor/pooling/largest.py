"""MAX: for each value the largest of all tokens of the prompt."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor


class Largest:
    reads_all: ClassVar[bool] = True

    def __init__(self) -> None:
        self._found: dict[int, Tensor] = {}

    def wanted(self, begin: int, end: int, num_tokens: int) -> slice:
        return slice(begin, end)

    def add(self, row: int, hidden: Tensor, *, is_end: bool) -> Tensor | None:
        found = hidden.amax(0, keepdim=True)
        if row in self._found:
            found = torch.maximum(self._found.pop(row), found)
        if is_end:
            return found
        self._found[row] = found
        return None

    def whole(self, states: list[Tensor]) -> Tensor:
        return torch.stack([hidden.amax(0) for hidden in states])

    def leave(self, row: int) -> None:
        self._found.pop(row, None)
