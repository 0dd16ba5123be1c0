"""Linear layers whose weights are stored in 8 or 4 bits, in torch: each call dequantises the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.reference.rows import LARGEST_STORED, LinearWeight, narrow

NO_ZERO = 8
"""The zero point of 4-bit codes that come without zero points."""


class QuantisedLinear:
    """A quantised weight: codes, scales and zero points as they are given, with float inputs."""

    rounds_input = False

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None, zeros: Tensor | None = None) -> None:
        self.codes = codes  # [out_features, in_features] int8 or float8_e4m3fn; [.., in_features / 2] uint8 for 4 bits
        self.scales = scales  # [out_features, num_groups] float32 or float16
        self.bias = bias  # [out_features]
        self.zeros = zeros  # [out_features, num_groups] uint8 or float32, only for 4 bits

    def apply(self, x: Tensor) -> Tensor:
        wide = x.float()
        if self.rounds_input:
            codes, scales = round_tokens(x)
            wide = codes.float() * scales
        result = F.linear(wide, self._rows(slice(None)))
        return (result if self.bias is None else result + self.bias.float()).to(x.dtype)

    def look_up(self, ids: Tensor) -> Tensor:
        """As `LinearWeight.look_up`, but in float32: codes have no dtype to compute in."""
        return self._rows(ids.flatten()).unflatten(0, ids.shape)

    def _rows(self, rows: Tensor | slice) -> Tensor:
        zeros = None if self.zeros is None else self.zeros[rows]
        return dequantise(self.codes[rows], self.scales[rows], zeros)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.codes, self.scales, self.bias, self.zeros) if x is not None)


class QuantisedBothLinear(QuantisedLinear):
    """A quantised weight whose inputs are quantised too, with one scale per token."""

    rounds_input = True


def dequantise(codes: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    """Dequantises codes in a form of `QuantisedLinear`: returns [rows, in_features] float32."""
    if codes.dtype == torch.uint8:
        values = torch.stack((codes & 15, codes >> 4), -1).flatten(1).float()
        per_group = values.unflatten(1, (scales.shape[1], -1))
        shift = NO_ZERO if zeros is None else zeros.float()[..., None]
        return ((per_group - shift) * scales[..., None]).flatten(1)
    return (codes.float().unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)


def round_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises each token: x [..., size] -> float8_e4m3fn of the same shape, and scales [..., 1] float32.

    A scale is the token's largest magnitude over 448, or 1 for a token of zeros."""
    largest = x.float().abs().amax(-1, keepdim=True)
    scales = torch.where(largest > 0, largest / LARGEST_STORED[torch.float8_e4m3fn], 1.0)
    return narrow(x.float() / scales, torch.float8_e4m3fn), scales


def linear_int8(codes: Tensor, scales: Tensor, bias: Tensor | None) -> LinearWeight:
    """Packs weights code * scale, in groups of in_features / num_groups: one group is one scale per row.

    codes [out_features, in_features] int8; scales [out_features, num_groups] float32 or float16."""
    return QuantisedLinear(codes, scales, bias)


def linear_int4(codes: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None) -> LinearWeight:
    """Packs weights (code - zero) * scale, in groups of in_features / num_groups.

    codes [out_features, in_features / 2] uint8, the first of two codes in the low half of a byte; scales
    [out_features, num_groups] float32 or float16; zeros [out_features, num_groups] uint8, or float32 for zero points
    that are not whole numbers, or None for 8 everywhere.
    """
    return QuantisedLinear(codes, scales, bias, zeros)


def linear_fp8(weight: Tensor, scales: Tensor, bias: Tensor | None) -> LinearWeight:
    """Packs weights of float8 for float inputs: weight [out, in] float8_e4m3fn, scales [out, 1] float32."""
    return QuantisedLinear(weight, scales, bias)


def linear_fp8_dynamic(weight: Tensor, scales: Tensor, bias: Tensor | None) -> LinearWeight:
    """As `linear_fp8`, but inputs are quantised to float8_e4m3fn as well, with one scale per token."""
    return QuantisedBothLinear(weight, scales, bias)


REFERENCES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "linear_int8": linear_int8,
        "linear_int4": linear_int4,
        "linear_fp8": linear_fp8,
        "linear_fp8_dynamic": linear_fp8_dynamic,
    }
)
