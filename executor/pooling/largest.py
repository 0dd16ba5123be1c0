"""MAX: for each value the largest of all tokens of the prompt."""

from __future__ import annotations

from typing import ClassVar

import numpy as np


class Largest:
    reads_all: ClassVar[bool] = True

    def __init__(self) -> None:
        self._found: dict[int, np.ndarray] = {}

    def wanted(self, begin: int, end: int, num_tokens: int) -> slice:
        return slice(begin, end)

    def add(self, row: int, hidden: np.ndarray, *, is_end: bool) -> np.ndarray | None:
        found = hidden.max(0, keepdims=True)
        if row in self._found:
            found = np.maximum(self._found.pop(row), found)
        if is_end:
            return found
        self._found[row] = found
        return None

    def whole(self, states: list[np.ndarray]) -> np.ndarray:
        return np.stack([hidden.max(0) for hidden in states])

    def leave(self, row: int) -> None:
        self._found.pop(row, None)
