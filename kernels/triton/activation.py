"""Launching activations."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.triton.activation_kernels import activation_kernel

BLOCK = 1024
NUM_WARPS = 4


def activate(x: Tensor, kind: str, out: Tensor | None = None) -> Tensor:
    """As `reference.activate`; out is like x and contiguous."""
    return _activate(x, kind, False, out)


def activate_and_multiply(gate_up: Tensor, kind: str, out: Tensor | None = None) -> Tensor:
    """As `reference.activate_and_multiply`; out [..., size] is contiguous."""
    return _activate(gate_up, kind, True, out)


def _activate(x: Tensor, kind: str, gated: bool, out: Tensor | None) -> Tensor:
    size = x.shape[-1] // 2 if gated else x.shape[-1]
    if out is None:
        out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if rows.numel():
        grid = (len(rows), -(-size // BLOCK))
        activation_kernel[grid](
            rows, out, size, rows.stride(0), size, KIND=kind, GATED=gated, BLOCK=BLOCK, num_warps=NUM_WARPS
        )
    return out
