"""Random numbers for sampling: pure functions of (seed, position, token id), so they need no state to carry along.

The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014)
used as a counter-based one. All arithmetic is on unsigned 64-bit words and wraps; `>>` shifts zeros in:

    mix(z):                z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9
                           z ^= z >> 27;  z *= 0x94D049BB133111EB
                           return z ^ (z >> 31)
    row_key                = mix(seed + GOLDEN * (position + 1))
    word(token)            = mix(row_key + GOLDEN * (token + 1))
    u(token)               = ((word >> 12) + 0.5) * 2**-52         float64, exact, 2**-53 <= u <= 1 - 2**-53
    noise(token)           = -log(-log(u))                         float64, standard Gumbel

`position` is the index in the sequence (prompt included) of the token being sampled. Every implementation of this
must give the same words bit for bit; float64 leaves its logarithms too exact for a different library to matter.

Adding this noise to logits and taking the argmax draws from their softmax (the Gumbel-max trick), and a token's
noise does not depend on which other tokens are candidates: masks and batches cannot shift the stream.
"""

from __future__ import annotations

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB


def mix(words: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser, element by element. words: any shape, uint64; the result is a new array."""
    words = words ^ (words >> np.uint64(30))
    words *= np.uint64(FIRST_FACTOR)
    words ^= words >> np.uint64(27)
    words *= np.uint64(SECOND_FACTOR)
    words ^= words >> np.uint64(31)
    return words


def row_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[num_rows] uint64 keys, from seeds [num_rows] uint64 and non-negative positions [num_rows] of any int type."""
    return mix(seeds + np.uint64(GOLDEN) * (positions.astype(np.uint64) + np.uint64(1)))


def uniform(seed: int, position: int) -> float:
    """A row's number between 0 and 1 at a position, independent of all tokens' noise: `u` of token id 2**32."""
    key = row_keys(np.array([seed], np.uint64), np.array([position]))
    word = mix(key + np.uint64(GOLDEN * ((1 << 32) + 1) % (1 << 64)))
    return (int(word[0]) >> 12) * 2.0**-52 + 2.0**-53
