"""x @ weight^T with weights of 16, 8 or 4 bits, widened in registers; and the rounding of inputs to e4m3."""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# What triton.jit compiles has types of its own.

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.attention_kernels import widen
from headrace.kernels.triton.common_kernels import dot, e4m3_of, rounded


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
    inputs = tl.arange(0, BLOCK_K)
    dtype = out.dtype.element_ty
    x_rows = x + rows.to(tl.int64)[:, None] * x_stride
    weight_rows = weight + columns.to(tl.int64)[:, None] * weight_stride
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    num_blocks = tl.cdiv(in_features, 2 * BLOCK_K if KIND == 4 else BLOCK_K)
    first_block = tl.program_id(1) * tl.cdiv(num_blocks, SPLITS)
    end_block = tl.minimum(first_block + tl.cdiv(num_blocks, SPLITS), num_blocks)
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
            if x_scales is not None:
                part = widen(part, dtype, KIND)
            codes = tl.load(weight_rows + at[None, :], mask=in_columns[:, None] & inside[None, :], other=0)
            if GROUP:
                wide = scaled(widen(codes, tl.float32, KIND), scales, columns, in_columns, block * BLOCK_K, num_groups,
                              dtype, GROUP, BLOCK_K)  # fmt: skip
            else:
                wide = widen(codes, dtype, KIND)
            acc = dot(part, tl.trans(wide), acc, PRECISION)
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
