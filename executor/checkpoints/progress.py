"""Reports how much of the weights has been read."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable

from torch import Tensor

from headrace.executor.checkpoints.weights import Numbers, Packed, StoredTensor, Weights, WeightSource

OnRead = Callable[[int, int], None]
"""Called with (bytes read so far, total bytes)."""
ON_READ_INTERVAL_S = 0.1
LAYER = re.compile(r"\.(\d+)\.")


def watched(source: WeightSource, on_read: OnRead, layers: range, total_bytes: int | None = None) -> Weights:
    """The weights, whose reading progress is reported to `on_read`, at most every ON_READ_INTERVAL_S.

    layers: indices of the layers that will be read. total_bytes: size of all weights of the model; by default two bytes
    per element.
    """
    weights = Weights.of(source)
    elements = {name: math.prod(weights.shape(name)) for name in weights.names()}
    each = 2.0 if total_bytes is None else total_bytes / max(1, sum(elements.values()))
    progress = _Progress(on_read, {name: int(each * count) for name, count in elements.items() if _is_of(name, layers)})

    def stored(name: str) -> StoredTensor:
        found = weights.stored(name)
        part, packed = found.numbers.part, found.numbers.packed

        def counted_part(rows: slice | None, columns: slice | None) -> Tensor:
            read = part(rows, columns)
            progress.count(name)
            return read

        def counted_packed() -> Packed:
            assert packed is not None, "it is only called if it is"
            read = packed()
            progress.count(name)
            return read

        return found.reading(Numbers(counted_part, None if packed is None else counted_packed))

    return weights.then("reading is counted", weights.names(), stored)


class _Progress:
    def __init__(self, on_read: OnRead, left: dict[str, int]) -> None:
        """left: the bytes of each weight that will be read."""
        self._on_read, self._left = on_read, left
        self._total_bytes, self._done_bytes = sum(left.values()), 0
        self._told_s = 0.0

    def count(self, name: str) -> None:
        self._done_bytes += self._left.pop(name, 0)
        now_s = time.monotonic()
        if now_s - self._told_s >= ON_READ_INTERVAL_S or not self._left:
            self._told_s = now_s
            self._on_read(self._done_bytes, self._total_bytes)


def _is_of(name: str, layers: range) -> bool:
    """Whether a weight belongs to one of these layers, or to no layer."""
    layer = LAYER.search(name)
    return layer is None or int(layer[1]) in layers
