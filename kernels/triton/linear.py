"""Linear layers: `small_linear_kernel` for few tokens, the tensor-core kernel of this module for more.

The kernels compute x @ weight^T for weights of 16, 8 or 4 bits, which are widened in registers. `configs` decides
which kernel computes which number of rows. With many rows, dense weights use torch's matrix product (cuBLAS). Inputs
can be rounded to e4m3 (`round_tokens`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# Functions under triton.jit handle types that mypy does not know.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.reference.quantised import NO_ZERO, QuantisedLinear, dequantise
from headrace.kernels.reference.rows import DenseLinear, LinearWeight
from headrace.kernels.triton import configs
from headrace.kernels.triton.common import dot, e4m3_of, rounded, widen
from headrace.kernels.triton.configs import MatrixTiles, invariant_matrix_tiles, matrix_tiles, power_of_two
from headrace.kernels.triton.linear_packed import (
    DENSE,
    E4M3_BYTES,
    E4M3_IN_HARDWARE,
    INT4,
    INT4_BLOCK,
    INT8,
    Packed,
    pack_int4,
    unpack_int4,
)
from headrace.kernels.triton.linear_small import ALONE, Around, fits, multiply_small

ROWS_TOGETHER = 8
MERGED_COLUMNS = 1024


def multiply(
    x: Tensor, packed: Packed, tiles: MatrixTiles, x_scales: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """x [..., in_features] -> [..., out_features] in x's dtype, summed in float32.

    With x_scales [rows, 1], x holds the bytes of e4m3 and the result has `dtype`.
    """
    flat = x.reshape(-1, packed.in_features)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    num_rows, out_features = len(flat), len(packed.codes)
    out = torch.empty((num_rows, out_features), dtype=dtype or x.dtype, device=x.device)
    num_tiles = -(-num_rows // tiles.block_m) * -(-out_features // tiles.block_n)
    partials = None
    if tiles.splits > 1:
        partials = torch.empty((tiles.splits, num_rows, out_features), dtype=torch.float32, device=x.device)
    if num_tiles:
        linear_kernel[(num_tiles, tiles.splits)](
            flat,
            packed.codes,
            packed.scales,
            packed.shifts,
            packed.bias,
            x_scales,
            partials,
            out,
            num_rows,
            out_features,
            packed.in_features,
            1 if packed.scales is None else packed.scales.shape[1],
            flat.stride(0),
            packed.codes.stride(0),
            out_features,
            KIND=packed.kind,
            GROUP=packed.group,
            SPLITS=tiles.splits,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            BLOCK_K=INT4_BLOCK if packed.kind == INT4 else tiles.block_k,
            ROWS_TOGETHER=ROWS_TOGETHER,
            PRECISION="ieee" if out.dtype == torch.float32 else "tf32",
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
    if partials is not None and num_tiles:
        merge_kernel[(num_rows, -(-out_features // MERGED_COLUMNS))](
            partials, packed.bias, out, num_rows, out_features, SPLITS=tiles.splits, BLOCK=MERGED_COLUMNS, num_warps=4
        )
    return out.view(*x.shape[:-1], out_features)


class Fusable:
    """A weight that multiplies few rows of x by `small_linear_kernel`, fused with the ops around it."""

    _packed: Packed
    _device: configs.DeviceProperties
    most_fused_rows = 0
    """The most rows of x that `apply_fused` supports; 0 if none."""

    def _prepare(self, packed: Packed) -> None:
        self._packed, self._device = packed, configs.device_of(packed.codes)
        if fits(packed):
            self.most_fused_rows = configs.most_small_rows(packed.bits, packed.rounds_input)

    def _is_small(self, x: Tensor) -> bool:
        return 0 < x.numel() <= self.most_fused_rows * self._packed.in_features

    def apply_fused(
        self,
        x: Tensor,
        norm: tuple[Tensor, float] | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """residual + activate_and_multiply(rms_norm(x) W^T + bias); arguments of None are left out, see
        `linear_small.Around`."""
        return self._apply_small(x, Around(norm, activation, residual))

    def _apply_small(self, x: Tensor, around: Around = ALONE) -> Tensor:
        codes = self._packed.codes
        num_rows, shape = x.numel() // self._packed.in_features, (codes.shape[0], codes.shape[1])
        least = 1 if around.activation is None else 2
        is_int4 = self._packed.kind == INT4
        tiles = configs.small_tiles(self._device, num_rows, shape, codes.itemsize, is_int4, least)
        return multiply_small(x, self._packed, tiles, around)


class TritonLinear(Fusable, QuantisedLinear):
    """Weights of 8 or 4 bits. With `batch_invariant` a token's result does not depend on the number of tokens."""

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        zeros: Tensor | None = None,
        batch_invariant: bool = False,
    ) -> None:
        kept = scales if scales.dtype == torch.float16 else scales.float()
        super().__init__(codes, kept.contiguous(), bias)
        in_features = codes.shape[1] * (2 if codes.dtype == torch.uint8 else 1)
        group = 0 if self.scales.shape[1] == 1 else in_features // self.scales.shape[1]
        if codes.dtype == torch.uint8:
            zero = NO_ZERO if zeros is None else zeros.float()
            shift = (zero * self.scales.float()).to(self.scales.dtype)
            stored, group, kind = pack_int4(codes), in_features // self.scales.shape[1], INT4
            self.codes = stored
        elif codes.dtype == torch.int8:
            stored, shift, kind = codes.contiguous(), None, INT8
        else:
            stored, shift = codes.contiguous().view(torch.uint8), None
            kind = E4M3_IN_HARDWARE if configs.device_of(codes).has_fp8 else E4M3_BYTES
        self._prepare(Packed(kind, stored, self.scales, shift, bias, in_features, group, self.rounds_input))
        if batch_invariant:
            self.most_fused_rows = 0
        self._batch_invariant = batch_invariant

    @property
    def packed(self) -> Packed:
        """The weight in the layout of the kernels."""
        return self._packed

    def apply(self, x: Tensor) -> Tensor:
        if self._is_small(x):
            return self._apply_small(x)
        if self._batch_invariant:
            return multiply(x, self._packed, invariant_matrix_tiles(self._device, x.element_size()))
        return multiply(x, self._packed, self._tiles(x))

    def _tiles(self, x: Tensor) -> MatrixTiles:
        packed = self._packed
        shape = (len(packed.codes), packed.in_features)
        return matrix_tiles(self._device, x.numel() // shape[1], x.element_size(), shape, packed.kind == INT4)

    def _rows(self, rows: Tensor | slice) -> Tensor:
        if self._packed.kind != INT4:
            return super()._rows(rows)
        scales, shifts = self.scales[rows].float(), self._packed.shifts
        assert shifts is not None, "4 bits come with shifts"
        codes = unpack_int4(self.codes[rows], self._packed.in_features)
        raw = dequantise(codes, torch.ones_like(scales), torch.zeros_like(scales)).unflatten(1, (scales.shape[1], -1))
        return (raw * scales[..., None] - shifts[rows].float()[..., None]).flatten(1)

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self._packed.shifts is None else self._packed.shifts.nbytes)


class SmallLinear(Fusable, DenseLinear):
    """A dense weight: `small_linear_kernel` for few rows of x, torch's product for more."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.contiguous(), bias)
        self._prepare(Packed(DENSE, self.weight, None, None, bias, weight.shape[1], 0))

    def apply(self, x: Tensor) -> Tensor:
        return self._apply_small(x) if self._is_small(x) else super().apply(x)


class InvariantLinear(DenseLinear):
    """A dense weight that is multiplied in tiles of one size for any number of tokens (batch-invariant)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.contiguous(), bias)
        self._packed = Packed(DENSE, self.weight, None, None, bias, weight.shape[1], 0)
        self._device = configs.device_of(weight)

    def apply(self, x: Tensor) -> Tensor:
        return multiply(x, self._packed, invariant_matrix_tiles(self._device, x.element_size()))


class ScaledLinear(TritonLinear):
    """e4m3 weights and inputs. Three kernels are used by number of rows: `small_linear_kernel`; tiles that widen e4m3,
    where torch's 128 wide ones would leave multiprocessors idle; and torch._scaled_mm. All round a token's inputs with
    the token's own scale, so that the rounding of a request does not change when its batch grows.
    """

    rounds_input = True

    def apply(self, x: Tensor) -> Tensor:
        if self._is_small(x):
            return self._apply_small(x)
        num_rows = x.numel() // x.shape[-1]
        if num_rows < configs.least_scaled_mm_rows(self._device, len(self.codes)):
            return self.apply_tiled(x)
        return self.apply_scaled(x)

    def apply_tiled(self, x: Tensor, tiles: MatrixTiles | None = None) -> Tensor:
        """`apply` by `linear_kernel`, by default with the tiles of `configs`."""
        codes, scales = round_tokens(x.reshape(-1, x.shape[-1]))
        product = multiply(codes.view(torch.uint8), self._packed, tiles or self._tiles(x), scales, x.dtype)
        return product.view(*x.shape[:-1], len(self.codes))

    def apply_scaled(self, x: Tensor) -> Tensor:
        """`apply` by torch._scaled_mm."""
        codes, scales = round_tokens(x.reshape(-1, x.shape[-1]))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        product = torch._scaled_mm(
            codes, self.codes.t(), scale_a=scales, scale_b=self.scales.view(1, -1), bias=bias, out_dtype=x.dtype
        )
        return product.view(*x.shape[:-1], len(self.codes))


def round_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `reference.quantised.round_tokens`, for x [num_rows, size]."""
    if x.stride(1) != 1:
        x = x.contiguous()
    num_rows, size = x.shape
    codes = torch.empty((num_rows, size), dtype=torch.uint8, device=x.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    if num_rows:
        block = power_of_two(size)
        round_tokens_kernel[(num_rows,)](
            x, codes, scales, size, x.stride(0), BLOCK=block, num_warps=min(16, max(1, block // 512))
        )
    return codes.view(torch.float8_e4m3fn), scales


def linear_int8(codes: Tensor, scales: Tensor, bias: Tensor | None, batch_invariant: bool = False) -> LinearWeight:
    """As `reference.quantised.linear_int8`."""
    return TritonLinear(codes, scales, bias, None, batch_invariant)


def linear_int4(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, batch_invariant: bool = False
) -> LinearWeight:
    """As `reference.quantised.linear_int4`; the codes are reordered (`pack_int4`)."""
    return TritonLinear(codes, scales, bias, zeros, batch_invariant)


def linear_fp8(weight: Tensor, scales: Tensor, bias: Tensor | None, batch_invariant: bool = False) -> LinearWeight:
    """As `reference.quantised.linear_fp8`."""
    return TritonLinear(weight, scales, bias, None, batch_invariant)


def linear_fp8_dynamic(weight: Tensor, scales: Tensor, bias: Tensor | None) -> LinearWeight:
    """As `reference.quantised.linear_fp8_dynamic`."""
    return ScaledLinear(weight, scales.float(), bias)


def linear(weight: Tensor, bias: Tensor | None, batch_invariant: bool = False) -> LinearWeight:
    """As `reference.linear`."""
    return InvariantLinear(weight, bias) if batch_invariant else SmallLinear(weight, bias)


@triton.jit
def scaled(codes, scales, columns, in_columns, first, num_groups, dtype: tl.constexpr, GROUP: tl.constexpr,
           BLOCK_K: tl.constexpr):  # fmt: skip
    """codes [BLOCK_N, BLOCK_K] float32 from in_feature `first` on, times their groups' scales, as dtype."""
    if GROUP % BLOCK_K == 0:
        # A block of inputs lies in one group.
        factor = tl.load(scales + columns * num_groups + first // GROUP, mask=in_columns, other=0.0)[:, None]
    else:
        groups = tl.minimum((first + tl.arange(0, BLOCK_K)) // GROUP, num_groups - 1)
        factor = tl.load(scales + columns[:, None] * num_groups + groups[None, :], mask=in_columns[:, None], other=0.0)
    return rounded(codes * factor, dtype)


@triton.jit
def product(x_rows, in_rows, weight_rows, scales, shifts, columns, in_columns, first_block, end_block, in_features,
            num_groups, dtype: tl.constexpr, ROUNDED: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
            PRECISION: tl.constexpr):  # fmt: skip
    """x [BLOCK_M, in_features] @ weight [BLOCK_N, in_features]^T over some blocks of in_features, in one order.

    x_rows and weight_rows [.., 1] are where rows begin, columns the weight's rows in `scales`. ROUNDED: x is e4m3 as
    the weight is. KIND and GROUP: see `linear_kernel`; scales of whole rows (GROUP 0) are left to the caller.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    inputs = tl.arange(0, BLOCK_K)
    if KIND == 4:
        for block in range(first_block, end_block):
            codes = tl.load(weight_rows + block * BLOCK_K + inputs[None, :], mask=in_columns[:, None], other=0)
            for half in tl.static_range(2):
                first = (2 * block + half) * BLOCK_K
                at = first + inputs
                part = tl.load(x_rows + at[None, :], mask=in_rows[:, None] & (at < in_features)[None, :], other=0.0)
                nibbles = ((codes >> (4 * half)) & 15).to(tl.float32)
                if GROUP % BLOCK_K == 0:
                    group = columns * num_groups + tl.minimum(first // GROUP, num_groups - 1)
                    factor = tl.load(scales + group, mask=in_columns, other=0.0)[:, None]
                    shift = tl.load(shifts + group, mask=in_columns, other=0.0)[:, None]
                else:
                    group = columns[:, None] * num_groups + tl.minimum(at // GROUP, num_groups - 1)[None, :]
                    factor = tl.load(scales + group, mask=in_columns[:, None], other=0.0)
                    shift = tl.load(shifts + group, mask=in_columns[:, None], other=0.0)
                wide = rounded(nibbles * factor - shift, dtype)
                acc = dot(part, tl.trans(wide), acc, PRECISION)
    else:
        for block in range(first_block, end_block):
            at = block * BLOCK_K + inputs
            inside = at < in_features
            part = tl.load(x_rows + at[None, :], mask=in_rows[:, None] & inside[None, :], other=0)
            if ROUNDED:
                part = widen(part, dtype, KIND)
            codes = tl.load(weight_rows + at[None, :], mask=in_columns[:, None] & inside[None, :], other=0)
            if GROUP:
                wide = scaled(widen(codes, tl.float32, KIND), scales, columns, in_columns, block * BLOCK_K, num_groups,
                              dtype, GROUP, BLOCK_K)  # fmt: skip
            else:
                wide = widen(codes, dtype, KIND)
            acc = dot(part, tl.trans(wide), acc, PRECISION)
    return acc


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x,  # [num_rows, in_features]
    weight,  # [out_features, in_features]; 4 bits: [out_features, ceil(in_features / 2 BLOCK_K) * BLOCK_K] uint8
    scales,  # [out_features, num_groups] float32 or float16, or None
    shifts,  # as scales: zero * scale, of 4 bits alone
    bias,  # [out_features] or None
    x_scales,  # [num_rows] float32 where x holds e4m3, as the weight does; None where it is of out's type
    partials,  # [SPLITS, num_rows, out_features] float32, or None
    out,  # [num_rows, out_features]
    num_rows,
    out_features,
    in_features,
    num_groups,
    x_stride,
    weight_stride,
    out_stride,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS_TOGETHER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of the result, summed over in_features in one order. Grid (tiles, SPLITS).

    Of several SPLITS each sums a part of in_features, and `merge_kernel` adds them and the bias.

    KIND: 0 dense, 1 int8, 2 and 3 e4m3 (see `widen`), 4: byte j of the i-th BLOCK_K bytes holds inputs 2 i BLOCK_K + j
    (low half) and BLOCK_K further on (high half). GROUP: inputs of a scale; 0 for one per row, applied at the end.
    """
    tiles_m, tiles_n = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(out_features, BLOCK_N)
    # Tiles that share weights run together, ROWS_TOGETHER at a time, so that these come from the second-level cache.
    together = ROWS_TOGETHER * tiles_n
    first_m = tl.program_id(0) // together * ROWS_TOGETHER
    height = tl.minimum(tiles_m - first_m, ROWS_TOGETHER)
    tile_m = first_m + tl.program_id(0) % together % height
    tile_n = tl.program_id(0) % together // height

    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows, in_columns = rows < num_rows, columns < out_features
    dtype = out.dtype.element_ty
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride
    weight_rows = weight + columns.to(tl.int64)[:, None] * weight_stride
    num_blocks = tl.cdiv(in_features, 2 * BLOCK_K if KIND == 4 else BLOCK_K)
    first_block = tl.program_id(1) * tl.cdiv(num_blocks, SPLITS)
    end_block = tl.minimum(first_block + tl.cdiv(num_blocks, SPLITS), num_blocks)
    acc = product(x_rows, in_rows, weight_rows, scales, shifts, columns, in_columns, first_block, end_block,
                  in_features, num_groups, dtype, x_scales is not None, KIND, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
                  PRECISION)  # fmt: skip
    if scales is not None and GROUP == 0:
        acc *= tl.load(scales + columns, mask=in_columns, other=0.0)[None, :]
    if x_scales is not None:
        acc *= tl.load(x_scales + rows, mask=in_rows, other=0.0)[:, None]
    if partials is not None:
        target = partials + (tl.program_id(1) * num_rows + rows)[:, None].to(tl.int64) * out_features + columns[None, :]
        tl.store(target, acc, mask=in_rows[:, None] & in_columns[None, :])
    else:
        if bias is not None:
            acc += tl.load(bias + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        target = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
        tl.store(target, rounded(acc, dtype), mask=in_rows[:, None] & in_columns[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def merge_kernel(
    partials,  # [SPLITS, num_rows, out_features] float32
    bias,  # [out_features] or None
    out,  # [num_rows, out_features]
    num_rows,
    out_features,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The parts' sums in their order, so that no result depends on timing. Grid (num_rows, blocks of columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < out_features
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partials + (split * num_rows + row) * out_features + columns, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_features + columns, rounded(total, out.dtype.element_ty), mask=inside)


@triton.jit
def round_tokens_kernel(
    x,  # [num_rows, size]
    codes,  # [num_rows, size] uint8: e4m3
    scales,  # [num_rows] float32
    size,
    x_stride,
    BLOCK: tl.constexpr,
):
    """Each row divided by its scale, its largest magnitude over 448. Grid (num_rows)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    wide = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(wide), 0)
    scale = tl.where(largest > 0, tl.div_rn(largest, tl.zeros_like(largest) + 448.0), 1.0)
    tl.store(scales + row, scale)
    small = tl.div_rn(wide, scale + tl.zeros_like(wide))
    tl.store(codes + row * size + columns, e4m3_of(tl.minimum(tl.maximum(small, -448.0), 448.0)), mask=inside)
