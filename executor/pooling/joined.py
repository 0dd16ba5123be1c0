"""Several vectors of a prompt side by side, as sentence-transformers has them where several ways of pooling are on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from headrace.executor.pooling.token_pooling import TokenPooling


class Joined:
    reads_all: ClassVar[bool] = True

    def __init__(self, parts: Sequence[TokenPooling]) -> None:
        self._parts = parts

    def wanted(self, begin: int, end: int, num_tokens: int) -> slice:
        return slice(begin, end)

    def add(self, row: int, hidden: np.ndarray, *, is_end: bool) -> np.ndarray | None:
        found = [part.add(row, own, is_end=is_end) for part, own in self._shares(hidden, is_end=is_end)]
        return np.concatenate([each for each in found if each is not None], axis=1) if is_end else None

    def whole(self, states: list[np.ndarray]) -> np.ndarray:
        shares = [self._shares(hidden, is_end=True) for hidden in states]
        parts = [part.whole([own[index][1] for own in shares]) for index, part in enumerate(self._parts)]
        return np.concatenate(parts, axis=1)

    def leave(self, row: int) -> None:
        for part in self._parts:
            part.leave(row)

    def _shares(self, hidden: np.ndarray, *, is_end: bool) -> list[tuple[TokenPooling, np.ndarray]]:
        """What each part wants of a row's tokens in a step, if it is anything."""
        count = len(hidden)
        spans = [(part, part.wanted(0, count, count if is_end else count + 1)) for part in self._parts]
        return [(part, hidden[span]) for part, span in spans if span.start < span.stop]
