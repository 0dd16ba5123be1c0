"""Attention whose scores have a bias that each token computes for each distance (Inkling): a bank of profiles over
distances, which a token mixes for each of its heads.

    score of a key d tokens before = scale * query . key + sum over profiles p of mix[p] * profiles[p, d]

Keys at least as far as the profiles reach have no bias.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.kernels.reference.attention import (
    QUERY_TILE_TOKENS,
    AttentionParams,
    CacheScales,
    PagedBatch,
    gather_heads,
)


class RelativeBias(NamedTuple):
    mixes: Tensor  # [num_tokens, num_heads, num_profiles] of any float type
    profiles: Tensor  # [num_profiles, reach] float32, by distance


def relative_attention(
    query: Tensor,
    bias: RelativeBias,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    scales: CacheScales | None = None,
) -> Tensor:
    """As `reference.attention.paged_attention`, with the bias; of the params, scale and sliding_window count."""
    out = torch.zeros_like(query)
    window = params.sliding_window
    for sequence, length in enumerate(batch.context_lens):
        first, last = batch.query_starts[sequence : sequence + 2]
        if not length:
            continue
        start = length - (last - first)  # the first token's position
        low = 0 if window is None else max(0, start - window + 1) // batch.block_size * batch.block_size
        keys, values = (
            each.float() for each in gather_heads(query.dtype, key_cache, value_cache, scales, batch, sequence, low)
        )
        for tile in range(first, last, QUERY_TILE_TOKENS):
            rows = slice(tile, min(tile + QUERY_TILE_TOKENS, last))
            at = torch.arange(rows.start, rows.stop, device=query.device) - first + start
            own = RelativeBias(bias.mixes[rows], bias.profiles)
            out[rows] = _attend(query[rows], own, keys, values, at, low, params)
    return out


def _attend(
    query: Tensor, bias: RelativeBias, keys: Tensor, values: Tensor, at: Tensor, low: int, params: AttentionParams
) -> Tensor:
    """Of the tokens at these positions, [m] int64. query [m, num_heads, head_dim]; keys, values [num_kv_heads, n,
    head_dim] float32, the first at position `low` -> [m, num_heads, head_dim]"""
    num_kv_heads, count, _ = keys.shape
    wide = query.float().transpose(0, 1).unflatten(0, (num_kv_heads, -1))
    scores = (wide @ keys[:, None].transpose(-1, -2)).flatten(0, 1) * params.scale  # [num_heads, m, n]
    distances = at[:, None] - (torch.arange(count, device=at.device) + low)  # [m, n]
    reach = bias.profiles.shape[1]
    by_distance = bias.mixes.float().transpose(0, 1) @ bias.profiles  # [num_heads, m, reach]
    places = distances.clamp(0, reach - 1).expand(len(scores), -1, -1)
    scores = scores + by_distance.gather(-1, places).masked_fill(distances >= reach, 0)
    hidden = distances < 0
    if params.sliding_window is not None:
        hidden |= distances >= params.sliding_window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1).unflatten(0, (num_kv_heads, -1))
    return (weights @ values[:, None]).flatten(0, 1).transpose(0, 1).to(query.dtype)


REFERENCES: Mapping[str, Callable[..., Any]] = MappingProxyType({"relative_attention": relative_attention})
