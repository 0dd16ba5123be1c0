"""x @ weight^T for a few rows of x: multiplied and added in float32, without tensor cores.

A step of few tokens takes as long as loading its weights. Each program therefore owns COLUMNS rows of the weight and
walks along them BLOCK_K inputs at a time, of which each thread has VECTOR consecutive ones: 16 bytes of every row,
loaded before the previous block is multiplied. `configs.small_tiles` computes the bytes in flight. All tensors of the
loop have one dimension and one layout, so that nothing passes through shared memory; threads synchronise once, at the
end.

With HEADRACE_PDL=1 a launch begins while the previous kernel ends. Weights are constants, so their first loads are
issued at once. Everything else may be a result of that kernel, and is read after it has ended.

The ops around a linear layer run in the same launch, where their data are in registers anyway: every program computes
the norm of x itself (x comes from the caches), and the program with the sums applies an activation or addition.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs, disable-error-code="assignment, misc"
# Functions under triton.jit handle types that mypy does not know, and build tuples by addition only.

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headrace.kernels.triton.activation import activated, limited
from headrace.kernels.triton.common import INTERPRETED, e4m3_of, rounded, widen
from headrace.kernels.triton.configs import SmallTiles, power_of_two
from headrace.kernels.triton.linear_packed import INT4, INT4_BLOCK, Packed

LOAD_BYTES = 16
"""Bytes of a row of the weight in one load of a thread."""


@dataclass(frozen=True, eq=False)
class Around:
    """The ops fused into a linear layer's launch, in this order: norm, product, activation, addition."""

    norm: tuple[Tensor, float] | None = None
    """RMS norm of x: (weight [in_features] float32, eps)."""
    activation: str | None = None
    """Applied to the first half of the result, which multiplies the second: `reference.activate_and_multiply`."""
    residual: Tensor | None = None  # shape of the result


ALONE = Around()


def fits(packed: Packed) -> bool:
    """Whether the kernel supports the weight: the values of one load of a thread must share a scale."""
    return packed.group % (LOAD_BYTES // packed.codes.itemsize) == 0


def multiply_small(x: Tensor, packed: Packed, tiles: SmallTiles, around: Around = ALONE) -> Tensor:
    """x [..., in_features], at least one row -> [..., out_features] in x's dtype, half as wide with an activation.

    Rounds where the separate ops round; sums are in float32, in an order that does not depend on the other rows.
    """
    flat = x.reshape(-1, packed.in_features)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    out_features = len(packed.codes)
    width = out_features if around.activation is None else out_features // 2
    out = torch.empty((len(flat), width), dtype=x.dtype, device=x.device)
    residual = None if around.residual is None else around.residual.reshape(-1, width)
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    norm_weight, eps = (None, 0.0) if around.norm is None else around.norm
    vector = LOAD_BYTES // packed.codes.itemsize
    small_linear_kernel[(-(-out_features // tiles.columns),)](
        flat,
        norm_weight,
        packed.codes,
        packed.scales,
        packed.shifts,
        packed.bias,
        residual,
        out,
        len(flat),
        out_features,
        packed.in_features,
        1 if packed.scales is None else packed.scales.shape[1],
        eps,
        flat.stride(0),
        packed.codes.stride(0),
        0 if residual is None else residual.stride(0),
        width,
        KIND=packed.kind,
        GROUP=packed.group,
        ROUNDED=packed.rounds_input,
        ACTIVATION=around.activation,
        ROWS=power_of_two(len(flat)),
        COLUMNS=tiles.columns,
        BLOCK_K=vector * 32 * tiles.num_warps,
        VECTOR=vector,
        HALF=INT4_BLOCK if packed.kind == INT4 else 1,
        EARLY=tiles.launches_early,
        num_warps=tiles.num_warps,
        num_stages=1,
        **({"launch_pdl": True} if tiles.launches_early else {}),
    )
    return out.view(*x.shape[:-1], width)


# ruff: noqa: RUF005


@triton.jit
def load_rows(weight, rows, stride, at, width, COLUMNS: tl.constexpr):
    """A tuple: elements `at` of each of the weight's rows, 0 from `width` on."""
    tile = ()
    for column in tl.static_range(COLUMNS):
        row = weight + rows[column].to(tl.int64) * stride
        tile = tile + (tl.load(row + at, mask=at < width, other=0, eviction_policy="evict_first"),)
    return tile


@triton.jit
def load_inputs(x, norm_weight, root, at, in_features):
    """Elements `at` of a row of x as float32; times `root` and a norm's weight, rounded as by the norm alone."""
    inside = at < in_features
    raw = tl.load(x + at, mask=inside, other=0.0, eviction_policy="evict_last")
    wide = raw.to(tl.float32)
    if norm_weight is not None:
        weight = tl.load(norm_weight + at, mask=inside, other=0.0, eviction_policy="evict_last")
        wide = rounded(wide * root * weight, raw.dtype).to(tl.float32)
    return wide


@triton.jit
def as_e4m3(x, inverse, KIND: tl.constexpr):
    """x float32 times `inverse`, rounded to e4m3, as float32."""
    small = tl.minimum(tl.maximum(x * inverse, -448.0), 448.0)
    if KIND == 3 and not INTERPRETED:
        return small.to(tl.float8e4nv).to(tl.float16).to(tl.float32)
    else:  # the interpreter does not round to the nearest
        return widen(e4m3_of(small), tl.float32, 2)


@triton.jit
def side_by_side(sums, COLUMNS: tl.constexpr):
    """A tuple of COLUMNS tensors [n] -> [n, COLUMNS]. COLUMNS is a power of two, at most 16."""
    level = ()
    for column in tl.static_range(COLUMNS):
        level = level + (sums[column][:, None],)
    for step in tl.static_range(4):
        # Not named: Triton 3.6 takes a constexpr's name for one value alone, in unrolled loops too.
        if COLUMNS >> (step + 1) > 0:
            joined = ()
            for index in tl.static_range(COLUMNS >> (step + 1)):
                both = tl.join(level[index], level[index + (COLUMNS >> (step + 1))])
                joined = joined + (tl.reshape(both, [sums[0].shape[0], 2 << step]),)
            level = joined
    return level[0]


@triton.jit(do_not_specialize=["num_rows"])
def small_linear_kernel(
    x,  # [num_rows, in_features]
    norm_weight,  # [in_features] float32, or None: x is as it is
    weight,  # [out_features, in_features], or as `linear_kernel` has 4 bits
    scales,  # [out_features, num_groups] float32 or float16, or None
    shifts,  # as scales, of 4 bits alone
    bias,  # [out_features] or None
    residual,  # as out, or None
    out,  # [num_rows, out_features]; with an activation [num_rows, out_features / 2]
    num_rows,
    out_features,
    in_features,
    num_groups,
    eps,
    x_stride,
    weight_stride,
    residual_stride,
    out_stride,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    ROUNDED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    HALF: tl.constexpr,
    EARLY: tl.constexpr,
):
    """COLUMNS columns of the result for all rows, at most ROWS of them. Grid (ceil(out_features / COLUMNS)).

    KIND, GROUP: as of `linear_kernel`; GROUP is a multiple of VECTOR. ROUNDED: each row of x is rounded to e4m3 with a
    scale of its own. ACTIVATION: None, or what the first half of the columns passes before it multiplies the second.
    BLOCK_K: elements of a row of `weight` at a time, for 4 bits bytes; HALF: bytes between the two halves' inputs.
    EARLY: the launch may begin before the kernel before it has ended.
    """
    # A row beyond the last is the last again: nobody stores what comes of it. With an activation each is followed by
    # the one that it multiplies.
    half = out_features // 2
    first, last = tl.program_id(0) * COLUMNS, out_features - 1
    if ACTIVATION is not None:
        first, last = tl.program_id(0) * (COLUMNS // 2), half - 1
    rows = ()
    for column in tl.static_range(COLUMNS):
        if ACTIVATION is not None:
            rows = rows + (tl.minimum(first + column // 2, last) + column % 2 * half,)
        else:
            rows = rows + (tl.minimum(first + column, last),)
    width = in_features
    if KIND == 4:
        width = weight_stride
    offsets = tl.arange(0, BLOCK_K)
    vectors = tl.arange(0, BLOCK_K // VECTOR) * VECTOR
    # The first weights are under way while x is looked at.
    following = load_rows(weight, rows, weight_stride, offsets, width, COLUMNS)
    if EARLY:
        gdc_wait()

    nothing = tl.zeros([BLOCK_K // VECTOR], tl.float32)
    roots, inverses, x_scales, sums = (), (), (), ()
    for m in tl.static_range(ROWS):
        x_row = x + tl.minimum(m, num_rows - 1).to(tl.int64) * x_stride
        root = 1.0
        if norm_weight is not None:
            squares = tl.zeros([BLOCK_K], tl.float32)
            for start in range(0, in_features, BLOCK_K):
                part = load_inputs(x_row, None, 1.0, start + offsets, in_features)
                squares += part * part
            root = tl.rsqrt(tl.sum(squares, 0) / in_features + eps)
        roots = roots + (root,)
        if ROUNDED:
            most = tl.zeros([BLOCK_K], tl.float32)
            for start in range(0, in_features, BLOCK_K):
                part = load_inputs(x_row, norm_weight, root, start + offsets, in_features)
                most = tl.maximum(most, tl.abs(part))
            largest = tl.max(most, 0)
            x_scales = x_scales + (tl.where(largest > 0, largest / 448.0, 1.0),)
            inverses = inverses + (tl.where(largest > 0, 448.0 / largest, 1.0),)
        for _ in tl.static_range(COLUMNS):
            sums = sums + (nothing,)

    for start in range(0, width, BLOCK_K):
        codes = following
        following = load_rows(weight, rows, weight_stride, start + BLOCK_K + offsets, width, COLUMNS)
        updated = ()
        for m in tl.static_range(ROWS):
            x_row = x + tl.minimum(m, num_rows - 1).to(tl.int64) * x_stride
            if KIND == 4:
                low_at = (start + offsets) // HALF * (2 * HALF) + (start + offsets) % HALF
                low_first = (start + vectors) // HALF * (2 * HALF) + (start + vectors) % HALF
                low = load_inputs(x_row, norm_weight, roots[m], low_at, in_features)
                high = load_inputs(x_row, norm_weight, roots[m], low_at + HALF, in_features)
                low_total = tl.sum(tl.reshape(low, [BLOCK_K // VECTOR, VECTOR]), 1)
                high_total = tl.sum(tl.reshape(high, [BLOCK_K // VECTOR, VECTOR]), 1)
                low_group = tl.minimum(low_first // GROUP, num_groups - 1)
                high_group = tl.minimum((low_first + HALF) // GROUP, num_groups - 1)
                for column in tl.static_range(COLUMNS):
                    low_scale = rows[column] * num_groups + low_group
                    high_scale = rows[column] * num_groups + high_group
                    products = (codes[column] & 15).to(tl.float32) * low
                    total = tl.sum(tl.reshape(products, [BLOCK_K // VECTOR, VECTOR]), 1)
                    total *= tl.load(scales + low_scale).to(tl.float32)
                    total -= low_total * tl.load(shifts + low_scale).to(tl.float32)
                    products = (codes[column] >> 4).to(tl.float32) * high
                    more = tl.sum(tl.reshape(products, [BLOCK_K // VECTOR, VECTOR]), 1)
                    more *= tl.load(scales + high_scale).to(tl.float32)
                    more -= high_total * tl.load(shifts + high_scale).to(tl.float32)
                    updated = updated + (sums[m * COLUMNS + column] + total + more,)
            else:
                inputs = load_inputs(x_row, norm_weight, roots[m], start + offsets, in_features)
                if ROUNDED:
                    inputs = as_e4m3(inputs, inverses[m], KIND)
                for column in tl.static_range(COLUMNS):
                    if KIND == 0:
                        products = codes[column].to(tl.float32) * inputs
                    else:
                        products = widen(codes[column], tl.float32, KIND) * inputs
                    # Neighbours are one thread's own.
                    total = tl.sum(tl.reshape(products, [BLOCK_K // VECTOR, VECTOR]), 1)
                    if GROUP:
                        group = tl.minimum((start + vectors) // GROUP, num_groups - 1)
                        total *= tl.load(scales + rows[column] * num_groups + group).to(tl.float32)
                    updated = updated + (sums[m * COLUMNS + column] + total,)
        sums = updated
    if EARLY:
        gdc_launch_dependents()

    index = tl.arange(0, COLUMNS)
    columns, kept = first + index, first + index
    if ACTIVATION is not None:
        columns = tl.minimum(first + index // 2, last) + index % 2 * half
        kept = first + tl.arange(0, COLUMNS // 2)
    in_columns = columns < out_features
    dtype = out.dtype.element_ty
    for m in tl.static_range(ROWS):
        result = tl.sum(side_by_side(sums[m * COLUMNS : (m + 1) * COLUMNS], COLUMNS), 0)
        if scales is not None and GROUP == 0:
            result *= tl.load(scales + columns, mask=in_columns, other=0.0)
        if ROUNDED:
            result *= x_scales[m]
        if bias is not None:
            result += tl.load(bias + columns, mask=in_columns, other=0.0).to(tl.float32)
        # Rounded wherever the ops on their own would round.
        final = rounded(result, dtype)
        if ACTIVATION is not None:
            gate, up = tl.split(tl.reshape(final.to(tl.float32), [COLUMNS // 2, 2]))
            final = rounded(rounded(activated(gate, ACTIVATION), dtype).to(tl.float32) * limited(up, ACTIVATION), dtype)
        stored = kept <= tl.where(m < num_rows, last, -1)
        if residual is not None:
            before = tl.load(residual + m * residual_stride + kept, mask=stored, other=0.0)
            final = rounded(final.to(tl.float32) + before.to(tl.float32), dtype)
        tl.store(out + m * out_stride + kept, final, mask=stored)
