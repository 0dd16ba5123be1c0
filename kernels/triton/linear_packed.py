"""The layout in which the GPU's linear kernels read weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DENSE, INT8, E4M3_BYTES, E4M3_IN_HARDWARE, INT4 = range(5)
INT4_BLOCK = 64
"""Bytes of 4-bit weights that are unpacked together: their low halves are the first 64 inputs, the high ones the next
64."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight in the layout of `linear_kernel` and `small_linear_kernel`."""

    kind: int
    codes: Tensor  # [out_features, bytes or values]
    scales: Tensor | None  # [out_features, num_groups] float32 or float16
    shifts: Tensor | None  # for 4 bits, shape of scales: zero * scale
    bias: Tensor | None
    in_features: int
    group: int
    """Inputs that share a scale; 0 for one scale per row."""
    rounds_input: bool = False
    """Whether inputs are rounded to e4m3, with one scale per token."""

    @property
    def bits(self) -> int:
        """Bits of one weight."""
        return 4 if self.kind == INT4 else 8 * self.codes.itemsize


def pack_int4(codes: Tensor) -> Tensor:
    """Reorders [out, in / 2] bytes, each of two consecutive codes, to the kernels' order [out, padded]; done once at
    load."""
    width = 2 * INT4_BLOCK
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    padded = torch.nn.functional.pad(nibbles, (0, -nibbles.shape[1] % width)).unflatten(1, (-1, 2, INT4_BLOCK))
    return (padded[:, :, 0] | padded[:, :, 1] << 4).flatten(1).contiguous()


def unpack_int4(stored: Tensor, in_features: int) -> Tensor:
    """The reverse of `pack_int4`."""
    blocks = stored.unflatten(1, (-1, INT4_BLOCK))
    nibbles = torch.stack((blocks & 15, blocks >> 4), 2).flatten(1)[:, :in_features]
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4
