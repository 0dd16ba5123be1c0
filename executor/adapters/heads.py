"""What adapters change of the layers behind the pooling, by slot: a classifier that was trained with the factors and
saved whole, or factors for its layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.executor.models.heads import HeadLinear, HeadNorm

SlotScales = tuple[tuple[int, float], ...]
"""The adapters of a row: slots and scales."""


@dataclass(frozen=True, eq=False)
class HeadDelta:
    """An adapter's part of one linear layer or norm."""

    weight: Tensor  # [rows, columns] or [size], float32
    bias: Tensor | None  # [rows] float32
    replaces: bool
    """Both take the layer's place; else their product is added to its own."""

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)


class HeadTable:
    """An `AdapterTable` of one layer, computed in float64, so that a row's bits do not depend on the others."""

    def __init__(self, layer: HeadLinear | HeadNorm) -> None:
        self._layer = layer
        self._slots: dict[int, HeadDelta] = {}

    def pack(self, delta: HeadDelta) -> HeadDelta:
        bias = None if delta.bias is None else delta.bias.double()
        return HeadDelta(delta.weight.double(), bias, delta.replaces)

    def put(self, slot: int, packed: HeadDelta | None) -> None:
        if packed is None:
            self._slots.pop(slot, None)
        else:
            self._slots[slot] = packed

    def added(self, x: Tensor, y: Tensor, adapters: SlotScales) -> Tensor:
        """x: [num_rows, columns] float32; y: [num_rows, rows] float32, what the layer made of it -> y with adapters"""
        deltas = [(delta, scale) for slot, scale in adapters if (delta := self._slots.get(slot)) is not None]
        if not deltas:
            return y
        wide, own = x.double(), y.double()
        found = own
        for delta, scale in deltas:
            product = self._product(wide, delta)
            found = found + scale * (product - own if delta.replaces else product)
        return found.float()

    def _product(self, x: Tensor, delta: HeadDelta) -> Tensor:
        layer = self._layer
        if isinstance(layer, HeadNorm):
            return torch.nn.functional.layer_norm(x, (layer.size,), delta.weight, delta.bias, layer.eps)
        return torch.nn.functional.linear(x, delta.weight, delta.bias)
