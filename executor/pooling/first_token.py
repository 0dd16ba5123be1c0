"""CLS: the hidden state of the prompt's first token."""

from __future__ import annotations

from typing import ClassVar

import numpy as np


class FirstToken:
    reads_all: ClassVar[bool] = True

    def __init__(self) -> None:
        self._first: dict[int, np.ndarray] = {}

    def wanted(self, begin: int, end: int, num_tokens: int) -> slice:
        """Its own first one in each step, though only that of the first step counts: a row's end must be seen."""
        return slice(begin, begin + 1)

    def add(self, row: int, hidden: np.ndarray, *, is_end: bool) -> np.ndarray | None:
        self._first.setdefault(row, hidden.copy())
        return self._first.pop(row) if is_end else None

    def whole(self, states: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(states)

    def leave(self, row: int) -> None:
        self._first.pop(row, None)
