"""Converts GGUF types that the kernels do not support (IQ1 to IQ4, TQ1, TQ2, Q3_K, MXFP4, NVFP4) to 4-bit codes with
group scales. This is exact: none of these types has more than 16 values in a group.

Blocks are decoded by the gguf package only. Decoding a block with its scales replaced by 1 gives the values of its
codes; decoding it with all codes equal gives its scales. Layouts: `block_*` in llama.cpp's ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np
import torch

from headrace.kernels.grouped import GroupedWeight, Kind

ROWS_AT_ONCE_BYTES = 1 << 24
"""Size of the float32 values that exist at once while a matrix is converted."""


@dataclass(frozen=True)
class Regrouped:
    """How blocks of a type are converted."""

    group: int
    """Number of neighbours that share a scale."""
    scale_bits: Mapping[int, tuple[int, int]]
    """From the index of a byte of a block to (mask of its bits that belong to scales, these bits for scales of 1)."""
    values: tuple[float, ...]
    """Values of the codes if scales are 1: at most 16, either whole numbers, or multiples of 1/8 below 16."""
    code_fill: int = 0
    """Byte that fills the bits of codes to get equal codes whose value is not 0."""

    @property
    def is_integer(self) -> bool:
        """Whether codes can be int4: small whole numbers, in groups whose size the kernels support."""
        return self.group % 32 == 0 and max(map(abs, self.values)) < 8 and self.steps == 1

    @cached_property
    def code_of(self) -> np.ndarray:
        """[256] uint8: the code of value v is at index v * steps + 128."""
        found = np.zeros(256, np.uint8)
        for code, value in reversed(list(enumerate(self.values))):
            found[round(value * self.steps) + 128] = value + 8 if self.is_integer else code
        return found

    @property
    def steps(self) -> int:
        return 1 if all(value == int(value) for value in self.values) else 8

    @property
    def table(self) -> tuple[float, ...]:
        return () if self.is_integer else self.values + (0.0,) * (16 - len(self.values))

    def num_bytes(self, elements: int) -> int:
        return elements // 2 + elements // self.group * 4

    def take_apart(self, type_name: str, rows: np.ndarray) -> GroupedWeight:
        """Converts rows of whole blocks, [rows, bytes of a row] uint8."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        size, num_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
        columns = rows.shape[1] // num_bytes * size
        codes = np.empty((len(rows), columns // 2), np.uint8)
        scales = np.empty((len(rows), columns // self.group), np.float32)
        step = max(1, ROWS_AT_ONCE_BYTES // (4 * columns))
        for first in range(0, len(rows), step):
            own = slice(first, first + step)
            blocks = rows[own].reshape(-1, num_bytes)
            codes[own], scales[own] = self._codes_and_scales(type_name, blocks, len(rows[own]))
        kind: Kind = "int4" if self.is_integer else "float4"
        return GroupedWeight(kind, torch.from_numpy(codes), torch.from_numpy(scales), self.group, table=self.table)

    def _codes_and_scales(self, type_name: str, blocks: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
        masks, ones = np.zeros((2, 1, blocks.shape[1]), np.uint8)
        for place, (mask, one) in self.scale_bits.items():
            masks[0, place], ones[0, place] = mask, one
        same_codes = ~masks & np.uint8(self.code_fill)
        values = _values(type_name, blocks & ~masks | ones)
        codes = self.code_of[(values * np.float32(self.steps)).astype(np.int16) + 128].reshape(rows, -1, 2)
        with np.errstate(invalid="ignore"):  # scales may be NaN
            of_one_code = _values(type_name, blocks & masks | same_codes)[:, :: self.group]
            scales = of_one_code / _values(type_name, ones | same_codes)[0, 0]
        return codes[..., 0] | codes[..., 1] << 4, scales.reshape(rows, -1)


def _values(type_name: str, blocks: np.ndarray) -> np.ndarray:
    """Decodes blocks, [blocks, bytes] uint8 -> [blocks, values] float32."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    found = dequantize(np.ascontiguousarray(blocks), GGMLQuantizationType[type_name])
    return np.asarray(found, np.float32)


def _float16(first: int, value: float) -> dict[int, tuple[int, int]]:
    low, high = np.array(value, "<f2").tobytes()
    return {first: (0xFF, low), first + 1: (0xFF, high)}


def _whole(first: int, *fill: int) -> dict[int, tuple[int, int]]:
    return {first + index: (0xFF, each) for index, each in enumerate(fill)}


def _bits(first: int, stride: int, mask: int) -> dict[int, tuple[int, int]]:
    """`scale_bits` for scales in some bits of eight bytes, `stride` apart."""
    return {first + stride * index: (mask, 0) for index in range(8)}


def _signed(*magnitudes: float) -> tuple[float, ...]:
    return magnitudes + tuple(-each for each in magnitudes)


_TWO_BITS = _signed(8, 25, 43)
_ONE_BIT = _signed(0.125, 0.875, 1.125)
_FLOAT4 = _signed(0, 1, 2, 3, 4, 6, 8, 12)
_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_TERNARY = (-1, 0, 1, 2)
_SCALES_33 = (0x11,) * 8 + (0xAA,) * 4
"""Bytes of Q3_K's sixteen 6-bit scales, all 33, which stand for 1 since 32 is subtracted."""

REGROUPED: Mapping[str, Regrouped] = MappingProxyType(
    {
        "IQ1_S": Regrouped(32, _float16(0, 1) | _bits(35, 2, 0x70), _ONE_BIT),
        "IQ1_M": Regrouped(16, _whole(48, 0, 0, 0, 0, 0, 0xC0, 0, 0x30), _ONE_BIT),
        "IQ2_XXS": Regrouped(32, _float16(0, 8) | _bits(9, 8, 0xF0), _TWO_BITS),
        "IQ2_XS": Regrouped(16, _float16(0, 8) | _whole(66, *[0] * 8), _TWO_BITS),
        "IQ2_S": Regrouped(16, _float16(0, 8) | _whole(74, *[0] * 8), _TWO_BITS),
        "IQ3_XXS": Regrouped(32, _float16(0, 4) | _bits(69, 4, 0xF0), _signed(4, 12, 20, 28, 36, 44, 52, 62)),
        "IQ3_S": Regrouped(32, _float16(0, 1) | _whole(106, *[0] * 4), _signed(1, 3, 5, 7, 9, 11, 13, 15)),
        "IQ4_NL": Regrouped(32, _float16(0, 1), _NONLINEAR),
        "IQ4_XS": Regrouped(32, _float16(0, 1) | _whole(2, 0xAA, 0xAA, 0x11, 0x11, 0x11, 0x11), _NONLINEAR),
        "TQ1_0": Regrouped(256, _float16(52, 1), _TERNARY),
        "TQ2_0": Regrouped(256, _float16(64, 1), _TERNARY),
        "Q3_K": Regrouped(16, _whole(96, *_SCALES_33) | _float16(108, 1), tuple(range(-4, 4))),
        "MXFP4": Regrouped(32, _whole(0, 128), _FLOAT4, code_fill=0x11),
        "NVFP4": Regrouped(16, _whole(0, *[0x40] * 4), _FLOAT4, code_fill=0x11),
    }
)
