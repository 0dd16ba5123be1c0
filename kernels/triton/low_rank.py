"""Adapters (LoRA) of a linear layer on the GPU: their factors are the matrices of as many experts as there are slots,
and the step says which rows each multiplies.

    y = scale * x A^T     by `moe.experts_kernel`, [num_pairs, width]; a pair is a row and one of its adapters
    y B^T                 by the same kernel, [num_pairs, out_features] float32
    product += what a row's pairs have, in their order

Addresses and grids depend on shapes alone, so that a CUDA graph can capture the launches.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# Functions under triton.jit handle types that mypy does not know.

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.low_rank import AdaptedTokens, LowRank, SlotLimits
from headrace.kernels.triton import configs
from headrace.kernels.triton.common import rounded
from headrace.kernels.triton.configs import MatrixTiles, experts_tiles, power_of_two
from headrace.kernels.triton.linear_packed import DENSE, Packed
from headrace.kernels.triton.moe import SORTED_TOGETHER, multiply, sort_pairs_kernel

ADDED_COLUMNS = 1024


@dataclass(frozen=True, eq=False)
class SortedTokens:
    """The adapters of a step's tokens, sorted by slot on the device."""

    slots: Tensor  # [num_tokens, most_used] int32, -1 for none
    scales: Tensor  # [num_tokens, most_used] float32
    blocks: tuple[Tensor, Tensor, Tensor, Tensor]
    """The outputs of `sort_pairs_kernel`."""
    tiles: MatrixTiles

    @classmethod
    def of(cls, slots: Tensor, scales: Tensor, num_slots: int, dtype: torch.dtype) -> SortedTokens:
        num_pairs = slots.numel()
        tiles = experts_tiles(configs.device_of(slots), num_pairs, num_slots, dtype.itemsize, False, invariant=True)
        max_blocks = min(num_pairs, num_pairs // tiles.block_m + num_slots)
        numbers = torch.empty(num_pairs + num_slots + 1 + 2 * max_blocks, dtype=torch.int32, device=slots.device)
        order, starts, block_slots, block_firsts = numbers.split((num_pairs, num_slots + 1, max_blocks, max_blocks))
        sort_pairs_kernel[(num_slots,)](
            slots,
            order,
            starts,
            block_slots,
            block_firsts,
            num_pairs,
            num_slots,
            max_blocks,
            BLOCK_M=tiles.block_m,
            BLOCK_E=power_of_two(num_slots + 1),
            BLOCK=min(SORTED_TOGETHER, max(32, power_of_two(num_pairs))),
            num_warps=4,
        )
        return cls(slots, scales, (order, starts, block_slots, block_firsts), tiles)


class TritonDeltas:
    """The adapters of a linear layer, by slot, in memory that is there from the start."""

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
        """On the device, in the type of the factors. Raises ValueError for a whole matrix in the weight's place."""
        if delta.whole is not None:
            raise ValueError("an adapter that has a whole matrix in the place of a weight is computed on a CPU alone")
        return delta.to(self._a.dtype)

    def put(self, slot: int, packed: LowRank | None) -> None:
        """Call while no step that uses the slot is in flight."""
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

    def added(self, x: Tensor, product: Tensor, adapters: AdaptedTokens) -> Tensor:
        """As `reference.low_rank.LinearDeltas.added`."""
        tokens = _sorted.get(adapters)
        if tokens is None:
            slots, scales = (torch.from_numpy(each.T.copy()).to(x.device) for each in (adapters.slots, adapters.scales))
            tokens = _sorted[adapters] = SortedTokens.of(slots, scales, len(self._a), self._a.dtype)
        return self.added_to_sorted(x, product, tokens)

    def added_to_sorted(self, x: Tensor, product: Tensor, tokens: SortedTokens) -> Tensor:
        """As `added`, without anything from the host: a graph can capture it."""
        num_pairs, most_used = tokens.slots.numel(), tokens.slots.shape[1]
        wide = x.to(self._a.dtype)
        if wide.stride(1) != 1:
            wide = wide.contiguous()
        y = torch.empty((num_pairs, self._width), dtype=self._a.dtype, device=x.device)
        multiply(wide, _dense(self._a), None, tokens.blocks, tokens.scales, y, most_used, None, tokens.tiles)
        parts = torch.empty((num_pairs, product.shape[1]), dtype=torch.float32, device=x.device)
        multiply(y, _dense(self._b), None, tokens.blocks, None, parts, 1, None, tokens.tiles)
        out = torch.empty_like(product)
        add_parts_kernel[(len(product), -(-product.shape[1] // ADDED_COLUMNS))](
            product,
            parts,
            tokens.slots,
            tokens.scales,
            self._biases,
            self._magnitudes,
            self._bias,
            out,
            product.shape[1],
            product.stride(0),
            MOST_USED=most_used,
            BLOCK=ADDED_COLUMNS,
            num_warps=4,
        )
        return out


low_rank = TritonDeltas
"""As `reference.low_rank.low_rank`."""
_sorted: WeakKeyDictionary[AdaptedTokens, SortedTokens] = WeakKeyDictionary()
"""Of a step's tokens: once for all layers."""


def _dense(stack: Tensor) -> Packed:
    return Packed(DENSE, stack.flatten(0, 1), None, None, None, stack.shape[2], 0)


@triton.jit
def add_parts_kernel(
    product,  # [num_rows, size]: x W^T and the layer's bias
    parts,  # [num_rows, MOST_USED, size] float32; of what is no adapter nothing was written
    slots,  # [num_rows, MOST_USED] int32
    scales,  # [num_rows, MOST_USED] float32
    biases,  # [num_slots, size] float32
    magnitudes,  # [num_slots, size] float32
    bias,  # [size] or None: the layer's own
    out,  # [num_rows, size]
    size,
    product_stride,
    MOST_USED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The formula of `kernels/cpu/linear/deltas.h`, rounded after each adapter as the reference does. Grid (num_rows,
    blocks of size)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    dtype = out.dtype.element_ty
    total = tl.load(product + row * product_stride + columns, mask=inside, other=0.0).to(tl.float32)
    own = total
    if bias is not None:
        own -= tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    for use in tl.static_range(MOST_USED):
        slot = tl.load(slots + row * MOST_USED + use).to(tl.int64)
        if slot >= 0:
            scale = tl.load(scales + row * MOST_USED + use)
            magnitude = tl.load(magnitudes + slot * size + columns, mask=inside, other=1.0)
            added = tl.load(biases + slot * size + columns, mask=inside, other=0.0)
            part = tl.load(parts + (row * MOST_USED + use) * size + columns, mask=inside, other=0.0)
            change = (magnitude - 1.0) * own * scale + magnitude * part + added * scale
            total = rounded(total + change, dtype).to(tl.float32)
    tl.store(out + row * size + columns, rounded(total, dtype), mask=inside)
