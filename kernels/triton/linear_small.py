"""Launching `small_linear_kernel`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.triton.configs import SmallTiles, power_of_two
from headrace.kernels.triton.linear_packed import INT4, INT4_BLOCK, Packed
from headrace.kernels.triton.linear_small_kernels import small_linear_kernel

LOAD_BYTES = 16
"""What a thread loads of a row of the weight at once."""


@dataclass(frozen=True, eq=False)
class Around:
    """What is done in a linear layer's own launch, in this order: norm, product, activation, addition."""

    norm: tuple[Tensor, float] | None = None
    """RMS norm of x: weight [in_features] float32, eps."""
    activation: str | None = None
    """The result's first half passes it and multiplies the second, as in `reference.activate_and_multiply`."""
    residual: Tensor | None = None  # as the result


ALONE = Around()


def fits(packed: Packed) -> bool:
    """Whether the kernel takes such a weight: what a thread loads at once shares a scale."""
    return packed.group % (LOAD_BYTES // packed.codes.itemsize) == 0


def multiply_small(x: Tensor, packed: Packed, tiles: SmallTiles, around: Around = ALONE) -> Tensor:
    """x [..., in_features], of at least one row -> [..., out_features] in x's dtype, half as wide with an activation.

    Roundings are those of the ops one by one; sums are in float32, in an order that does not depend on the other rows.
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
        num_warps=tiles.num_warps,
        num_stages=1,
    )
    return out.view(*x.shape[:-1], width)
