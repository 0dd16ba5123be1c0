"""The one form in which quantised weights of checkpoints reach the kernels: codes, and scales that stand for groups.

    int4, int8    w = scale * (code - zero)          code unsigned; without zeros, `zero` is 8 or 128
    float4        w = scale * table[code]            NF4, FP4, MXFP4, NVFP4: they differ in the table alone
    e4m3          w = scale * code                   float8_e4m3fn

A checkpoint may mean the inputs to be rounded before they are multiplied: `InputRounding`.

A group is `group` neighbours along the input axis. Where the checkpoint orders its inputs otherwise (GPTQ's desc_act),
column i of the codes meets input order[i].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["int4", "int8", "float4", "e4m3"]
SCALE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FP4_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""Values of the codes of a float of 2 bits of exponent and 1 of mantissa (OCP Microscaling formats, section 5.3.3)."""
TOKEN_STEPS = 127.50003
"""Between 0 and a token's largest magnitude: 127.5, and a little, so that the largest, if it is negative, is code -128
whatever the last bit of a quotient."""


@dataclass(frozen=True)
class InputRounding:
    """Inputs as int8: x ~ scale * (q - zero). Sums of such products with integers are exact."""

    scale: float | None = None
    """None: each token has its own, by the largest magnitude of what is rounded."""
    zero: int = 0
    """Of a scale that is given."""
    shifted: bool = False
    """Where it is not given: each token has a zero point too, by its least and largest value."""

    def __post_init__(self) -> None:
        if self.scale is not None and not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"the scale of its inputs is {self.scale}; a number above 0 is expected")
        if not -128 <= self.zero <= 127:
            raise ValueError(f"the zero point of its inputs is {self.zero}; one of 8 bits is expected")

    def of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [..., k] -> q in x's dtype, and scale and zero [..., 1]."""
        if self.scale is not None:
            scale, zero = (x.new_tensor([each]) for each in (self.scale, float(self.zero)))
        else:
            most, least = x.amax(-1, keepdim=True).clamp(min=0), x.amin(-1, keepdim=True).clamp(max=0)
            scale = (most - least) / 255 if self.shifted else torch.maximum(most, -least) / TOKEN_STEPS
            scale = torch.where(scale > 0, scale, 1.0)
            zero = (-128 - least / scale).round().clamp(-128, 127) if self.shifted else torch.zeros_like(scale)
        return (x / scale + zero).clamp(-128, 127).round(), scale, zero

    def rounded(self, x: Tensor) -> Tensor:
        """x [..., k] as it meets the weights."""
        q, scale, zero = self.of(x)
        return (q - zero) * scale


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """A matrix [n, k]. Raises ValueError where its parts do not fit together."""

    kind: Kind
    codes: Tensor
    """4 bits: [n, k / 2] uint8, of two neighbours the first in the low half; 8 bits: [n, k] uint8, e4m3 as its bits."""
    scales: Tensor
    """[n, k / group] float32, float16 or bfloat16."""
    group: int
    """Weights along k that share a scale."""
    zeros: Tensor | None = None
    """Of integers: as `scales`, in codes."""
    order: Tensor | None = None
    """[k] int32."""
    table: tuple[float, ...] = ()
    """Of float4: the values of the 16 codes."""
    inputs: InputRounding | None = None
    """How the checkpoint means its inputs to be rounded; None: not at all."""

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
        """[n, k] float32: the values, each rounded once."""
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
        """[n, k] float32: the codes' values before zeros and scales, in the codes' order."""
        if self.kind == "e4m3":
            return self.codes.view(torch.float8_e4m3fn).float()
        if self.kind == "int8":
            return self.codes.float()
        codes = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1)
        return codes.float() if self.kind == "int4" else torch.tensor(self.table)[codes.int()]

    @property
    def undivided(self) -> int:
        """Neighbours that stay together: a group, or the codes of a byte where a row has one scale."""
        return self.group if self.group < self.shape[1] else 8 // self.bits

    def columns_divide(self, first: int, last: int) -> bool:
        """Whether inputs first .. last - 1 can be taken by themselves."""
        if first == 0 and last == self.shape[1]:
            return True
        return self.order is None and first % self.undivided == 0 and last % self.undivided == 0

    def part(self, rows: slice, columns: slice) -> GroupedWeight:
        """Outputs `rows` of inputs `columns`, where `columns_divide`."""
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
        """Zeros [n, k] of the same kind, to write parts into; groups must divide k. Where a row has one scale, what
        its other parts leave out stands for 0 only in integers without zeros, and must meet inputs of 0."""
        group = k if self.group == self.shape[1] else self.group
        zero_code = {"int4": 0x88, "int8": 0x80}.get(self.kind, 0) if self.zeros is None else 0
        codes = torch.full((n, k * self.bits // 8), zero_code, dtype=torch.uint8)
        scales = self.scales.new_zeros(n, k // group)
        zeros = None if self.zeros is None else self.zeros.new_zeros(n, k // group)
        return replace(self, codes=codes, scales=scales, group=group, zeros=zeros, order=None)

    def write(self, other: GroupedWeight) -> None:
        """Takes the place of what this part shows."""
        self.codes.copy_(other.codes)
        self.scales.copy_(other.scales)
        if self.zeros is not None and other.zeros is not None:
            self.zeros.copy_(other.zeros)

    def goes_with(self, other: GroupedWeight) -> bool:
        """Whether both can stand one below the other as one weight."""
        return self._form() == other._form() and (
            self.order is other.order
            or (self.order is not None and other.order is not None and torch.equal(self.order, other.order))
        )

    def _form(self) -> tuple[object, ...]:
        zeros = None if self.zeros is None else self.zeros.dtype
        ordered = self.order is not None
        return (self.kind, self.shape[1], self.group, self.scales.dtype, zeros, self.table, self.inputs, ordered)


def joined(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Weights that go together, one below the other."""
    first = weights[0]
    if len(weights) == 1:
        return first
    zeros = None
    if first.zeros is not None:
        zeros = torch.cat([each.zeros for each in weights if each.zeros is not None])
    codes, scales = (torch.cat([getattr(each, name) for each in weights]) for name in ("codes", "scales"))
    return replace(first, codes=codes, scales=scales, zeros=zeros)


def two_in_a_byte(codes: Tensor) -> Tensor:
    """[n, k] codes of 4 bits -> [n, k / 2] uint8, of two neighbours the first in the low half."""
    pairs = codes.to(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4
