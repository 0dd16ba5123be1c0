"""What `blocks.skips` declares, op by op on tensors."""

from __future__ import annotations

from torch import Tensor

from headrace.executor.models.blocks.skips import Copies, KeptColumns, Mean
from headrace.executor.models.eager import EagerWeights


class EagerCopies:
    """`Copies`."""

    def __init__(self, weights: EagerWeights, declared: Copies, prefix: str) -> None:
        self._count = declared.count

    def __call__(self, x: Tensor) -> Tensor:
        return x.repeat(1, self._count)


class EagerKeptColumns:
    """`KeptColumns`."""

    def __init__(self, weights: EagerWeights, declared: KeptColumns, prefix: str) -> None:
        self._first = declared.first

    def __call__(self, columns: Tensor, x: Tensor) -> Tensor:
        columns[:, self._first : self._first + x.shape[1]] = x
        return columns


class EagerMean:
    """`Mean`."""

    def __init__(self, weights: EagerWeights, declared: Mean, prefix: str) -> None:
        self._share = declared.share

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return (x.float() * (1.0 - self._share) + y.float() * self._share).to(x.dtype)
