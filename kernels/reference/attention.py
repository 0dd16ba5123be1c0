"""Attention over a paged key/value cache, in torch: causal, or to all tokens of a sequence.

Sequences that compute one token are batched by similar length. The others run one by one in tiles of queries, which
bounds the size of a mask. Blocks are gathered as rows of the cache viewed as [num_blocks * num_kv_heads,
block_size * head_dim].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_TILE_TOKENS = 256
BIAS_PADDING = 64
"""Elements beyond the largest distances that kernels may read (`kBiasPadding` in kernels/cpu/attention/attention.h)."""
PADDING_SLACK = 1.25
"""Sequences share a batch while the longest has at most this many times the blocks of the shortest, plus one."""
MAX_GATHER_ROWS = 1 << 16
"""Limit on the rows (one block of one head) that are gathered at once, which bounds the copy's memory."""


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """The attention metadata of one step, shared by all layers of a cache group."""

    query_start: Tensor
    """[num_seqs + 1] int32: sequence i computes tokens query_start[i] .. query_start[i + 1] - 1"""
    seq_lens: Tensor
    """[num_seqs] int32: tokens in the context, including those of this step; 0 for padding"""
    block_tables: Tensor
    """[num_seqs, max_blocks] int32"""
    slot_mapping: Tensor
    """[num_tokens] int64: block * block_size + offset of each token's key and value; negative for padding"""
    block_size: int
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)
    """Values that a kernel derives from the batch once and reuses in every layer; they live as long as the batch."""
    max_query_len: int | None = None
    """A bound, known on the host, on the tokens that any one sequence computes; None if unknown. With 1 a GPU launches
    no kernel for prompts."""
    key_lens: Tensor | None = None
    """[num_seqs] int32: to how many of a sequence's first tokens all attend, where attention is not causal; None: to
    all. A token whose window has none of these gets zeros."""

    @cached_property
    def query_starts(self) -> list[int]:
        return self.query_start.tolist()

    @cached_property
    def context_lens(self) -> list[int]:
        return self.seq_lens.tolist()

    @cached_property
    def last_keys(self) -> list[int]:
        return (self.seq_lens if self.key_lens is None else self.key_lens).tolist()


class SinkRows(NamedTuple):
    """Keys and values that every token attends to besides those of its context."""

    keys: Tensor  # [num_sinks, num_kv_heads, head_dim] float32
    values: Tensor  # the same


@dataclass(frozen=True)
class AttentionParams:
    scale: float
    sliding_window: int | None = None
    """A token attends to itself and the sliding_window - 1 tokens before it and, if not causal, after it."""
    soft_cap: float | None = None
    """Scores become soft_cap * tanh(score / soft_cap)."""
    batch_invariant: bool = False
    """Asks a GPU for a summation order that depends neither on the rest of the batch nor on a prompt's chunks."""
    sinks: Tensor | None = None
    """[num_heads] float32: attention sinks, the score of an extra token whose value is 0."""
    sink_tokens: SinkRows | None = None
    alibi: Tensor | None = None
    """[num_heads] float32: ALiBi slopes (Press et al. 2022): a score loses slope * distance of key and query."""
    alibi_root: bool = False
    """Whether a score loses slope * the root of the distance instead."""
    grow_after: int | None = None
    """The scores of tokens at positions p beyond it grow, after the cap, by log(p) / log(grow_after)."""
    causal: bool = True
    """False: a token attends to the tokens after it too, as far as they are in the cache after this step."""
    distance_bias: Tensor | None = None
    """[num_heads, 2 * reach] float32: value reach + (key position - query position) is added to a score. The first and
    last BIAS_PADDING values are of distances that must not occur."""


@dataclass(frozen=True)
class CacheScales:
    """The scales of an int8, e4m3 or e5m2 cache: one for the layer, one per head, or (dynamic) one per row, which the
    cache write computes. A row is one token's vector of one head."""

    key: float | Tensor = 1.0  # [num_kv_heads] float32
    value: float | Tensor = 1.0  # [num_kv_heads] float32
    keys: Tensor | None = None  # [num_blocks, num_kv_heads, block_size] float32
    values: Tensor | None = None  # [num_blocks, num_kv_heads, block_size] float32


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    scales: CacheScales | None = None,
) -> Tensor:
    """Each token attends to its sequence's cached keys up to its own position or, if not causal, to all of them. The
    step's own are already written.

    query [num_tokens, num_heads, head_dim]; caches [num_blocks, num_kv_heads, block_size, head_dim], in query's dtype
    or, with `scales`, in int8, float8_e4m3fn or float8_e5m2. Query head h reads key/value head
    h // (num_heads / num_kv_heads). Returns [num_tokens, num_heads, head_dim] in query's dtype. Sums are accumulated
    in float32. Slots beyond a sequence's length never affect the result, even if they hold NaN. The tokens of a
    sequence of length 0 are padding and get zeros.
    """
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    keys, values = _caches(query.dtype, key_cache, value_cache, scales)
    key = ("plan", key_cache.shape[1], params.sliding_window)
    if key not in batch.memo:
        batch.memo[key] = _plan(batch, key_cache.shape[1], params.sliding_window)
    groups, prompts = batch.memo[key]
    for group in groups:
        _attend_decodes(query, keys, values, group, params, out)
    for prompt in prompts:
        _attend_prompt(query, keys, values, prompt, params, out)
    return out


@dataclass(frozen=True, eq=False)
class _DecodeGroup:
    """Sequences of similar length that compute one token each. `length` is a whole number of blocks."""

    tokens: Tensor  # [n] int64, rows of query
    rows: Tensor  # [n * num_kv_heads * num_blocks] int64, rows of the cache viewed as [blocks * heads, -1]
    visible: Tensor  # [n, length] bool
    tail_start: int
    """The first column that lies beyond the end of some sequence of the group."""
    tail_unwritten: Tensor  # [n, 1, length - tail_start, 1] bool
    distances: Tensor  # [n, length] int64: key position - query position, at most 0 where the key is visible
    positions: Tensor  # [n, 1] int64, of the queries


@dataclass(frozen=True, eq=False)
class _Prompt:
    """A sequence that computes several tokens, at positions start .. start + num_tokens - 1."""

    first_token: int
    num_tokens: int
    start: int
    end: int
    """One more than the position of the last key."""
    first_position: int
    """The position of the first gathered key."""
    rows: Tensor  # [num_kv_heads * num_blocks] int64


def _plan(batch: PagedBatch, num_kv_heads: int, window: int | None) -> tuple[list[_DecodeGroup], list[_Prompt]]:
    starts, lens, size = batch.query_starts, batch.context_lens, batch.block_size
    spans = []  # (number of blocks, sequence, first block) of the sequences with one token
    prompts = []
    heads = torch.arange(num_kv_heads, device=batch.block_tables.device)[:, None]
    for seq, context_len in enumerate(lens):
        num_tokens = starts[seq + 1] - starts[seq]
        if context_len == 0:
            continue
        first_visible = max(0, context_len - num_tokens - window + 1) if window is not None else 0
        first_block, end_block = first_visible // size, -(-context_len // size)
        if num_tokens == 1:
            spans.append((end_block - first_block, seq, first_block))
        elif num_tokens > 1:
            blocks = batch.block_tables[seq, first_block:end_block].long()
            rows = (blocks * num_kv_heads + heads).reshape(-1)
            start = context_len - num_tokens
            prompts.append(_Prompt(starts[seq], num_tokens, start, batch.last_keys[seq], first_block * size, rows))
    spans.sort()
    groups: list[_DecodeGroup] = []
    while spans:
        longest = int(spans[0][0] * PADDING_SLACK) + 1
        count = 1
        while count < len(spans) and spans[count][0] <= longest:
            if (count + 1) * spans[count][0] * num_kv_heads > MAX_GATHER_ROWS:
                break
            count += 1
        groups.append(_decode_group(batch, spans[:count], num_kv_heads, window))
        del spans[:count]
    return groups, prompts


def _decode_group(
    batch: PagedBatch, spans: list[tuple[int, int, int]], num_kv_heads: int, window: int | None
) -> _DecodeGroup:
    device = batch.block_tables.device
    num_blocks, size = spans[-1][0], batch.block_size
    seqs = torch.tensor([seq for _, seq, _ in spans], device=device)
    first = torch.tensor([first for _, _, first in spans], device=device)[:, None]
    lens = batch.seq_lens.long()[seqs][:, None]
    columns = first + torch.arange(num_blocks, device=device)
    # A sequence shorter than the group gathers its own last block again, so that masked columns are still its own.
    columns = torch.minimum(columns, (lens - 1) // size)
    blocks = batch.block_tables.long()[seqs].gather(1, columns)
    heads = torch.arange(num_kv_heads, device=device)
    rows = (blocks[:, None, :] * num_kv_heads + heads[:, None]).reshape(-1)

    positions = first * size + torch.arange(num_blocks * size, device=device)
    written = positions < lens
    visible = written if window is None else written & (positions >= lens - window)
    tail_start = int((lens - first * size).min())
    return _DecodeGroup(
        tokens=batch.query_start.long()[seqs],
        rows=rows,
        visible=visible,
        tail_start=tail_start,
        tail_unwritten=~written[:, None, tail_start:, None],
        distances=positions - (lens - 1),
        positions=lens - 1,
    )


@dataclass(frozen=True, eq=False)
class _Cache:
    """A layer's cache of keys or of values, with the dtype and scales for reading it."""

    stored: Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    dtype: torch.dtype
    scale: float | Tensor  # [num_kv_heads] float32
    row_scales: Tensor | None  # [num_blocks, num_kv_heads, block_size] float32

    @property
    def num_kv_heads(self) -> int:
        return self.stored.shape[1]


def _caches(
    dtype: torch.dtype, key_cache: Tensor, value_cache: Tensor, scales: CacheScales | None
) -> tuple[_Cache, _Cache]:
    scales = scales or CacheScales()
    return (_Cache(key_cache, dtype, scales.key, scales.keys), _Cache(value_cache, dtype, scales.value, scales.values))


def _gather(cache: _Cache, rows: Tensor, *shape: int) -> Tensor:
    """Gathers and dequantises rows of the cache: [*shape, length, head_dim] in `cache.dtype`."""
    num_blocks, num_kv_heads, block_size, head_dim = cache.stored.shape
    flat = cache.stored.view(num_blocks * num_kv_heads, block_size * head_dim)
    if flat.dtype.itemsize == 1:
        flat = flat.view(torch.uint8)  # not every device can gather float8, but all can gather bytes
    found = flat.index_select(0, rows).view(*shape, -1, head_dim)
    if cache.stored.dtype == cache.dtype:
        return found
    wide = found.view(cache.stored.dtype).float()
    if cache.row_scales is not None:
        factors = cache.row_scales.view(num_blocks * num_kv_heads, block_size).index_select(0, rows)
    elif isinstance(cache.scale, Tensor):
        factors = cache.scale[rows % num_kv_heads, None].expand(-1, block_size).contiguous()
    else:
        return (wide * cache.scale).to(cache.dtype)
    return (wide * factors.view(*shape, -1, 1)).to(cache.dtype)


def gather_tokens(
    dtype: torch.dtype, cache: Tensor, scales: CacheScales | None, batch: PagedBatch, sequence: int
) -> Tensor:
    """A sequence's whole context from a cache of one head: [context length, head_dim] in `dtype`."""
    length = batch.context_lens[sequence]
    blocks = batch.block_tables[sequence, : -(-length // batch.block_size)].long()
    return _gather(_caches(dtype, cache, cache, scales)[0], blocks, 1)[0, :length]


def gather_heads(
    dtype: torch.dtype,
    key_cache: Tensor,
    value_cache: Tensor,
    scales: CacheScales | None,
    batch: PagedBatch,
    sequence: int,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """A sequence's keys and values from position `first` on, which begins a block: each [num_kv_heads, context length -
    first, head_dim] in `dtype`."""
    length, num_kv_heads = batch.context_lens[sequence], key_cache.shape[1]
    blocks = batch.block_tables[sequence, first // batch.block_size : -(-length // batch.block_size)].long()
    rows = (blocks * num_kv_heads + torch.arange(num_kv_heads, device=blocks.device)[:, None]).reshape(-1)
    keys, values = (
        _gather(each, rows, num_kv_heads)[:, : length - first]
        for each in _caches(dtype, key_cache, value_cache, scales)
    )
    return keys, values


def _attend_decodes(
    query: Tensor, key_cache: _Cache, value_cache: _Cache, group: _DecodeGroup, params: AttentionParams, out: Tensor
) -> None:
    count, num_kv_heads = len(group.tokens), key_cache.num_kv_heads
    _, num_heads, head_dim = query.shape
    q = query.index_select(0, group.tokens).view(count, num_kv_heads, num_heads // num_kv_heads, head_dim)
    keys = _gather(key_cache, group.rows, count, num_kv_heads)  # [count, num_kv_heads, length, head_dim]
    values = _gather(value_cache, group.rows, count, num_kv_heads)
    if group.tail_start < keys.shape[2]:
        # An unwritten slot may hold NaN from an earlier request, and 0 * NaN would spoil the sum.
        keys[:, :, group.tail_start :].masked_fill_(group.tail_unwritten, 0)
        values[:, :, group.tail_start :].masked_fill_(group.tail_unwritten, 0)
    sinks = None if params.sinks is None else params.sinks.view(num_kv_heads, -1, 1)
    bias = _bias(params, group.distances, num_kv_heads)
    bias = None if bias is None else bias.permute(2, 0, 1, 3)
    growth = _growth(params, group.positions[:, :, None, None])
    visible = group.visible[:, None, None, :]
    keys, values, visible = _with_sinks(params, keys, values, visible, by_head=1)
    attended = _attend(q, keys, values, visible, params, sinks, bias, growth)
    out.index_copy_(0, group.tokens, attended.reshape(count, num_heads, head_dim))


def _attend_prompt(
    query: Tensor, key_cache: _Cache, value_cache: _Cache, prompt: _Prompt, params: AttentionParams, out: Tensor
) -> None:
    num_kv_heads = key_cache.num_kv_heads
    _, num_heads, head_dim = query.shape
    span = slice(prompt.first_token, prompt.first_token + prompt.num_tokens)
    per_head = (prompt.num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    q = query[span].reshape(per_head).permute(1, 2, 0, 3)  # [num_kv_heads, group, num_tokens, head_dim]
    into = out[span].view(per_head).permute(1, 2, 0, 3)
    end = prompt.end
    keys = _gather(key_cache, prompt.rows, num_kv_heads, 1)[:, :, : end - prompt.first_position]
    values = _gather(value_cache, prompt.rows, num_kv_heads, 1)[:, :, : end - prompt.first_position]
    sinks = None if params.sinks is None else params.sinks.view(num_kv_heads, -1, 1, 1)
    is_plain = params.soft_cap is None and sinks is None and params.alibi is None and params.distance_bias is None
    is_plain = is_plain and params.grow_after is None and params.sink_tokens is None
    if prompt.start == 0 and params.sliding_window is None and is_plain:
        keys, values = keys.expand(-1, q.shape[1], -1, -1), values.expand(-1, q.shape[1], -1, -1)
        into.copy_(F.scaled_dot_product_attention(q, keys, values, is_causal=params.causal, scale=params.scale))
        return
    for tile in range(0, prompt.num_tokens, QUERY_TILE_TOKENS):
        tile_end = min(tile + QUERY_TILE_TOKENS, prompt.num_tokens)
        low = prompt.first_position
        if params.sliding_window is not None:
            low = min(max(low, prompt.start + tile - params.sliding_window + 1), end - 1)
        at = torch.arange(prompt.start + tile, prompt.start + tile_end, device=query.device)[:, None]
        high = prompt.start + tile_end if params.causal else end
        positions = torch.arange(low, high, device=query.device)
        visible = positions <= at if params.causal else torch.ones_like(positions - at, dtype=torch.bool)
        if params.sliding_window is not None:
            visible &= (positions - at).abs() < params.sliding_window
        columns = slice(low - prompt.first_position, high - prompt.first_position)
        bias = _bias(params, positions - at, num_kv_heads)
        read = _with_sinks(params, keys[:, :, columns], values[:, :, columns], visible, by_head=0)
        attended = _attend(q[:, :, tile:tile_end], *read, params, sinks, bias, _growth(params, at))
        into[:, :, tile:tile_end] = attended.masked_fill(~visible.any(1)[:, None], 0)  # see `key_lens`


def _bias(params: AttentionParams, distances: Tensor, num_kv_heads: int) -> Tensor | None:
    """What is added to scores: [num_kv_heads, heads of each, *distances.shape]. distances: key - query position."""
    if params.distance_bias is not None:
        reach = params.distance_bias.shape[1] // 2
        return params.distance_bias[:, reach + distances].unflatten(0, (num_kv_heads, -1))
    if params.alibi is None:
        return None
    lengths = distances.abs().sqrt() if params.alibi_root else distances.abs()
    return -params.alibi.view(num_kv_heads, -1, 1, 1) * lengths


def _with_sinks(
    params: AttentionParams, keys: Tensor, values: Tensor, visible: Tensor, by_head: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values with those of the sinks before them, and what is visible of them. by_head: the dimension of keys
    and values that counts heads, 0 or 1."""
    if params.sink_tokens is None:
        return keys, values, visible
    sinks = (each.transpose(0, 1).unsqueeze(1 - by_head).to(keys.dtype) for each in params.sink_tokens)
    keys, values = (
        torch.cat([sink.expand(*each.shape[:2], -1, -1), each], dim=2)
        for sink, each in zip(sinks, (keys, values), strict=True)
    )
    seen = torch.ones(len(params.sink_tokens.keys), dtype=torch.bool, device=visible.device)
    return keys, values, torch.cat([seen.expand(*visible.shape[:-1], -1), visible], dim=-1)


def _growth(params: AttentionParams, positions: Tensor) -> Tensor | None:
    """Factors of scores after the cap; None: 1. positions: of the queries."""
    if params.grow_after is None:
        return None
    return positions.clamp(min=params.grow_after).float().log() / math.log(params.grow_after)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    params: AttentionParams,
    sinks: Tensor | None,
    bias: Tensor | None,
    growth: Tensor | None,
) -> Tensor:
    """Attention over gathered keys and values, as one call of torch where no cap, sinks, bias or growth forbid it.

    query [a, b, m, d], keys and values [a, 1 or b, n, d], visible and bias broadcastable to [a, b, m, n], sinks and
    growth to [a, b, m, 1] -> [a, b, m, d]."""
    if params.soft_cap is None and sinks is None and bias is None and growth is None:
        heads = query.shape[1]
        keys, values = keys.expand(-1, heads, -1, -1), values.expand(-1, heads, -1, -1)
        if visible.dim() == 2:
            visible = visible[None, None]
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=params.scale)
    scores = query.float() @ keys.float().transpose(-1, -2) * params.scale
    if params.soft_cap is not None:
        scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
    if growth is not None:
        scores = scores * growth
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[-2]]
    return (weights @ values.float()).to(query.dtype)


REFERENCES: Mapping[str, Callable[..., Any]] = MappingProxyType({"paged_attention": paged_attention})
