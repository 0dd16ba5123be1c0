"""Vectors as bytes and as fewer bits, for answers. The arithmetic is that of torch's and numpy's conversions."""

from __future__ import annotations

import array
import math
import struct
import sys
from collections.abc import Sequence
from typing import Any, Literal

NumberType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "big", "little"]
_LARGEST_HALF = 65520.0
"""From here on a number is rounded to a float16 that is infinite."""
_FP8 = {"fp8_e4m3": (3, 7, 0x7E, 0x7E), "fp8_e5m2": (2, 15, 0x7B, 0x7C)}
"""Bits of the mantissa, the exponent's bias, the code of the largest number, and that of what is larger: the largest
in e4m3, which has no infinity (Micikevicius et al. 2022, section 3)."""
LARGEST_INT8 = 127


def as_bytes(values: memoryview[Any], kind: NumberType = "float32", endianness: Endianness = "native") -> bytes:
    """values: float32. Larger numbers than `kind` has become infinite, or its largest in fp8_e4m3."""
    made: array.array[Any]
    if kind == "float32":
        made = array.array("f", values.tobytes())  # of the view itself each number would become an object
    elif kind == "float16":
        made = array.array("H", struct.pack(f"={len(values)}e", *map(_within_half, values)))
    elif kind == "bfloat16":
        # The upper half, rounded to the nearest, and to an even one in the middle.
        words = array.array("I", values.cast("B").tobytes())
        made = array.array("H", ((word + 0x7FFF + (word >> 16 & 1)) >> 16 & 0xFFFF for word in words))
    else:
        made = array.array("B", (_fp8(value, *_FP8[kind]) for value in values))
    if endianness not in ("native", sys.byteorder) and made.itemsize > 1:
        made.byteswap()
    return made.tobytes()


def _within_half(value: float) -> float:
    return value if abs(value) < _LARGEST_HALF else math.copysign(math.inf, value)


def _fp8(value: float, bits: int, bias: int, largest: int, beyond: int) -> int:
    sign, size = (0x80 if math.copysign(1.0, value) < 0 else 0), abs(value)
    if size == 0.0:
        return sign
    exponent = max(math.frexp(size)[1] - 1, 1 - bias)
    steps = round(math.ldexp(size, bits - exponent))  # to the nearest; in the middle to an even number
    code = (exponent + bias - 1 << bits) + steps
    return sign | (code if code <= largest else beyond)


def as_int8(values: Sequence[float]) -> list[int]:
    """Each value as a share of the vector's largest, which becomes 127: angles between vectors stay what they were."""
    largest = max(map(abs, values), default=0.0)
    scale = LARGEST_INT8 / largest if largest else 0.0
    return [round(scale * value) for value in values]


def as_uint8(values: Sequence[float]) -> list[int]:
    """`as_int8` and 128."""
    return [each + 128 for each in as_int8(values)]


def as_bits(values: Sequence[float], *, signed: bool) -> list[int]:
    """The signs of eight values at a time in one number, the first in its highest bit; 1 stands for 0 and above.
    signed: less 128. The number of values is a multiple of eight."""
    signs = "".join("1" if value >= 0 else "0" for value in values)
    packed = int(signs, 2).to_bytes(len(signs) // 8, "big") if signs else b""
    return [each - 128 for each in packed] if signed else list(packed)
