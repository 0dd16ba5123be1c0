"""Adapters (LoRA) of a linear layer on the GPU: their factors are the matrices of as many experts as there are slots,
and the step says which rows each multiplies.

    y = scale * x A^T     by `moe.experts_kernel`, [num_rows, width]
    y B^T                 by the same kernel, [num_rows, out_features] float32
    product += what a row's adapter has; then the same for the second adapter of each row, and so on

Addresses and grids depend on shapes alone, so that a CUDA graph can capture the launches.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# Functions under triton.jit handle types that mypy does not know.

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.low_rank import SlottedTokens
from headrace.kernels.reference.low_rank import SlottedDeltas
from headrace.kernels.triton import configs
from headrace.kernels.triton.common import rounded
from headrace.kernels.triton.configs import MatrixTiles, experts_tiles
from headrace.kernels.triton.linear_packed import DENSE, Packed
from headrace.kernels.triton.moe import SORTED_TOGETHER, multiply, sort_pairs

ADDED_COLUMNS = 1024


class SortedTokens(NamedTuple):
    """One adapter of each of a step's tokens, sorted by slot on the device."""

    slots: Tensor  # [num_tokens] int32, -1 for none
    scales: Tensor  # [num_tokens] float32
    blocks: tuple[Tensor, Tensor, Tensor, Tensor]
    """The outputs of `moe.sort_pairs`."""
    tiles: MatrixTiles

    @classmethod
    def of(cls, slots: Tensor, scales: Tensor, num_slots: int, dtype: torch.dtype) -> SortedTokens:
        count = len(slots)
        tiles = experts_tiles(configs.device_of(slots), count, num_slots, dtype.itemsize, False, invariant=True)
        return cls(slots, scales, sort_pairs(slots, num_slots, tiles.block_m, SORTED_TOGETHER), tiles)


class TritonDeltas(SlottedDeltas):
    """`SlottedDeltas` by these kernels. A token's adapters are added one after another, so that memory for products is
    of the tokens, however many adapters each may have."""

    def added(self, x: Tensor, product: Tensor, adapters: SlottedTokens) -> Tensor:
        """As `reference.low_rank.LinearDeltas.added`."""
        tokens = _sorted.get(adapters)
        if tokens is None:
            count, dtype = len(self._a), self._a.dtype
            tokens = [SortedTokens.of(slots, scales, count, dtype) for slots, scales in adapters.uses]
            _sorted[adapters] = tokens
        wide, found = x.to(self._a.dtype), product
        if wide.stride(1) != 1:
            wide = wide.contiguous()
        for each in tokens:
            found = self._one_added(wide, product, found, each)
        return found

    def _one_added(self, x: Tensor, product: Tensor, total: Tensor, tokens: SortedTokens) -> Tensor:
        y = torch.empty((len(x), self._width), dtype=self._a.dtype, device=x.device)
        multiply(x, _dense(self._a), None, tokens.blocks, tokens.scales, y, 1, None, tokens.tiles)
        parts = torch.empty((len(x), product.shape[1]), dtype=torch.float32, device=x.device)
        multiply(y, _dense(self._b), None, tokens.blocks, None, parts, 1, None, tokens.tiles)
        out = torch.empty_like(product)
        add_parts_kernel[(len(product), -(-product.shape[1] // ADDED_COLUMNS))](
            product,
            total,
            parts,
            tokens.slots,
            tokens.scales,
            self._biases,
            self._magnitudes,
            self._bias,
            out,
            product.shape[1],
            product.stride(0),
            total.stride(0),
            BLOCK=ADDED_COLUMNS,
            num_warps=4,
        )
        return out


slotted_low_rank = TritonDeltas
"""As `reference.low_rank.slotted_low_rank`."""
_sorted: WeakKeyDictionary[SlottedTokens, list[SortedTokens]] = WeakKeyDictionary()
"""Of a step's tokens: once for all layers."""


def _dense(stack: Tensor) -> Packed:
    return Packed(DENSE, stack.flatten(0, 1), None, None, None, stack.shape[2], 0)


@triton.jit
def add_parts_kernel(
    product,  # [num_rows, size]: x W^T and the layer's bias
    total,  # [num_rows, size]: the same with what earlier adapters added
    parts,  # [num_rows, size] float32; of what is no adapter nothing was written
    slots,  # [num_rows] int32
    scales,  # [num_rows] float32
    biases,  # [num_slots, size] float32
    magnitudes,  # [num_slots, size] float32
    bias,  # [size] or None: the layer's own
    out,  # [num_rows, size]
    size,
    product_stride,
    total_stride,
    BLOCK: tl.constexpr,
):
    """The formula of `kernels/cpu/linear/deltas.h`, rounded after each adapter as the reference does. Grid (num_rows,
    blocks of size)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    found = tl.load(total + row * total_stride + columns, mask=inside, other=0.0).to(tl.float32)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        own = tl.load(product + row * product_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            own -= tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
        magnitude = tl.load(magnitudes + slot * size + columns, mask=inside, other=1.0)
        added = tl.load(biases + slot * size + columns, mask=inside, other=0.0)
        part = tl.load(parts + row * size + columns, mask=inside, other=0.0)
        found += (magnitude - 1.0) * own * scale + magnitude * part + added * scale
    tl.store(out + row * size + columns, rounded(found, out.dtype.element_ty), mask=inside)
