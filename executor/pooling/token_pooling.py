"""The interface of a token pooling: of which of a prompt's tokens vectors are made, and how."""

from __future__ import annotations

from typing import ClassVar, Protocol

import numpy as np


class TokenPooling(Protocol):
    """Rows come with their tokens in order, in one step or in several. It may keep state of rows between steps."""

    reads_all: ClassVar[bool]
    """It needs every token's hidden state, so that none may come from the prefix cache."""

    def wanted(self, begin: int, end: int, num_tokens: int) -> slice:
        """Of a step's tokens [begin, end) of a row that has num_tokens in all, those whose hidden states `add` gets:
        positions, which may be none."""

    def add(self, row: int, hidden: np.ndarray, *, is_end: bool) -> np.ndarray | None:
        """hidden [num_wanted, width] float32: of the wanted tokens, which are at least one, in memory that will be
        overwritten. At the row's end, its vectors, [num_vectors, width] float32, in memory of their own."""

    def whole(self, states: list[np.ndarray]) -> np.ndarray:
        """[num_rows, width] float32: what `add` makes of rows whose tokens all come in one step. states: of each row,
        [num_wanted, width] float32"""

    def leave(self, row: int) -> None:
        """Forgets a row, which may have ended or not."""
