"""Bits of tokens, as the ops on logits read them."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_bits(flags: Tensor) -> Tensor:
    """flags [num_rows, count] bool -> [num_rows, ceil(count / 32)] int32, as `unpack_bits` reads them."""
    missing = -flags.shape[1] % 32
    padded = torch.nn.functional.pad(flags, (0, missing)).unflatten(1, (-1, 32)).long()
    words = (padded << torch.arange(32, device=flags.device)).sum(-1)
    return torch.where(words >> 31 > 0, words - (1 << 32), words).int()
