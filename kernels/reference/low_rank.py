"""Adapters (LoRA: Hu et al. 2021, arXiv 2106.09685) of a linear layer, in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.kernels.low_rank import AdaptedTokens, LowRank, SlotLimits


class LinearDeltas(Protocol):
    """The adapters of a linear layer, by slot."""

    def pack(self, delta: LowRank) -> Any:
        """An adapter's part of the layer, with `nbytes`."""
        ...

    def put(self, slot: int, packed: Any) -> None:
        """packed: a result of `pack`; None empties the slot. Call while no step that uses the slot runs."""
        ...

    def added(self, x: Tensor, product: Tensor, adapters: AdaptedTokens) -> Tensor:
        """The product of the rows x [num_tokens, in_features], the layer's bias included, with what their adapters add
        to it."""
        ...


class TorchDeltas:
    """One adapter after another, for its own rows."""

    def __init__(self, limits: SlotLimits, bias: Tensor | None) -> None:
        self._dtype, self._bias = limits.dtype, bias
        self._slots: list[LowRank | None] = [None] * limits.num_slots

    def pack(self, delta: LowRank) -> LowRank:
        return delta.to(self._dtype)

    def put(self, slot: int, packed: LowRank | None) -> None:
        self._slots[slot] = packed

    def added(self, x: Tensor, product: Tensor, adapters: AdaptedTokens) -> Tensor:
        found = product.clone()
        for slot, scale, rows in adapters.groups():
            if (delta := self._slots[slot]) is None:
                continue
            own = product[rows] if self._bias is None else product[rows] - self._bias
            change = delta.added(x[rows].to(self._dtype), own, scale)
            found[rows] = (found[rows].float() + change).to(found.dtype)
        return found


def low_rank(
    limits: SlotLimits, rows: int, columns: int, num_matrices: int, bias: Tensor | None, device: torch.device
) -> LinearDeltas:
    """rows, columns: of the layer on this rank; num_matrices: that it consists of; bias: the layer's own, float32."""
    return TorchDeltas(limits, bias)


REFERENCES: Mapping[str, Callable[..., Any]] = MappingProxyType({"low_rank": low_rank})
