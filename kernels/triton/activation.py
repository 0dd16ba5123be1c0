"""Activations, and their products with a second half, in one pass."""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# Functions under triton.jit handle types that mypy does not know.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.triton.common import rounded, tanh

BLOCK = 1024
NUM_WARPS = 4


def activate(x: Tensor, kind: str, out: Tensor | None = None) -> Tensor:
    """As `reference.activate`. out: contiguous, with x's shape and dtype."""
    return _activate(x, kind, False, out)


def activate_and_multiply(gate_up: Tensor, kind: str, out: Tensor | None = None) -> Tensor:
    """As `reference.activate_and_multiply`. out: contiguous [..., size]."""
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


@triton.jit
def activated(x, KIND: tl.constexpr):
    """x float32 -> float32. KIND is a key of `reference.ACTIVATIONS`."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "normal_cdf":
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif KIND == "silu_to_7":
        return tl.minimum(x / (1.0 + tl.exp(-x)), 7.0)
    elif KIND == "silu_to_16":
        return tl.minimum(x / (1.0 + tl.exp(-x)), 16.0)
    elif KIND == "silu_below_10":
        return tl.minimum(x, 10.0) / (1.0 + tl.exp(-tl.minimum(x, 10.0)))
    elif KIND == "relu2":
        return tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    else:
        tl.static_assert(KIND == "relu")
        return tl.maximum(x, 0.0)


@triton.jit
def limited(up, KIND: tl.constexpr):
    """The up projection, float32, as a gate with this activation is multiplied with it."""
    if KIND == "silu_to_7":
        return tl.minimum(tl.maximum(up, -7.0), 7.0)
    elif KIND == "silu_to_16":
        return tl.minimum(tl.maximum(up, -16.0), 16.0)
    elif KIND == "silu_below_10":
        return tl.minimum(tl.maximum(up, -10.0), 10.0)
    else:
        return up


@triton.jit
def activated_and_multiplied(gate, up, KIND: tl.constexpr):
    """gate and up float32 -> float32. KIND is what `reference.activate_and_multiply` takes."""
    if KIND == "clamped_silu":
        gate = tl.minimum(gate, 7.0)
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0)
    else:
        return activated(gate, KIND) * limited(up, KIND)


@triton.jit
def activation_kernel(
    x,  # [num_rows, size] or, GATED, [num_rows, 2 * size], the gate's half first
    out,  # [num_rows, size]
    size,
    x_stride,
    out_stride,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (num_rows, ceil(size / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    dtype = out.dtype.element_ty
    result = activated(tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32), KIND)
    if GATED:
        # The activation is rounded before it is multiplied, as the reference's two ops do.
        up = tl.load(x + row * x_stride + size + columns, mask=inside, other=0.0).to(tl.float32)
        result = rounded(result, dtype).to(tl.float32) * limited(up, KIND)
    tl.store(out + row * out_stride + columns, rounded(result, dtype), mask=inside)
