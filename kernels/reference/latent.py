"""Latent attention (DeepSeek-V2, section 2.1) over a paged cache, in torch.

The cache holds one vector per token, shared by all heads: the compressed (latent) vector and, after it, the rotated
key. A head's keys and values are projections of the compressed vector. Two forms are mathematically equal:

    absorbed   queries and results are projected, and heads attend to the cached vectors directly
    expanded   the keys and values of the context are computed first, which pays off for long prompts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.low_rank import AdaptedTokens, LowRank, factors_of_heads
from headrace.kernels.reference.attention import (
    QUERY_TILE_TOKENS,
    AttentionParams,
    CacheScales,
    PagedBatch,
    gather_tokens,
    paged_attention,
)

EXPANDED_ELEMENTS = 1 << 24
"""Limit on the elements of keys and values that are expanded at once."""


@dataclass(frozen=True, eq=False)
class LatentUp:
    """A layer's up-projections, from the compressed vector to each head's keys and values."""

    keys: Tensor  # [num_heads, nope_dim, latent_dim]
    values: Tensor  # [num_heads, latent_dim, value_dim]

    @property
    def least_expanded(self) -> int:
        """The fewest tokens of a prompt for which the expanded form takes fewer multiplications than the absorbed."""
        (_, nope_dim, latent_dim), value_dim = self.keys.shape, self.values.shape[2]
        saved = 2 * latent_dim - nope_dim - value_dim
        return latent_dim * (nope_dim + value_dim) // saved + 1 if saved > 0 else 1 << 31


def latent_attention(
    query: Tensor,
    up: LatentUp,
    cache: Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    scales: CacheScales | None = None,
) -> Tensor:
    """Each token attends to its sequence's cached vectors up to its own position, which are already written.

    query [num_tokens, num_heads, nope_dim + rope_dim], the last rope_dim dimensions rotated; cache [num_blocks, 1,
    block_size, latent_dim + rope_dim], in a dtype that `paged_attention` accepts. Of `params` the scale and the sliding
    window are used, with which all queries are absorbed: soft caps, sinks and ALiBi are not supported.
    Returns [num_tokens, num_heads, value_dim] in query's dtype; padding gets zeros.
    """
    starts, lens, least = batch.query_starts, batch.context_lens, up.least_expanded
    long = [seq for seq, end in enumerate(lens) if end and starts[seq + 1] - starts[seq] >= least]
    if params.sliding_window is not None:  # what is before the window is no longer in the cache
        long = []
    out = torch.zeros(*query.shape[:2], up.values.shape[2], dtype=query.dtype, device=query.device)
    if len(long) < len(lens):
        short = without_sequences(batch, long) if long else batch
        out = project_values(paged_attention(absorb(query, up), cache, cache, short, params, scales), up)
    for seq in long:
        tokens = slice(starts[seq], starts[seq + 1])
        context = gather_tokens(query.dtype, cache, scales, batch, seq)
        out[tokens] = _expanded(query[tokens], up, context, params.scale)
    return out


def absorb(query: Tensor, up: LatentUp) -> Tensor:
    """Projects queries into the space of the cached vectors.

    query [num_tokens, num_heads, nope_dim + rope_dim] -> [num_tokens, num_heads, latent_dim + rope_dim]"""
    nope_dim = up.keys.shape[1]
    absorbed = torch.bmm(query[..., :nope_dim].transpose(0, 1), up.keys).transpose(0, 1)
    return torch.cat([absorbed, query[..., nope_dim:]], dim=-1)


def project_values(attended: Tensor, up: LatentUp) -> Tensor:
    """Projects attended vectors to values.

    attended [num_tokens, num_heads, at least latent_dim], the rest ignored -> [num_tokens, num_heads, value_dim]"""
    compressed = attended[..., : up.values.shape[1]]
    return torch.bmm(compressed.transpose(0, 1), up.values).transpose(0, 1)


class TorchLatentDeltas:
    """The adapters of a layer's up-projections, by slot, in float32. With one, K and V of a head become K + B A and
    V + B A, in the absorbed form."""

    def __init__(self, num_slots: int, nope_dim: int, value_dim: int, device: torch.device) -> None:
        self._sizes, self._device = (nope_dim, value_dim), device
        self._slots: list[LatentFactors | None] = [None] * num_slots

    def pack(self, delta: LowRank) -> LatentFactors:
        """delta: of the heads' rows. Raises ValueError for what cannot be computed."""
        return LatentFactors(delta.a.float(), *factors_of_heads(delta, *self._sizes))

    def put(self, slot: int, packed: LatentFactors | None) -> None:
        self._slots[slot] = None if packed is None else packed.to(self._device)

    def rows(self, adapters: AdaptedTokens) -> np.ndarray:
        """The tokens with an adapter that changes these projections."""
        held = [slot for slot, each in enumerate(self._slots) if each is not None]
        return np.flatnonzero(np.isin(adapters.slots, held).any(0))

    def attention(
        self,
        query: Tensor,
        up: LatentUp,
        cache: Tensor,
        batch: PagedBatch,
        params: AttentionParams,
        scales: CacheScales | None,
        adapters: AdaptedTokens,
    ) -> Tensor:
        """As `latent_attention`, of all tokens with their adapters."""
        attended = paged_attention(self.absorbed(query, up, adapters), cache, cache, batch, params, scales)
        return self.projected(attended, up, adapters)

    def absorbed(self, query: Tensor, up: LatentUp, adapters: AdaptedTokens) -> Tensor:
        """As `absorb`."""
        nope_dim, latent_dim = up.keys.shape[1:]
        found = absorb(query, up)
        for rows, scale, held in self._held(adapters):
            low = torch.einsum("nhd,hdr->nhr", query[rows][..., :nope_dim].float(), held.keys)
            added = found[rows][..., :latent_dim].float() + scale * (low @ held.a)
            found[rows, :, :latent_dim] = added.to(found.dtype)
        return found

    def projected(self, attended: Tensor, up: LatentUp, adapters: AdaptedTokens) -> Tensor:
        """As `project_values`."""
        latent_dim, out = up.keys.shape[2], project_values(attended, up)
        for rows, scale, held in self._held(adapters):
            low = attended[rows][..., :latent_dim].float() @ held.a.T
            added = out[rows].float() + scale * torch.einsum("nhr,hvr->nhv", low, held.values)
            out[rows] = added.to(out.dtype)
        return out

    def _held(self, adapters: AdaptedTokens) -> Iterator[tuple[np.ndarray, float, LatentFactors]]:
        for slot, scale, rows in adapters.groups():
            if (held := self._slots[slot]) is not None:
                yield rows, scale, held


@dataclass(frozen=True, eq=False)
class LatentFactors:
    """One adapter's part of a layer's up-projections."""

    a: Tensor  # [rank, latent_dim]
    keys: Tensor  # [num_heads, nope_dim, rank]: rows of B, scaled
    values: Tensor  # [num_heads, value_dim, rank]

    def to(self, device: torch.device) -> LatentFactors:
        return LatentFactors(self.a.to(device), self.keys.to(device), self.values.to(device))

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.keys.nbytes + self.values.nbytes


def without_sequences(batch: PagedBatch, sequences: list[int]) -> PagedBatch:
    """The batch with these sequences turned into padding."""
    key = ("latent", len(sequences))  # all layers of a model leave out the same sequences
    if key not in batch.memo:
        seq_lens = batch.seq_lens.clone()
        seq_lens[sequences] = 0
        batch.memo[key] = replace(batch, seq_lens=seq_lens, memo={})
    found: PagedBatch = batch.memo[key]
    return found


def _expanded(query: Tensor, up: LatentUp, context: Tensor, scale: float) -> Tensor:
    """The expanded form for one sequence, for as many heads at a time as EXPANDED_ELEMENTS allows.

    query [num_tokens, num_heads, head_dim] of the sequence's last tokens, context [length, latent_dim + rope_dim] ->
    [num_tokens, num_heads, value_dim]."""
    (num_tokens, num_heads, head_dim), length = query.shape, len(context)
    latent_dim, value_dim = up.values.shape[1:]
    compressed, rotated = context[:, :latent_dim], context[:, latent_dim:]
    start = length - num_tokens
    out = torch.empty(num_heads, num_tokens, value_dim, dtype=query.dtype, device=query.device)
    together = max(1, EXPANDED_ELEMENTS // (length * (head_dim + value_dim)))
    for first in range(0, num_heads, together):
        heads = slice(first, first + together)
        shared = rotated.expand(len(up.keys[heads]), -1, -1)
        keys = torch.cat([compressed @ up.keys[heads].transpose(1, 2), shared], dim=-1)
        values, q = compressed @ up.values[heads], query[:, heads].transpose(0, 1)
        for tile in range(0, num_tokens, QUERY_TILE_TOKENS):
            end = min(tile + QUERY_TILE_TOKENS, num_tokens)
            at = torch.arange(start + tile, start + end, device=query.device)[:, None]
            visible = torch.arange(start + end, device=query.device) <= at
            out[heads, tile:end] = F.scaled_dot_product_attention(
                q[None, :, tile:end], keys[None, :, : start + end], values[None, :, : start + end], visible, scale=scale
            )
    return out.transpose(0, 1)


REFERENCES: Mapping[str, Callable[..., Any]] = MappingProxyType({"latent_attention": latent_attention})
