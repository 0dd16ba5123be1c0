"""Attention to keys, or to blocks of keys, that an index chooses, in torch (DeepSeek-V3.2, section 2.1; MiniMax M3;
GLM 5.3).

Index queries score the index keys of the context: each head's product, cut off at 0, times the query's weight of the
head, summed over the heads. A query attends to the `num_chosen` keys with the highest scores; of equal ones, to the
first. Contexts of at most num_chosen tokens are attended to whole.

With pools, the index keys of pool_size neighbouring tokens are first averaged, each dimension with weights of its own,
and of the pools that end at or before a query those with the highest scores are attended to, and always the tokens
after the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.low_rank import AdaptedTokens
from headrace.kernels.reference.attention import QUERY_TILE_TOKENS
from headrace.kernels.reference.compressed import compress
from headrace.kernels.reference.latent import LatentUp, TorchLatentDeltas, absorb, project_values


def choose_keys(queries: Tensor, weights: Tensor, keys: Tensor, num_chosen: int) -> Tensor:
    """The keys that each of a sequence's last tokens attends to.

    queries [num_tokens, heads, index_dim], weights [num_tokens, heads], keys [length, index_dim] -> [num_tokens,
    length] bool; true for num_chosen keys at most, none of which is after its token."""
    return highest_scores(queries, weights, keys, _ends(len(queries), len(keys), keys.device), num_chosen)


def highest_scores(queries: Tensor, weights: Tensor, keys: Tensor, counts: Tensor, num_chosen: int) -> Tensor:
    """As `choose_keys`, where a token may choose among the first `counts` of the keys: [num_tokens] int64."""
    columns = torch.arange(len(keys), device=keys.device)
    if len(keys) <= num_chosen:
        return columns < counts[:, None]
    chosen = torch.zeros(len(queries), len(keys), dtype=torch.bool, device=keys.device)
    head_weights = weights.float() * (queries.shape[1] * queries.shape[2]) ** -0.5
    for first in range(0, len(queries), QUERY_TILE_TOKENS):
        tile = slice(first, first + QUERY_TILE_TOKENS)
        products = torch.einsum("thd,kd->thk", queries[tile].float(), keys.float()).relu_()
        scores = torch.einsum("thk,th->tk", products, head_weights[tile])
        scores.masked_fill_(columns >= counts[tile, None], -torch.inf)
        order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :num_chosen]
        chosen[tile] = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, value=True)
        chosen[tile] &= columns < counts[tile, None]
    return chosen


def _ends(num_tokens: int, length: int, device: torch.device) -> Tensor:
    """How many tokens each of a sequence's last ones may attend to: [num_tokens] int64."""
    return torch.arange(length - num_tokens + 1, length + 1, device=device)


def choose_pools(
    queries: Tensor, weights: Tensor, keys: Tensor, logits: Tensor, bias: Tensor, num_chosen: int
) -> Tensor:
    """As `choose_keys`, in pools; keys, logits [length, index_dim]; bias [pool_size, index_dim] float32: added to the
    logits of a pool's tokens, in order; num_chosen: tokens of pools."""
    size, ends = len(bias), _ends(len(queries), len(keys), keys.device)
    pools = highest_scores(
        queries, weights, compress(keys, logits, bias, overlap=False), ends // size, num_chosen // size
    )
    return _with_last(pools, ends, len(keys), size)


def choose_means(queries: Tensor, pool_keys: Tensor, length: int, pool_size: int, num_pools: int) -> Tensor:
    """As `choose_pools`, by the keys of pools, [length // pool_size, index_dim], and with equal weights of heads."""
    ends, weights = _ends(len(queries), length, queries.device), queries.new_ones(queries.shape[:2])
    pools = highest_scores(queries, weights, pool_keys, ends // pool_size, num_pools)
    return _with_last(pools, ends, length, pool_size)


def _with_last(pools: Tensor, ends: Tensor, length: int, size: int) -> Tensor:
    """The tokens of the chosen pools, [num_tokens, pools] bool, and those after the last pool that ends at or before a
    token: [num_tokens, length] bool."""
    columns = torch.arange(length, device=pools.device)
    chosen = (columns < ends[:, None]) & (columns >= (ends // size * size)[:, None])
    chosen[:, : pools.shape[1] * size] |= pools.repeat_interleave(size, 1)
    return chosen


def attend_chosen(
    query: Tensor, up: LatentUp, context: Tensor, chosen: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Attention of a sequence's last tokens. query [num_tokens, num_heads, nope_dim + rope_dim], the last dimensions
    rotated; context [length, latent_dim + rope_dim]; chosen [num_tokens, length] bool; sinks [num_heads] float32, as of
    `AttentionParams` -> [num_tokens, num_heads, value_dim]"""
    return project_values(_attended(absorb(query, up), context, chosen, scale, sinks), up)


def attend_chosen_adapted(
    query: Tensor,
    up: LatentUp,
    context: Tensor,
    chosen: Tensor,
    scale: float,
    sinks: Tensor | None,
    deltas: TorchLatentDeltas,
    adapters: AdaptedTokens,
) -> Tensor:
    """As `attend_chosen`, of all tokens with their adapters."""
    attended = _attended(deltas.absorbed(query, up, adapters), context, chosen, scale, sinks)
    return deltas.projected(attended, up, adapters)


def _attended(queries: Tensor, context: Tensor, chosen: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """queries [num_tokens, num_heads, latent_dim + rope_dim] -> as queries"""
    parts = []
    for first in range(0, len(queries), QUERY_TILE_TOKENS):
        tile = slice(first, first + QUERY_TILE_TOKENS)
        visible, read = chosen[tile], context
        if len(visible) == 1:
            read, visible = context[visible[0]], visible[:, visible[0]]
        scores = torch.einsum("thd,kd->thk", queries[tile], read).float() * scale
        scores.masked_fill_(~visible[:, None], -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None].expand(len(scores), -1, 1)], dim=-1)
        shares = scores.softmax(-1)[..., : len(read)].to(read.dtype)
        parts.append(torch.einsum("thk,kd->thd", shares, read))
    return torch.cat(parts)


def choose_blocks(queries: Tensor, keys: Tensor, block_size: int, num_chosen: int, num_local: int) -> Tensor:
    """The blocks of keys that each of a sequence's last tokens attends to (MiniMax M3): those with the highest scores,
    a block's score being that of its best key, and always the last `num_local` ones; of equal ones, the first.

    queries [num_tokens, heads, index_dim], keys [length, index_dim] -> [num_tokens, heads, blocks] bool"""
    (num_tokens, heads, _), length = queries.shape, len(keys)
    num_blocks = -(-length // block_size)
    chosen = torch.zeros(num_tokens, heads, num_blocks, dtype=torch.bool, device=keys.device)
    columns = torch.arange(num_blocks * block_size, device=keys.device)
    padded = F.pad(keys.float(), (0, 0, 0, len(columns) - length))
    local = torch.arange(num_local, device=keys.device)
    for first in range(0, num_tokens, QUERY_TILE_TOKENS):
        tile = slice(first, min(first + QUERY_TILE_TOKENS, num_tokens))
        positions = columns[length - num_tokens : length][tile]
        scores = torch.einsum("thd,kd->thk", queries[tile].float(), padded)
        scores.masked_fill_((columns > positions[:, None])[:, None], -torch.inf)
        of_blocks = scores.unflatten(-1, (num_blocks, block_size)).amax(-1)
        own = (positions[:, None] // block_size - local).clamp(min=0)[:, None].expand(-1, heads, -1)
        of_blocks.scatter_(-1, own, torch.inf)
        order = of_blocks.sort(dim=-1, descending=True, stable=True).indices[..., :num_chosen]
        chosen[tile] = torch.zeros_like(of_blocks, dtype=torch.bool).scatter_(-1, order, value=True)
        chosen[tile] &= of_blocks > -torch.inf
    return chosen


def attend_blocks(query: Tensor, keys: Tensor, values: Tensor, chosen: Tensor, block_size: int, scale: float) -> Tensor:
    """Attention of a sequence's last tokens. query [num_tokens, heads, head_dim]; keys and values [kv_heads, length,
    head_dim]; chosen [num_tokens, index heads, blocks] -> as query"""
    (num_tokens, heads, _), (kv_heads, length, _) = query.shape, keys.shape
    columns, parts = torch.arange(length, device=keys.device), []
    for first in range(0, num_tokens, QUERY_TILE_TOKENS):
        tile = slice(first, min(first + QUERY_TILE_TOKENS, num_tokens))
        visible = chosen[tile].repeat_interleave(block_size, -1)[..., :length]
        visible &= columns <= columns[length - num_tokens :][tile][:, None, None]
        visible = visible.repeat_interleave(heads // visible.shape[1], 1).unflatten(1, (kv_heads, -1))
        grouped = query[tile].unflatten(1, (kv_heads, -1))
        scores = torch.einsum("thgd,hkd->thgk", grouped, keys).float() * scale
        shares = scores.masked_fill_(~visible, -torch.inf).softmax(-1).to(values.dtype)
        parts.append(torch.einsum("thgk,hkd->thgd", shares, values).flatten(1, 2))
    return torch.cat(parts)


REFERENCES: Mapping[str, Callable[..., Any]] = MappingProxyType({})
"""None: they are parts of ops that `executor/models/eager_sparse.py` computes."""
