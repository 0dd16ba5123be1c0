"""How much of a model's weights has been read, told as they are read."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable

import numpy as np
from torch import Tensor

from headrace.executor.checkpoints.weights import WeightSource

OnRead = Callable[[int, int], None]
"""Bytes that have been read, and of how many."""
INTERVAL_S = 0.1
LAYER = re.compile(r"\.(\d+)\.")


class WatchedWeights:
    """Another source, of which `on_read` hears what part of it has been asked for, ten times a second at most."""

    def __init__(self, source: WeightSource, on_read: OnRead, layers: range, total_bytes: int | None = None) -> None:
        """layers: those that are going to be read. total_bytes: of all weights, two for each element by default."""
        self._source, self._on_read = source, on_read
        elements = {name: math.prod(source.shape(name)) for name in source.names()}
        each = 2.0 if total_bytes is None else total_bytes / max(1, sum(elements.values()))
        self._left = {name: int(each * count) for name, count in elements.items() if _is_of(name, layers)}
        self._total_bytes, self._done_bytes = sum(self._left.values()), 0
        self._told_s = 0.0
        if hasattr(source, "packed"):
            self.packed = self._packed

    def names(self) -> frozenset[str]:
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        part = self._source.get(name, rows, columns)
        self._count(name)
        return part

    def _packed(self, name: str) -> tuple[str, np.ndarray] | None:
        stored: tuple[str, np.ndarray] | None = self._source.packed(name)  # type: ignore[attr-defined]
        self._count(name)
        return stored

    def _count(self, name: str) -> None:
        self._done_bytes += self._left.pop(name, 0)
        now_s = time.monotonic()
        if now_s - self._told_s >= INTERVAL_S or not self._left:
            self._told_s = now_s
            self._on_read(self._done_bytes, self._total_bytes)


def _is_of(name: str, layers: range) -> bool:
    """Whether a weight is of these layers, or of none."""
    layer = LAYER.search(name)
    return layer is None or int(layer[1]) in layers
