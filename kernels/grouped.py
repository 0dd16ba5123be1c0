"""The one form in which a checkpoint's quantised weights reach the kernels: codes, with a scale for each group.

    int4, int8    w = scale * (code - zero)          code unsigned; without zeros, `zero` is 8 or 128
    float4        w = scale * table[code]            NF4, FP4, MXFP4, NVFP4, which differ only in the table
    e4m3          w = scale * code                   float8_e4m3fn

A checkpoint may ask for its inputs to be quantised before the product: `InputRounding`.

A group is `group` consecutive weights along the input axis. Where the checkpoint permutes its inputs (GPTQ's
desc_act), column i of the codes multiplies input order[i].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["int4", "int8", "float4", "e4m3"]
LEAST_STEP = 2.0**-17
"""The least step that float16, whose unit there is 2^-24, holds with an error below that of a code of 8 bits."""
SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP4_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the 16 codes of FP4 with 2 exponent bits and 1 mantissa bit (OCP Microscaling formats, section 5.3.3)."""
TOKEN_STEPS = 127.50003
"""Quantisation steps between 0 and a token's largest magnitude. Slightly more than 127.5, so that a negative largest
value becomes code -128 however its quotient was rounded in the last bit."""


@dataclass(frozen=True)
class InputRounding:
    """Quantises inputs to int8: x ~ scale * (q - zero). Their products with integer codes sum exactly."""

    scale: float | None = None
    """The static scale; None computes one per token, from the largest magnitude of its inputs."""
    zero: int = 0
    """The zero point that belongs to a static scale."""
    shifted: bool = False
    """Asymmetric quantisation, without a static scale: each token's zero point and scale come from its least and
    largest value."""
    group: int | None = None
    """Consecutive inputs of a token that share a scale, as many as weights do; None: all, if there is no static one."""

    def __post_init__(self) -> None:
        if self.scale is not None and not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"the scale of its inputs is {self.scale}; a number above 0 is expected")
        if not -128 <= self.zero <= 127:
            raise ValueError(f"the zero point of its inputs is {self.zero}; one of 8 bits is expected")
        if self.group is not None and (self.scale is not None or self.shifted):
            raise ValueError("groups of inputs have scales of their own, and no zero points")

    def of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Quantises x [..., k]: returns q [..., k] in x's dtype, and scale and zero [..., 1] ([1] if static, [..., k]
        of groups). A value that is not finite becomes NaN."""
        if self.group is not None:
            groups = x.unflatten(-1, (-1, self.group))
            scale = groups.abs().amax(-1, keepdim=True) / TOKEN_STEPS
            scale = torch.where(scale > 0, scale, 1.0)
            q = (groups * (1.0 / scale)).clamp(-128, 127).round()
            return q.flatten(-2), scale.expand_as(q).flatten(-2), torch.zeros_like(x)
        if self.scale is not None:
            scale, zero = (x.new_tensor([each]) for each in (self.scale, float(self.zero)))
        else:
            most, least = x.amax(-1, keepdim=True).clamp(min=0), x.amin(-1, keepdim=True).clamp(max=0)
            scale = (most - least) / 255 if self.shifted else torch.maximum(most, -least) / TOKEN_STEPS
            scale = torch.where(scale > 0, scale, 1.0)
            zero = (-128 - least / scale).round().clamp(-128, 127) if self.shifted else torch.zeros_like(scale)
        return (x / scale + zero).clamp(-128, 127).round() + x * 0, scale, zero

    def rounded(self, x: Tensor) -> Tensor:
        """x [..., k] after quantising and dequantising, the inputs of the product."""
        q, scale, zero = self.of(x)
        return (q - zero) * scale


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """A quantised matrix [n, k]. Raises ValueError if the shapes or dtypes of its parts do not match."""

    kind: Kind
    codes: Tensor
    """4 bits: [n, k / 2] uint8, the first of two codes in the low half; 8 bits: [n, k] uint8, e4m3 as its bits."""
    scales: Tensor
    """[n, k / group] float32, float16 or bfloat16."""
    group: int
    """Weights along k that share a scale."""
    zeros: Tensor | None = None
    """Zero points of int4 and int8, in units of codes; shape and dtypes as `scales`."""
    order: Tensor | None = None
    """[k] int32: the input that each column of the codes multiplies; None if they are in order."""
    table: tuple[float, ...] = ()
    """For float4: the values of the 16 codes."""
    inputs: InputRounding | None = None
    """How the inputs are quantised; None leaves them as they are."""

    def __post_init__(self) -> None:
        n, k = self.shape
        groups = (n, k // self.group) if self.group > 0 and k % self.group == 0 else None
        if groups is None:
            raise ValueError(f"groups of {self.group} do not divide rows of {k} weights")
        for name, tensor in (("scales", self.scales), ("zeros", self.zeros)):
            if tensor is not None and (tuple(tensor.shape) != groups or tensor.dtype not in SCALE_DTYPES):
                raise ValueError(
                    f"{name} are {tensor.dtype} {list(tensor.shape)}; [{n}, {k}] in groups of {self.group} needs "
                    f"{list(groups)} in float32, float16 or bfloat16"
                )
        if self.order is not None and self.order.shape != (k,):
            raise ValueError(f"an order of {list(self.order.shape)} inputs; there are {k}")
        size = None if self.inputs is None else self.inputs.group
        if size is not None and (size != self.group or self.order is not None):
            raise ValueError(f"groups of {size} inputs, and of {self.group} weights in their order")

    @property
    def bits(self) -> int:
        return 4 if self.kind in ("int4", "float4") else 8

    @property
    def shape(self) -> tuple[int, int]:
        n, stored = self.codes.shape
        return n, stored * 8 // self.bits

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.codes, self.scales, self.zeros, self.order) if each is not None)

    def floats(self) -> Tensor:
        """[n, k] float32: the dequantised weights in the order of the inputs, each rounded once."""
        values = self.values()
        n, k = values.shape
        groups = values.view(n, -1, self.group)
        if self.kind in ("int4", "int8"):
            middle = 1 << (self.bits - 1)
            groups = groups - (middle if self.zeros is None else self.zeros.float()[..., None])
        found = (groups * self.scales.float()[..., None]).view(n, k)
        if self.order is None:
            return found
        placed = torch.empty_like(found)
        placed[:, self.order.long()] = found
        return placed

    def values(self) -> Tensor:
        """[n, k] float32: the values of the codes without zero points and scales, in the order of the codes."""
        if self.kind == "e4m3":
            return self.codes.view(torch.float8_e4m3fn).float()
        if self.kind == "int8":
            return self.codes.float()
        codes = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1)
        return codes.float() if self.kind == "int4" else torch.tensor(self.table)[codes.int()]

    @property
    def undivided(self) -> int:
        """Inputs that a division among ranks keeps together: a group, or the codes of one byte where each row has one
        scale."""
        return self.group if self.group < self.shape[1] else 8 // self.bits

    def columns_divide(self, first: int, last: int) -> bool:
        """Whether inputs first .. last - 1 can be cut out by `part`."""
        if first == 0 and last == self.shape[1]:
            return True
        return self.order is None and first % self.undivided == 0 and last % self.undivided == 0

    def part(self, rows: slice, columns: slice) -> GroupedWeight:
        """The weights of outputs `rows` and inputs `columns`, a view. `columns_divide` must hold for the columns."""
        across = slice(columns.start * self.bits // 8, columns.stop * self.bits // 8)
        if self.group == self.shape[1]:
            group, groups = columns.stop - columns.start, slice(0, 1)
        else:
            group, groups = self.group, slice(columns.start // self.group, columns.stop // self.group)
        zeros = None if self.zeros is None else self.zeros[rows, groups]
        return replace(self, codes=self.codes[rows, across], scales=self.scales[rows, groups], group=group, zeros=zeros)

    def take(self, rows: Tensor) -> GroupedWeight:
        """Outputs `rows` [count] int64, in this order."""
        zeros = None if self.zeros is None else self.zeros[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], zeros=zeros)

    def to(self, device: torch.device) -> GroupedWeight:
        zeros, order = (None if each is None else each.to(device) for each in (self.zeros, self.order))
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device), zeros=zeros, order=order)

    def blank(self, n: int, k: int) -> GroupedWeight:
        """A weight [n, k] of zeros in the same form, to be filled by `write` on its parts; groups must divide k.

        Where each row has one scale, columns that nobody writes still mean 0 only for integers without zero points. In
        other forms their inputs must be 0."""
        group = k if self.group == self.shape[1] else self.group
        zero_code = {"int4": 0x88, "int8": 0x80}.get(self.kind, 0) if self.zeros is None else 0
        codes = torch.full((n, k * self.bits // 8), zero_code, dtype=torch.uint8)
        scales = self.scales.new_zeros(n, k // group)
        zeros = None if self.zeros is None else self.zeros.new_zeros(n, k // group)
        return replace(self, codes=codes, scales=scales, group=group, zeros=zeros, order=None)

    def write(self, other: GroupedWeight) -> None:
        """Copies the codes, scales and zero points of `other`, of the same shape, into this weight's memory."""
        self.codes.copy_(other.codes)
        self.scales.copy_(other.scales)
        if self.zeros is not None and other.zeros is not None:
            self.zeros.copy_(other.zeros)

    def goes_with(self, other: GroupedWeight) -> bool:
        """Whether `joined` can stack the two along the output axis."""
        return self._form() == other._form() and (
            self.order is other.order
            or (self.order is not None and other.order is not None and torch.equal(self.order, other.order))
        )

    def _form(self) -> tuple[object, ...]:
        zeros = None if self.zeros is None else self.zeros.dtype
        ordered = self.order is not None
        return (self.kind, self.shape[1], self.group, self.scales.dtype, zeros, self.table, self.inputs, ordered)


def joined(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Stacks weights along the output axis; all must agree by `goes_with`."""
    first = weights[0]
    if len(weights) == 1:
        return first
    zeros = None
    if first.zeros is not None:
        zeros = torch.cat([each.zeros for each in weights if each.zeros is not None])
    codes, scales = (torch.cat([getattr(each, name) for each in weights]) for name in ("codes", "scales"))
    return replace(first, codes=codes, scales=scales, zeros=zeros)


def fit_half(weight: Tensor, bits: int, group_size: int) -> bool:
    """Whether float16 holds the steps and minima of weights that are quantised in groups, finer than a code."""
    groups = weight.to(torch.float32).view(weight.shape[0], -1, group_size)
    least, most = groups.amin(-1), groups.amax(-1)
    steps = torch.maximum(most, -least) / 127 if bits == 8 else (most - least) / 15
    largest = torch.maximum(most, -least)
    small = (steps > 0) & (steps < LEAST_STEP)
    if bits == 4:  # a minimum errs by up to half a unit of float16, which must be small beside the step
        error = (least.abs() * 2**-12).clamp_min(2**-25)
        small |= error > torch.where(steps > 0, steps / 16, largest / 256).masked_fill(largest == 0, torch.inf)
    limit = torch.finfo(torch.float16).max
    return not bool(small.any()) and bool((steps if bits == 8 else largest).amax() <= limit)


def two_in_a_byte(codes: Tensor) -> Tensor:
    """Packs [n, k] codes of 4 bits into [n, k / 2] uint8, the first of two codes in the low half."""
    pairs = codes.to(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4
