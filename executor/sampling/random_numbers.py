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

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB
RARE_NOISE = 9.0
"""One token in 8000 draws more."""
RARE_WORD = int(math.exp(-math.exp(-RARE_NOISE + 1e-3)) * 2.0**64)
"""Every word below it gives less noise than RARE_NOISE, by a margin that covers rounding."""


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


def draw(logits: np.ndarray, key: np.uint64, steps: np.ndarray) -> int:
    """The token whose logit plus noise is highest, on the host: the same as an argmax over `gumbel_noise`.

    logits: [vocab_size] float32; steps: `token_steps(vocab_size)`. Needs logarithms for a few tokens only: one far
    below the likeliest can win by rare noise alone, and whether its noise is rare shows in its word.
    """
    drawn = mix(steps + key)
    likeliest = int(logits.argmax())
    score_to_beat = logits[likeliest] + _noise(drawn[likeliest])
    contenders = np.flatnonzero((logits > score_to_beat - RARE_NOISE) | (drawn >= np.uint64(RARE_WORD)))
    if not contenders.size:  # the logits are not finite
        return likeliest
    return int(contenders[(logits[contenders] + _noise(drawn[contenders])).argmax()])


def uniform(seed: int, position: int) -> float:
    """Of a row at a position, between 0 and 1, and independent of the noise of all tokens: `u` of token id 2**32."""
    key = row_keys(np.array([seed], np.uint64), np.array([position]))
    word = mix(key + np.uint64(GOLDEN * ((1 << 32) + 1) % (1 << 64)))
    return (int(word[0]) >> 12) * 2.0**-52 + 2.0**-53


def token_steps(vocab_size: int) -> np.ndarray:
    """[vocab_size] uint64: what a row's key is advanced by for each token."""
    return np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(GOLDEN)


def words(keys: Tensor, token_ids: Tensor) -> Tensor:
    """The generator's 64-bit words as int64 (torch lacks most unsigned arithmetic; the bits are the same).

    keys: [num_rows, 1] int64, the bits of `row_keys`; token_ids: [num_tokens] or [num_rows, num_tokens] int64.
    Returns [num_rows, num_tokens] int64.
    """
    bits = keys + (token_ids + 1) * _signed(GOLDEN)
    bits ^= _shifted(bits, 30)
    bits *= _signed(FIRST_FACTOR)
    bits ^= _shifted(bits, 27)
    bits *= _signed(SECOND_FACTOR)
    bits ^= _shifted(bits, 31)
    return bits


def gumbel_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """[num_rows, num_tokens] float64 noise; arguments as for `words`."""
    uniform = _shifted(words(keys, token_ids), 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_()


def _noise(drawn: np.ndarray) -> np.ndarray:
    """Noise of words, float64."""
    return -np.log(-np.log(((drawn >> np.uint64(12)) + 0.5) * 2.0**-52))


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _shifted(bits: Tensor, count: int) -> Tensor:
    """Logical shift: int64's own would copy the sign bit in."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)
