"""vLLM's `experts_int8`: matrices of experts in 8 bits with a scale per row; other weights stay as stored.

It is not a checkpoint format: float weights are quantised while they load.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.executor.checkpoints.formats import AsLoaded, Stored
from headrace.kernels.grouped import GroupedWeight


def rows_of_8_bits(weight: Tensor) -> GroupedWeight:
    """weight [n, k] float32: a row's scale is its largest magnitude over 127."""
    largest = weight.abs().amax(1, keepdim=True)
    scales = torch.where(largest > 0, largest / 127, 1.0)
    codes = (weight / scales).round() + 128
    return GroupedWeight("int8", codes.to(torch.uint8), scales, weight.shape[1])


AS_LOADED = AsLoaded(
    name="experts_int8",
    roles=("expert",),
    group=None,
    bits=8,
    quantise=rows_of_8_bits,
    stored=Stored(
        "experts in 8 bits, a scale for each row; all else stays as it is",
        ("int8",),
        ("test_experts_become_8_bits_as_they_are_loaded",),
    ),
)
