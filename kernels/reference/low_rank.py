"""Adapters (LoRA: Hu et al. 2021, arXiv 2106.09685) of a linear layer, in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.kernels.low_rank import AdaptedTokens, LowRank, SlotLimits, SlottedTokens


class LinearDeltas(Protocol):
    """The adapters of a linear layer, by slot."""

    def pack(self, delta: LowRank) -> Any:
        """An adapter's part of the layer, with `nbytes`."""
        ...

    def put(self, slot: int, packed: Any) -> None:
        """packed: a result of `pack`; None empties the slot. Call while no step that uses the slot runs."""
        ...

    def added(self, x: Tensor, product: Tensor, adapters: Any) -> Tensor:
        """The product of the rows x [num_tokens, in_features], the layer's bias included, with what their adapters add
        to it. adapters: an `AdaptedTokens`; of `SlottedDeltas` a `SlottedTokens`."""
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


class SlottedDeltas:
    """The adapters of a linear layer, by slot, in memory that is there from the start. What is launched depends on
    shapes alone, so that a graph can capture it, and later steps may use what is put into slots after the capture."""

    def __init__(
        self, limits: SlotLimits, rows: int, columns: int, num_matrices: int, bias: Tensor | None, device: torch.device
    ) -> None:
        self._bias, count = bias, limits.num_slots
        self._width = num_matrices * (-(-limits.max_rank // 16) * 16)
        self._a = torch.zeros(count, self._width, columns, dtype=limits.dtype, device=device)
        self._b = torch.zeros(count, rows, self._width, dtype=limits.dtype, device=device)
        self._biases = torch.zeros(count, rows, device=device)
        self._magnitudes = torch.ones(count, rows, device=device)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self._a, self._b, self._biases, self._magnitudes))

    def pack(self, delta: LowRank) -> LowRank:
        """In the type of the factors. Raises ValueError for a whole matrix in the weight's place."""
        if delta.whole is not None:
            raise ValueError("an adapter that has a whole matrix in the place of a weight is computed on a CPU alone")
        return delta.to(self._a.dtype)

    def put(self, slot: int, packed: LowRank | None) -> None:
        """packed: a result of `pack`; None empties the slot. Call while no step that uses the slot is in flight."""
        for each in (self._a, self._b, self._biases):
            each[slot].zero_()
        self._magnitudes[slot].fill_(1.0)
        if packed is None:
            return
        self._a[slot, : len(packed.a)].copy_(packed.a)
        self._b[slot, :, : len(packed.a)].copy_(packed.dense_b())
        for held, given in ((self._biases, packed.bias), (self._magnitudes, packed.magnitude)):
            if given is not None:
                held[slot].copy_(given)

    def added(self, x: Tensor, product: Tensor, adapters: SlottedTokens) -> Tensor:
        """As `LinearDeltas.added`."""
        wide, own, found = x.to(self._a.dtype), product.float(), product
        if self._bias is not None:
            own = own - self._bias
        for slots, scales in adapters.uses:
            for slot in range(len(self._a)):
                low = torch.nn.functional.linear(wide, self._a[slot])
                change = self._magnitudes[slot] * torch.nn.functional.linear(low, self._b[slot]).float()
                change = (self._magnitudes[slot] - 1) * own + change + self._biases[slot]
                changed = (found.float() + change * scales[:, None]).to(found.dtype)
                found = torch.where((slots == slot)[:, None], changed, found)
        return found


def slotted_low_rank(
    limits: SlotLimits, rows: int, columns: int, num_matrices: int, bias: Tensor | None, device: torch.device
) -> SlottedDeltas:
    """As `low_rank`, for steps whose adapters are known on the device alone."""
    return SlottedDeltas(limits, rows, columns, num_matrices, bias, device)


REFERENCES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"low_rank": low_rank, "slotted_low_rank": slotted_low_rank}
)
