"""Rotary frequencies for every scaling kind, and the cos and sin of a step's tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace.executor.models.arch import RopeSpec
from headrace.executor.step.inputs import StepInputs


def inverse_frequencies(rope: RopeSpec) -> Tensor:
    """[rotary_dim / 2] float32, radians per position; for `dynamic`, those of contexts up to the original length."""
    base = 1.0 / rope.theta ** (_exponents(rope))
    if rope.kind == "none":
        return torch.zeros_like(base)
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "proportional":
        turns = torch.arange(rope.rotary_dim // 2) < rope.turned_dim // 2
        return base / rope.factor * turns
    if rope.kind == "llama3":
        return _llama3(rope, base)
    if rope.kind == "yarn":
        return _yarn(rope, base)
    if rope.kind == "longrope":
        return base / torch.tensor(rope.divisors)
    return base


def _exponents(rope: RopeSpec) -> Tensor:
    return torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / (rope.spread_dim or rope.rotary_dim)


def _llama3(rope: RopeSpec, base: Tensor) -> Tensor:
    """Long wavelengths are stretched, short ones kept, those between interpolated (Llama 3.1's reference code)."""
    wavelength = 2 * math.pi / base
    span = rope.high_freq_factor - rope.low_freq_factor
    above = rope.original_max_positions / wavelength - rope.low_freq_factor
    keep = (above / span).clamp(0, 1) if span else (above > 0).float()  # Llama 4's thresholds are one
    return (1 - keep) * base / rope.factor + keep * base


def _yarn(rope: RopeSpec, base: Tensor) -> Tensor:
    """NTK by parts (Peng et al. 2023, section 3.2)."""

    def dimension(rotations: float) -> float:
        """The index of the dimension that makes this many rotations over the original context."""
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return rope.rotary_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    span = high - low if high != low else 0.001
    stretch = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return base / rope.factor * stretch + base * (1 - stretch)


class Rotary:
    """One rotary spec on a device."""

    def __init__(self, rope: RopeSpec, device: torch.device) -> None:
        self._rope = rope
        self._frequencies = inverse_frequencies(rope).to(device)
        self._exponents = _exponents(rope).to(device)

    def cos_sin(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """cos and sin, each [num_tokens, rotary_dim / 2] float32."""
        frequencies = self._dynamic(inputs) if self._rope.kind == "dynamic" else self._frequencies
        angles = inputs.positions.float()[:, None] * frequencies
        scale = self._rope.attention_factor
        if scale == 1.0:  # saves a GPU two kernel launches per step
            return angles.cos(), angles.sin()
        return angles.cos() * scale, angles.sin() * scale

    def _dynamic(self, inputs: StepInputs) -> Tensor:
        """[num_tokens, rotary_dim / 2] frequencies, whose base grows with a context beyond the original (dynamic NTK).

        As in transformers, prompt tokens use the base for the prompt's length, and later tokens that for their own
        position. So frequencies depend on prompt length and position only, not on chunks or the rest of the batch.
        """
        rope = self._rope
        prompt_lens = inputs.seq_lens if inputs.prompt_lens is None else inputs.prompt_lens
        counts = (inputs.query_start[1:] - inputs.query_start[:-1]).long()
        num_tokens = len(inputs.positions)  # passed below, so that a GPU need not be synchronised
        repeated = prompt_lens.long().repeat_interleave(counts, output_size=num_tokens)
        length = torch.maximum(repeated, inputs.positions + 1)
        stretched = length.clamp(min=rope.original_max_positions).float() / rope.original_max_positions
        growth = (rope.factor * stretched - (rope.factor - 1)) ** (rope.rotary_dim / (rope.rotary_dim - 2))
        return 1.0 / (rope.theta * growth)[:, None] ** self._exponents
