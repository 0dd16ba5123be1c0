"""ALL: the hidden states of all tokens, one vector for each."""

from __future__ import annotations

from typing import ClassVar

import numpy as np


class AllTokens:
    reads_all: ClassVar[bool] = True

    def __init__(self) -> None:
        self._parts: dict[int, list[np.ndarray]] = {}

    def wanted(self, begin: int, end: int, num_tokens: int) -> slice:
        return slice(begin, end)

    def add(self, row: int, hidden: np.ndarray, *, is_end: bool) -> np.ndarray | None:
        self._parts.setdefault(row, []).append(hidden if is_end else hidden.copy())
        return np.concatenate(self._parts.pop(row)) if is_end else None

    def whole(self, states: list[np.ndarray]) -> np.ndarray:
        raise NotImplementedError("a row's vectors are not joined")

    def leave(self, row: int) -> None:
        self._parts.pop(row, None)
