"""The counter-based generator against SplitMix64's published outputs and a scalar definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scalar_noise import GOLDEN, MASK, scalar_noise, scalar_word

from headrace.executor.sampling.random_numbers import row_keys
from headrace.kernels.reference.sampling import gumbel_noise, random_words


def test_the_generator_is_splitmix64() -> None:
    # The first two outputs that SplitMix64's published test program prints for the seed 1234567.
    keys = row_keys(np.array([1234567, 1234567], np.uint64), np.array([0, 1]))
    assert keys.tolist() == [6457827717110365317, 3203168211198807973]


def test_tensor_words_and_noise_equal_the_scalar_definition_bit_for_bit() -> None:
    seeds = np.array([0, 1, (1 << 63) + 5, MASK], np.uint64)
    positions = np.array([0, 7, 4095, 1_000_000], np.int32)
    tokens = torch.tensor([[0, 1, 255, 49_151, 262_143]])
    rows = torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(positions)
    found = random_words(*rows, tokens).numpy().view(np.uint64)
    noise = gumbel_noise(*rows, tokens)
    for i, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        for j, token in enumerate(tokens[0].tolist()):
            assert int(found[i, j]) == scalar_word(seed, position, token)
            assert float(noise[i, j]) == pytest.approx(scalar_noise(seed, position, token), rel=1e-14)


def scalar_unmix(z: int) -> int:
    """The word that scalar_mix turns into z."""
    z ^= (z >> 31) ^ (z >> 62)
    z = (z * pow(0x94D049BB133111EB, -1, 1 << 64)) & MASK
    z ^= (z >> 27) ^ (z >> 54)
    z = (z * pow(0xBF58476D1CE4E5B9, -1, 1 << 64)) & MASK
    return z ^ (z >> 30) ^ (z >> 60)


@pytest.mark.parametrize(("word", "expected"), [(0, -math.log(53 * math.log(2))), (MASK, 53 * math.log(2))])
def test_noise_is_finite_at_both_ends_of_the_word(word: int, expected: float) -> None:
    key = (scalar_unmix(word) - GOLDEN) & MASK
    seed = np.array([(scalar_unmix(key) - GOLDEN) & MASK], np.uint64).view(np.int64)
    noise = gumbel_noise(torch.from_numpy(seed), torch.tensor([0]), torch.tensor([[0]]))
    assert float(noise) == pytest.approx(expected, rel=1e-12)
