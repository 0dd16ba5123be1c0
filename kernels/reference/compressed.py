"""Attention to a window of keys and to entries that are computed of windows of tokens, in torch (DeepSeek-V4, section
2.3). Keys are values too.

    tokens      0 1 2 3 | 4 5 6 7 | 8 9 10          rate 4: the last window is not complete
    entries     0         1                         visible to tokens from 3, from 7
    overlapping entries are of the window before, too
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.reference.attention import QUERY_TILE_TOKENS
from headrace.kernels.reference.rotary_cache import rotary_interleaved


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates dimension 2i with 2i + 1 of the last ones: x [num_tokens, heads, size]; cos, sin [num_tokens, rotary_dim
    / 2] float32 -> as x"""
    size = 2 * cos.shape[-1]
    turned, _ = rotary_interleaved(x[..., -size:], x[:, :0], cos, sin)
    return torch.cat([x[..., :-size], turned], dim=-1)


def compress(values: Tensor, logits: Tensor, bias: Tensor, *, overlap: bool) -> Tensor:
    """The entries of a sequence's complete windows, before their norm: sums of the tokens' values, each dimension with
    weights of its own, the softmax over the window of logits + bias.

    values, logits [length, size], bias [rate, size] float32 -> [length // rate, size] float32. With `overlap`, each
    token's first half is of the window after its own, and its second half of its own: -> [length // rate, size / 2]"""
    rate, size = bias.shape
    count = len(values) // rate
    parts, weights = (each[: count * rate].float().unflatten(0, (count, rate)) for each in (values, logits))
    weights = weights + bias
    if overlap:
        half = size // 2
        before = parts.new_zeros(1, rate, half), weights.new_full((1, rate, half), -torch.inf)
        parts, weights = (
            torch.cat([torch.cat([first, each[:-1, :, :half]])[:count], each[..., half:]], dim=1)
            for first, each in zip(before, (parts, weights), strict=True)
        )
    return (weights.softmax(1) * parts).sum(1)


def attend_compressed(
    query: Tensor, keys: Tensor, entries: Tensor, chosen: Tensor, window: int, scale: float, sinks: Tensor
) -> Tensor:
    """Attention of a sequence's last tokens to the window of keys that ends with each, and to entries.

    query [num_tokens, heads, size]; keys [length, size]; entries [count, size]; chosen [num_tokens, count] bool; sinks
    [heads] float32, as of `AttentionParams` -> as query"""
    (num_tokens, heads, _), length = query.shape, len(keys)
    parts = []
    for first in range(0, num_tokens, QUERY_TILE_TOKENS):
        tile = query[first : first + QUERY_TILE_TOKENS]
        start = length - num_tokens + first
        low, high = max(0, start - window + 1), start + len(tile)
        at, columns = (torch.arange(*each, device=query.device) for each in ((start, high), (low, high)))
        visible = (columns <= at[:, None]) & (columns > at[:, None] - window)
        visible = torch.cat([visible, chosen[first : first + len(tile)]], dim=1)
        read = torch.cat([keys[low:high], entries.to(keys.dtype)])
        scores = torch.einsum("thd,kd->thk", tile, read).float() * scale
        scores = scores.masked_fill_(~visible[:, None], -torch.inf)
        scores = torch.cat([scores, sinks[:, None].expand(len(tile), heads, 1)], dim=-1)
        shares = scores.softmax(-1)[..., :-1].to(read.dtype)
        parts.append(torch.einsum("thk,kd->thd", shares, read))
    return torch.cat(parts)


REFERENCES: Mapping[str, Callable[..., Any]] = MappingProxyType({})
"""None: they are parts of ops that `executor/models/eager_compressed.py` computes."""
