"""Ops on several rows of hidden values of each token, op by op on tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.executor.models.blocks.altup import LEAST_SQUARE, CorrectedRows, MixedRows, OtherRows, ScaledColumns
from headrace.executor.models.eager import EagerWeights


class EagerTanh:
    """`Tanh`."""

    def __init__(self, *_: Any) -> None: ...

    def __call__(self, x: Tensor) -> Tensor:
        return x.float().tanh().to(x.dtype)


class EagerMixedRows:
    """`MixedRows`."""

    def __init__(self, weights: EagerWeights, declared: MixedRows, prefix: str) -> None:
        self._count = declared.num_rows

    def __call__(self, rows: Tensor, shares: Tensor) -> Tensor:
        each = rows.unflatten(-1, (self._count, -1))
        return (shares.unflatten(-1, (self._count, self._count)) @ each + each).flatten(1)


class EagerCorrectedRows:
    """`CorrectedRows`."""

    def __init__(self, weights: EagerWeights, declared: CorrectedRows, prefix: str) -> None:
        self._count, self._active = declared.num_rows, declared.active

    def __call__(self, rows: Tensor, computed: Tensor, shares: Tensor) -> Tensor:
        each = rows.unflatten(-1, (self._count, -1))
        news = computed - each[:, self._active]
        return (news[:, None] * (shares + 1.0)[:, :, None] + each).flatten(1)


class EagerOtherRows:
    """`OtherRows`."""

    def __init__(self, weights: EagerWeights, declared: OtherRows, prefix: str) -> None:
        self._count = declared.num_rows

    def __call__(self, rows: Tensor, x: Tensor) -> Tensor:
        rows.unflatten(-1, (self._count, -1))[:, 1:] += x[:, None]
        return rows


class EagerFirstRows:
    """`FirstRows`."""

    def __init__(self, *_: Any) -> None: ...

    def __call__(self, first: Tensor, others: Tensor) -> Tensor:
        return torch.cat([first, *(_as_large(each, first) for each in others.split(first.shape[1], dim=1))], dim=1)


class EagerMeanRow:
    """`MeanRow`."""

    def __init__(self, *_: Any) -> None: ...

    def __call__(self, first: Tensor, *others: Tensor) -> Tensor:
        total = first
        for each in others:
            total = total + _as_large(each, first)
        return total / (1 + len(others))


class EagerScaledColumns:
    """`ScaledColumns` with their vector."""

    def __init__(self, weights: EagerWeights, declared: ScaledColumns, prefix: str) -> None:
        self._vector = weights.values(declared.vector, prefix)

    def __call__(self, x: Tensor) -> Tensor:
        return (x * self._vector).to(x.dtype)


def _mean_square(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True)


def _as_large(x: Tensor, pattern: Tensor) -> Tensor:
    """x with each row scaled to the mean square of the row of `pattern`."""
    return x * _mean_square(pattern).sqrt() / _mean_square(x).clamp(min=LEAST_SQUARE).sqrt()
