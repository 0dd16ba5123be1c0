"""The counter-based generator against SplitMix64's published outputs and a scalar definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scalar_noise import GOLDEN, MASK, scalar_noise, scalar_word

from headrace.executor.sampling.random_numbers import draw, gumbel_noise, row_keys, token_steps, words


def test_the_generator_is_splitmix64() -> None:
    # The first two outputs that SplitMix64's published test program prints for the seed 1234567.
    keys = row_keys(np.array([1234567, 1234567], np.uint64), np.array([0, 1]))
    assert keys.tolist() == [6457827717110365317, 3203168211198807973]


def test_tensor_words_and_noise_equal_the_scalar_definition_bit_for_bit() -> None:
    seeds = np.array([0, 1, (1 << 63) + 5, MASK], np.uint64)
    positions = np.array([0, 7, 4095, 1_000_000], np.int32)
    tokens = torch.tensor([0, 1, 255, 49_151, 262_143])
    keys = torch.from_numpy(row_keys(seeds, positions).view(np.int64))[:, None]
    found = words(keys, tokens).numpy().view(np.uint64)
    noise = gumbel_noise(keys, tokens)
    for i, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        for j, token in enumerate(tokens.tolist()):
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
    keys = torch.from_numpy(np.array([[key]], np.uint64).view(np.int64))
    assert float(gumbel_noise(keys, torch.tensor([0]))) == pytest.approx(expected, rel=1e-12)


def shaped_logits(shape: str, num_rows: int, vocab_size: int) -> torch.Tensor:
    spread = {"flat": 0.0, "usual": 3.0, "steep": 40.0, "peak": 0.1}[shape]
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(11)) * spread
    if shape == "peak":
        logits[:, 7] = math.log(vocab_size) + 1.5  # far above each other token, not above all of them together
    return logits


@pytest.mark.parametrize("shape", ["flat", "usual", "steep", "peak"])
def test_the_short_cut_on_the_host_draws_what_all_the_noise_would(shape: str) -> None:
    vocab_size, num_rows = 20_000, 100
    logits = shaped_logits(shape, num_rows, vocab_size)
    keys = row_keys(np.arange(num_rows, dtype=np.uint64), np.full(num_rows, 5))
    noise = gumbel_noise(torch.from_numpy(keys.view(np.int64))[:, None], torch.arange(vocab_size))
    drawn = [draw(row.numpy(), key, token_steps(vocab_size)) for row, key in zip(logits, keys, strict=True)]
    assert drawn == (logits + noise).argmax(1).tolist()
    if shape == "peak":
        won_by_rare_noise = sum(token != 7 for token in drawn)
        assert 5 < won_by_rare_noise < 50
