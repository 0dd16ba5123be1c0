"""Functions that several kernels share, among them workarounds for gaps of Triton's interpreter."""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# Functions under triton.jit handle types that mypy does not know.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
CACHE_KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 5}
"""The KIND of `widen_cached` for each one-byte cache dtype. 3 (of `widen`) and 4 are taken by forms of weights."""


def scale_of(scale: float | Tensor, kind: int, rows: Tensor | None) -> tuple[float, Tensor | None]:
    """The scale of a whole cache, and the scales of its heads: [num_kv_heads] float32, or None if they have none.

    Returns (1.0, None) for a cache without scales (kind 0) or with a scale per row (`rows`)."""
    if not kind or rows is not None:
        return 1.0, None
    return (1.0, scale) if isinstance(scale, Tensor) else (scale, None)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a @ b in float32. The interpreter keeps bfloat16 as raw bits and would multiply those."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def sequence_of_tile(query_start, num_seqs, index, TOKENS: tl.constexpr):
    """The sequence of a tile of TOKENS tokens, tiles being numbered as if each sequence ended with one that is not
    full; num_seqs - 1 for tiles beyond the last."""
    # Loads that wait for none but themselves: halving would wait for one after the other.
    seq = -1
    for start in range(0, num_seqs, 128):
        seqs = start + tl.arange(0, 128)
        begins = tl.load(query_start + seqs, mask=seqs < num_seqs, other=0)
        seq += tl.sum(((seqs < num_seqs) & (begins // TOKENS + seqs <= index)).to(tl.int32), 0)
    return seq


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x float32 as `dtype`, to the nearest, even among two. The interpreter alone would cut bfloat16 off."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        kept = tl.where(is_nan, 0x7FC0, nearest)
        return kept.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def e4m3_of(x):
    """x float32, at most 448 in magnitude, as the byte of the nearest e4m3 (even among two): as `Tensor.to` does."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    # Below 2 ** -6 codes are multiples of 2 ** -9; adding 2 ** 23 rounds to a whole one.
    small = (tl.abs(x) * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) & 0xF
    return (sign | tl.where(magnitude < 0x3C800000, small, normal)).to(tl.uint8)


@triton.jit
def e5m2_of(x):
    """x float32, at most 57344 in magnitude, as the byte of the nearest e5m2 (even among two): as `Tensor.to` does."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    normal = ((magnitude + 0xFFFFF + ((magnitude >> 21) & 1)) >> 21) - 448
    # Below 2 ** -14 codes are multiples of 2 ** -16; adding 2 ** 23 rounds to a whole one.
    small = (tl.abs(x) * 65536.0 + 8388608.0).to(tl.uint32, bitcast=True) & 0x7
    return (sign | tl.where(magnitude < 0x38800000, small, normal)).to(tl.uint8)


@triton.jit
def int8_of(x):
    """x float32, at most 127 in magnitude, to the nearest integer, even among two."""
    # Adding 1.5 * 2 ** 23 leaves no room for a fraction.
    return (x + 12582912.0 - 12582912.0).to(tl.int8)


@triton.jit
def tanh(x):
    """1 - 2 / (1 + e^2x)."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))


@triton.jit
def ordered(x):
    """float32 as int32 of the same order; both zeros are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """What `ordered` took."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def widen(stored, dtype: tl.constexpr, KIND: tl.constexpr):
    """Stored values as `dtype`, without their scale. KIND: 0 as stored, 1 int8, 2 e4m3 (bytes), 3 e4m3 in hardware."""
    if KIND == 1:
        return stored.to(tl.float32).to(dtype)
    elif KIND == 2:
        # An e4m3's bits are a float16's with the exponent off by 8: 2 ** 8 times smaller, subnormals included.
        bits = ((stored & 0x80).to(tl.uint16) << 8) | ((stored & 0x7F).to(tl.uint16) << 7)
        return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(dtype)
    elif KIND == 3:
        return stored.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(dtype)
    else:
        return stored.to(dtype)


@triton.jit
def widen_cached(stored, dtype: tl.constexpr, KIND: tl.constexpr):
    """As `widen`, of a cache's: KIND 5 is e5m2, the upper byte of a float16."""
    if KIND == 5:
        return (stored.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(dtype)
    else:
        return widen(stored, dtype, KIND)
