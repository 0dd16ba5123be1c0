"""LAST: the hidden state of the prompt's last token, which has seen all others in a causal model."""

from __future__ import annotations

from typing import ClassVar

import numpy as np


class LastToken:
    reads_all: ClassVar[bool] = False

    def wanted(self, begin: int, end: int, num_tokens: int) -> slice:
        return slice(end - 1, end) if end == num_tokens else slice(end, end)

    def add(self, row: int, hidden: np.ndarray, *, is_end: bool) -> np.ndarray | None:
        return hidden.copy()

    def whole(self, states: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(states)

    def leave(self, row: int) -> None:
        pass
