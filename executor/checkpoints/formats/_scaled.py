"""Conversions that several formats share: of 8-bit and 4-bit codes with their scales to `GroupedWeight`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from headrace.executor.checkpoints.formats import EXPONENTS, expect
from headrace.executor.checkpoints.formats.gptq import integers
from headrace.ipc.failure import ModelError
from headrace.kernels.grouped import FP4_E2M1, SCALE_DTYPES, GroupedWeight, InputRounding


def floats_of_8_bits(
    module: str,
    weight: Tensor,
    scales: Tensor,
    *,
    group: int | None = None,
    block: tuple[int, int] | None = None,
    chunks: int = 1,
) -> GroupedWeight:
    """weight [n, k] float8_e4m3fn; scales as in `scales_of_rows`: floats, or exponents of powers of two (e8m0)."""
    if scales.dtype in EXPONENTS:
        scales = powers_of_two(scales)
    wide, group = scales_of_rows(module, tuple(weight.shape), scales, group, block, chunks)
    return GroupedWeight("e4m3", weight.view(torch.uint8), wide, group)


def integers_in_bytes(
    module: str,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    *,
    inputs: InputRounding | None = None,
    bits: int = 8,
    group: int | None = None,
) -> GroupedWeight:
    """weight [n, k] int8, of which `bits` bits are used; scales and zero points as in `scales_of_rows`."""
    shape = weight.shape[0], weight.shape[1]
    wide, size = scales_of_rows(module, shape, scales, group)
    kept = 8
    if bits <= 4:
        expect(shape[1] % 2 == 0, module, f"rows of {shape[1]} codes do not fill bytes")
        fits = not weight.numel() or (int(weight.min()) >= -8 and int(weight.max()) <= 7)
        expect(fits, module, f"some codes are beyond {bits} bits")
        kept = 4
    middle = 1 << (kept - 1)
    shifted = None if zeros is None else scales_of_rows(module, shape, zeros.float(), group)[0] + middle
    codes = weight.view(torch.uint8) + middle  # uint8 addition, which wraps around
    return replace(integers(codes, kept, shifted, wide, size), inputs=inputs)


def floats_of_4_bits(module: str, packed: Tensor, scales: Tensor, group: int) -> GroupedWeight:
    """packed [n, k / 2] uint8, two e2m1 codes per byte, the first in the low half; scales [n, k / group] float32."""
    n, k = packed.shape[0], packed.shape[1] * 2
    wide, size = scales_of_rows(module, (n, k), scales, group)
    return GroupedWeight("float4", packed, wide, size, table=FP4_E2M1)


def input_rounding(module: str, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> InputRounding:
    """How a module's inputs are rounded to int8. config: has `dynamic` and `symmetric`. tensors: for a static scale,
    `input_scale` and perhaps `input_zero`, of one number each."""
    if config["dynamic"]:
        return InputRounding(shifted=not config["symmetric"])
    scale, zero = tensors.get("input_scale"), tensors.get("input_zero")
    expect(scale is not None and scale.numel() == 1, module, "one input_scale is expected for its inputs")
    assert scale is not None, "or it was refused"
    expect(zero is None or zero.numel() == 1, module, "one input_zero_point is expected for its inputs")
    try:
        return InputRounding(float(scale), 0 if zero is None else int(zero))
    except ValueError as error:
        raise ModelError(f"the quantised weights of {module} do not fit together: {error}") from error


def powers_of_two(exponents: Tensor) -> Tensor:
    """e8m0 scales, uint8 or float8_e8m0fnu, as float32."""
    return torch.ldexp(torch.ones(exponents.shape), exponents.view(torch.uint8).to(torch.int32) - 127)


def scales_of_rows(
    module: str,
    shape: tuple[int, ...],
    scales: Tensor,
    group: int | None,
    block: tuple[int, int] | None = None,
    chunks: int = 1,
) -> tuple[Tensor, int]:
    """(scales [n, k / size], group size) of a matrix of `shape` (n, k). The given scales are those of groups of `group`
    neighbours; of blocks (rows, columns), the last of which may be incomplete; else of the matrix or of each row.
    chunks: number of equal parts of the rows, each of which has blocks of its own.
    """
    n, k = shape
    if scales.dtype not in SCALE_DTYPES:
        scales = scales.float()
    if block is not None and scales.dim() == 2:
        rows, columns = block
        each = n // chunks
        needed = chunks * -(-each // rows), -(-k // columns)
        expect(
            tuple(scales.shape) == needed,
            module,
            f"scales are {list(scales.shape)}, and [{n}, {k}] in blocks of {rows} x {columns} needs {list(needed)}",
        )
        size = columns if k % columns == 0 else math.gcd(columns, k)
        across = scales.repeat_interleave(min(columns, k) // size, 1)[:, : k // size]
        down = across.unflatten(0, (chunks, -1)).repeat_interleave(min(rows, each), 1)[:, :each]
        return down.flatten(0, 1).contiguous(), size
    if group is not None and group < k:
        expect(k % group == 0, module, f"groups of {group} do not divide {k} inputs")
        expect(
            tuple(scales.shape) == (n, k // group),
            module,
            f"scales are {list(scales.shape)}, and [{n}, {k}] in groups of {group} needs {[n, k // group]}",
        )
        return scales.contiguous(), group
    if scales.numel() == 1:
        return scales.reshape(1, 1).expand(n, 1).contiguous(), k
    expect(
        scales.numel() == n == scales.shape[0],
        module,
        f"scales are {list(scales.shape)}; [{n}, {k}] needs one, or one for each row",
    )
    return scales.reshape(n, 1).contiguous(), k
