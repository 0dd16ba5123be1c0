"""The sampler's random numbers computed from their definition, one at a time with Python's integers."""

from __future__ import annotations

import math

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def scalar_mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def scalar_word(seed: int, position: int, token: int) -> int:
    key = scalar_mix((seed + GOLDEN * (position + 1)) & MASK)
    return scalar_mix((key + GOLDEN * (token + 1)) & MASK)


def scalar_noise(seed: int, position: int, token: int) -> float:
    uniform = ((scalar_word(seed, position, token) >> 12) + 0.5) * 2.0**-52
    return -math.log(-math.log(uniform))
