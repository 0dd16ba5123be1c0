"""Bit masks of tokens, in the form that the ops on logits read."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_bits(flags: Tensor) -> Tensor:
    """Packs flags [num_rows, count] bool to [num_rows, ceil(count / 32)] int32, the inverse of `unpack_bits`."""
    missing = -flags.shape[1] % 32
    padded = torch.nn.functional.pad(flags, (0, missing)).unflatten(1, (-1, 32)).long()
    words = (padded << torch.arange(32, device=flags.device)).sum(-1)
    return torch.where(words >> 31 > 0, words - (1 << 32), words).int()
