"""Launching the norms."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.triton.configs import power_of_two
from headrace.kernels.triton.norms_kernels import norm_kernel


def rms_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor | None = None,
    total_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `reference.rms_norm`; out and total_out are like x. `total_out=residual` adds in place.

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
    """As `reference.layer_norm`, and as `rms_norm` here."""
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
    """x [..., size] as [num_rows, size] with neighbouring columns, copied only where it must be."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()
