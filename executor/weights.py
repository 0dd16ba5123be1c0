"""Where a model's weights come from, as the decoder sees it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class WeightSource(Protocol):
    """A checkpoint under Hugging Face names. Reads only what is asked for."""

    def names(self) -> frozenset[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """The tensor, or that part of it. A slice has a start and a stop within the shape, and no step."""
        ...
