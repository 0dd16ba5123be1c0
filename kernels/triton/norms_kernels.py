"""RMS and layer norm of x + residual, a row per program."""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# What triton.jit compiles has types of its own.

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.common_kernels import rounded


@triton.jit
def norm_kernel(
    x,  # [num_rows, size]
    residual,  # [num_rows, size] or None
    weight,  # [size] float32 or None
    bias,  # [size] float32 or None
    out,  # [num_rows, size]
    total_out,  # [num_rows, size], written where there is a residual; may be the residual itself
    eps,
    size,
    x_stride,
    residual_stride,
    out_stride,
    total_stride,
    CENTRED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (num_rows). A row is held whole, so it is summed in one order whatever the batch. CENTRED is layer norm."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    dtype = x.dtype.element_ty
    wide = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        wide += tl.load(residual + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
        total = rounded(wide, dtype)
        tl.store(total_out + row * total_stride + columns, total, mask=inside)
        wide = total.to(tl.float32)
    if CENTRED:
        mean = tl.sum(wide, 0) / size
        wide = tl.where(inside, wide - mean, 0.0)
    variance = tl.sum(wide * wide, 0) / size
    normed = wide * tl.rsqrt(variance + eps)
    if weight is not None:
        normed *= tl.load(weight + columns, mask=inside, other=0.0)
    if bias is not None:
        normed += tl.load(bias + columns, mask=inside, other=0.0)
    tl.store(out + row * out_stride + columns, rounded(normed, dtype), mask=inside)
