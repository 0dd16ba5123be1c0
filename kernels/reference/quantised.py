"""Linear layers whose weights are stored in 8 or 4 bits, in torch: dequantised each time they are applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.reference.rows import LARGEST_STORED, LinearWeight, narrow

NO_ZERO = 8
"""The code of 4 bits that stands for 0 where no zero points are given."""


class QuantisedLinear:
    """A weight in parts that are kept as they came."""

    rounds_input = False

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None, zeros: Tensor | None = None) -> None:
        self.codes = codes  # [out_features, in_features] int8 or float8_e4m3fn; [.., in_features / 2] uint8 for 4 bits
        self.scales = scales  # [out_features, num_groups] float32 or float16
        self.bias = bias  # [out_features]
        self.zeros = zeros  # [out_features, num_groups] uint8 or float32, of 4 bits alone

    def apply(self, x: Tensor) -> Tensor:
        wide = x.float()
        if self.rounds_input:
            codes, scales = round_tokens(x)
            wide = codes.float() * scales
        result = F.linear(wide, self._rows(slice(None)))
        return (result if self.bias is None else result + self.bias.float()).to(x.dtype)

    def look_up(self, ids: Tensor) -> Tensor:
        """In float32: the codes have no dtype to compute in."""
        return self._rows(ids.flatten()).unflatten(0, ids.shape)

    def _rows(self, rows: Tensor | slice) -> Tensor:
        zeros = None if self.zeros is None else self.zeros[rows]
        return dequantise(self.codes[rows], self.scales[rows], zeros)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.codes, self.scales, self.bias, self.zeros) if x is not None)


class QuantisedBothLinear(QuantisedLinear):
    """The inputs are rounded too, each token with a scale of its own."""

    rounds_input = True


def dequantise(codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """codes as `QuantisedLinear` has them -> [rows, in_features] float32."""
    if codes.dtype == torch.uint8:
        values = torch.stack((codes & 15, codes >> 4), -1).flatten(1).float()
        per_group = values.unflatten(1, (scales.shape[1], -1))
        shift = NO_ZERO if zeros is None else zeros.float()[..., None]
        return ((per_group - shift) * scales[..., None]).flatten(1)
    return (codes.float().unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)


def round_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., size] -> float8_e4m3fn of the same shape, and float32 scales [..., 1]: the largest magnitude over 448."""
    largest = x.float().abs().amax(-1, keepdim=True)
    scales = torch.where(largest > 0, largest / LARGEST_STORED[torch.float8_e4m3fn], 1.0)
    return narrow(x.float() / scales, torch.float8_e4m3fn), scales


def linear_int8(codes: Tensor, scales: Tensor, bias: Tensor | None) -> LinearWeight:
    """codes [out_features, in_features] int8, scales [out_features, num_groups] float32 or float16; 1 group is a scale
    per row."""
    return QuantisedLinear(codes, scales, bias)


def linear_int4(codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None) -> LinearWeight:
    """Weights (code - zero) * scale, in groups of in_features / num_groups.

    codes [out_features, in_features / 2] uint8, the low half of a byte before the high one; scales
    [out_features, num_groups] float32 or float16; zeros [out_features, num_groups], uint8, float32 where a group's
    least weight need not be a multiple of its scale, or None for 8.
    """
    return QuantisedLinear(codes, scales, bias, zeros)


def linear_fp8(weight: Tensor, scales: Tensor, bias: Tensor | None) -> LinearWeight:
    """Weights alone are rounded: weight [out, in] float8_e4m3fn, scales [out, 1] float32."""
    return QuantisedLinear(weight, scales, bias)


def linear_fp8_dynamic(weight: Tensor, scales: Tensor, bias: Tensor | None) -> LinearWeight:
    """As `linear_fp8`, and each token's inputs are rounded to float8_e4m3fn with a scale of their own."""
    return QuantisedBothLinear(weight, scales, bias)


REFERENCES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "linear_int8": linear_int8,
        "linear_int4": linear_int4,
        "linear_fp8": linear_fp8,
        "linear_fp8_dynamic": linear_fp8_dynamic,
    }
)
