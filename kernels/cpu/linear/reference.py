"""The product of packed linear layers in plain torch, and conversions of GGUF's block types from and to floats."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.cpu.linear.args import WEIGHT_TYPES
from headrace.kernels.grouped import GroupedWeight, two_in_a_byte
from headrace.kernels.reference.rows import activate, activate_and_multiply

GROUP_SIZES = (32, 64, 128)


def reference(
    x: Tensor,  # [..., k]
    weight: Tensor,  # [n, k], dequantised
    bias: Tensor | None = None,  # [n]
    *,
    gated: bool = False,
    activation: str = "none",
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The product in torch, computed in `dtype`. For bf16 weights x is rounded to bf16, as in the kernels."""
    if weight.dtype == torch.bfloat16:
        x = x.to(torch.bfloat16)
    y = torch.nn.functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    if activation != "none":
        y = activate_and_multiply(y, activation) if gated else activate(y, activation)
    elif gated:
        gate, up = y.chunk(2, dim=-1)
        y = gate * up
    return y if residual is None else y + residual.to(dtype)


def dequantise(type_name: str, rows: Tensor) -> Tensor:
    """Dequantises GGUF rows [n, bytes] uint8 to [n, k] fp32 with the gguf package."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType[type_name]))


def quantise(weight: Tensor, bits: int, group_size: int = 32) -> tuple[str, Tensor]:
    """Quantises a float weight [n, k] to GGUF rows for `pack`: (type name, [n, bytes] uint8), Q8_0 for 8 bits, Q4_1
    for 4.

    Each group of `group_size` weights along k shares a step: max|w| / 127 for 8 bits; for 4 bits (max - min) / 15,
    with the minimum as offset. Steps and minima are rounded to fp16 before the codes are chosen. Groups of 64 and 128
    repeat their step for every 32 weights and so save no memory; they give the results of other engines' groups.
    Raises ValueError for other bits or group sizes, or if the group size does not divide k.
    """
    n, k = weight.shape
    if bits not in (4, 8) or group_size not in GROUP_SIZES:
        raise ValueError(
            f"weights can be quantised to 4 or 8 bits in groups of {GROUP_SIZES}; asked: {bits}, {group_size}."
        )
    if k % group_size != 0:
        raise ValueError(f"rows of {k} weights are not a multiple of the group size {group_size}.")
    groups = weight.to(torch.float32).view(n, k // group_size, group_size)
    least, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    limit = torch.finfo(torch.float16).max
    if bits == 8:
        step = (torch.maximum(most, -least) / 127).clamp(max=limit).to(torch.float16)
        codes = _divide(groups, step).round().clamp(-127, 127).to(torch.int8).view(torch.uint8)
        fields = [step]
    else:
        step = ((most - least) / 15).clamp(max=limit).to(torch.float16)
        minimum = least.clamp(-limit, limit).to(torch.float16)
        codes = _divide(groups - minimum.to(torch.float32), step).round().clamp(0, 15).to(torch.uint8)
        fields = [step, minimum]
    blocks = codes.view(n, k // 32, 32)
    if bits == 4:
        blocks = blocks[..., :16] | blocks[..., 16:] << 4
    heads = [field.repeat_interleave(group_size // 32, 1).view(torch.uint8) for field in fields]
    rows = torch.cat([*heads, blocks], dim=-1).reshape(n, -1)
    name = "Q8_0" if bits == 8 else "Q4_1"
    assert rows.shape[1] == k // 32 * WEIGHT_TYPES[name].block_bytes
    return name, rows


def quantise_wide(weight: Tensor, bits: int, group_size: int) -> GroupedWeight:
    """As `quantise`, with steps and zero points in float32, for weights that do not fit float16."""
    n, k = weight.shape
    groups = weight.to(torch.float32).view(n, k // group_size, group_size)
    least, most = groups.amin(-1), groups.amax(-1)
    if bits == 8:
        largest = torch.maximum(most, -least)
        steps = torch.where(largest > 0, largest / 127, 1.0)
        codes = (groups / steps[..., None]).round().clamp(-127, 127) + 128
        return GroupedWeight("int8", codes.to(torch.uint8).view(n, k), steps, group_size)
    # A group of equal weights has its value as the step, and codes 1 or, of a negative value, -1 above the zero point.
    steps = torch.where(most > least, (most - least) / 15, torch.where(least != 0, least.abs(), 1.0))
    zeros = -least / steps
    codes = (groups / steps[..., None] + zeros[..., None]).round().clamp(0, 15)
    return GroupedWeight("int4", two_in_a_byte(codes.to(torch.uint8).view(n, k)), steps, group_size, zeros)


def _divide(values: Tensor, step: Tensor) -> Tensor:
    wide = step.to(torch.float32)
    return torch.where(wide > 0, values / wide, 0.0)
