"""Float weights rounded to fewer bits on the device, as they are read: matrix by matrix, before it is packed."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.reference.rows import LARGEST_STORED, narrow

FP8 = torch.float8_e4m3fn
ROWS_AT_ONCE = 4096
"""Rows of a weight that are rounded at a time: their float32 copies are what it takes."""
FP16_MAX = torch.finfo(torch.float16).max


def to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> float8_e4m3fn of the same shape, and float32 scales [out, 1]: each row's largest over 448."""
    codes = torch.empty(weight.shape, dtype=FP8, device=weight.device)
    largest = weight.abs().amax(1, keepdim=True).float()
    scales = torch.where(largest > 0, largest / LARGEST_STORED[FP8], 1.0)
    for start in range(0, len(weight), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        codes[rows] = narrow(weight[rows].float() / scales[rows], FP8)
    return codes, scales


def to_int8(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> int8 codes of the same shape, and float16 scales [out, in / group].

    A group's scale is its largest magnitude over 127, rounded to float16 before the codes are chosen: what the CPU's
    int8 computes (`kernels.cpu.linear.quantise`).
    """
    out_features, in_features = weight.shape
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(out_features, in_features // group, dtype=torch.float16, device=weight.device)
    for start in range(0, out_features, ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        groups = weight[rows].float().unflatten(1, (-1, group))
        scales[rows] = (groups.abs().amax(-1) / 127).clamp(max=FP16_MAX).half()
        codes[rows] = _divided(groups, scales[rows]).round().clamp(-127, 127).to(torch.int8).flatten(1)
    return codes, scales


def to_int4(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """weight [out, in] -> codes [out, in / 2] uint8, the low half of a byte before the high one, float16 scales and
    float32 zeros, both [out, in / group]: (code - zero) * scale.

    A group's codes go from its least weight to its largest in 15 steps, of which the step and the least are rounded
    to float16 before the codes are chosen: what the CPU's int4 computes.
    """
    out_features, in_features = weight.shape
    codes = torch.empty(out_features, in_features // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(out_features, in_features // group, dtype=torch.float16, device=weight.device)
    zeros = torch.empty(scales.shape, dtype=torch.float32, device=weight.device)
    for start in range(0, out_features, ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        groups = weight[rows].float().unflatten(1, (-1, group))
        least, most = groups.amin(-1), groups.amax(-1)
        step = ((most - least) / 15).clamp(max=FP16_MAX).half()
        least = least.clamp(-FP16_MAX, FP16_MAX).half().float()
        values = _divided(groups - least[..., None], step).round().clamp(0, 15).to(torch.uint8).flatten(1)
        codes[rows] = values[:, 0::2] | values[:, 1::2] << 4
        scales[rows] = torch.where(step > 0, step, 1.0)  # a group of one value: its codes are 0, and it is its least
        zeros[rows] = -least / scales[rows].float()
    return codes, scales, zeros


def _divided(groups: Tensor, scales: Tensor) -> Tensor:
    """groups [rows, num_groups, group] float32 over scales [rows, num_groups]; 0 where that is 0."""
    wide = scales.float()[..., None]
    return torch.where(wide > 0, groups / wide, 0.0)
