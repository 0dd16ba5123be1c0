"""RMS and layer norm of x + residual, one program per row."""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# Functions under triton.jit handle types that mypy does not know.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.triton.common import rounded
from headrace.kernels.triton.configs import power_of_two


def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor | None = None,
    total_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.rms_norm`. out and total_out have x's shape and dtype; `total_out=residual` adds in place.

    Rows may be strided; the norm of a row does not depend on the others.
    """
    return _norm(x, residual, (weight, None), eps, False, (out, total_out))


def layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out: Tensor | None = None,
    total_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.layer_norm`, with the outputs of `rms_norm` above."""
    return _norm(x, residual, (weight, bias), eps, True, (out, total_out))


def _norm(
    x: Tensor,
    residual: Tensor | None,
    affine: tuple[Tensor | None, Tensor | None],
    eps: float,
    centred: bool,
    outs: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    out = outs[0] if outs[0] is not None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x
    if residual is not None:
        total = outs[1] if outs[1] is not None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, residual_rows = _rows(x), None if residual is None else _rows(residual)
    out_rows, total_rows = out.view(-1, size), total.view(-1, size) if residual is not None else rows
    if len(rows) == 0:
        return out, total
    block = power_of_two(size)
    norm_kernel[(len(rows),)](
        rows,
        residual_rows,
        *affine,
        out_rows,
        total_rows,
        eps,
        size,
        rows.stride(0),
        0 if residual_rows is None else residual_rows.stride(0),
        out_rows.stride(0),
        total_rows.stride(0),
        CENTRED=centred,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out, total


def _rows(x: Tensor) -> Tensor:
    """x [..., size] as [num_rows, size] with contiguous columns, copied only if necessary."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


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
