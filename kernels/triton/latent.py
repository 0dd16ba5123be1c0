"""Latent attention (DeepSeek-V2, section 2.1) over a paged cache, in the absorbed form: all heads attend to one vector
per token, whose first part is the value too, so that a tile is read once for both products and for many heads.

The expanded form is not used: the host would have to wait for the device to learn the lengths of prompts.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# Functions under triton.jit handle types that mypy does not know.

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.reference.attention import AttentionParams, CacheScales, PagedBatch
from headrace.kernels.reference.latent import LatentUp, absorb, project_values
from headrace.kernels.triton import configs
from headrace.kernels.triton.attention import E4M3_IN_HARDWARE, LOG2_E, combine
from headrace.kernels.triton.attention_parts import SoftmaxParts, num_parts_for
from headrace.kernels.triton.common import CACHE_KINDS, dot, scale_of, sequence_of_tile, widen_cached
from headrace.kernels.triton.configs import latent_tiles, power_of_two

HEADS_AT_ONCE = 16
"""Heads of one token in a tile, one per row; tensor cores need at least 16 rows."""


def latent_attention(
    query: Tensor,
    up: LatentUp,
    cache: Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    scales: CacheScales | None = None,
) -> Tensor:
    """As `reference.latent_attention`. The keys of sequences of one token are divided among programs, as in
    `paged_attention`; unless `batch.max_query_len` is 1, a second launch computes the prompts."""
    absorbed = absorb(query, up)
    num_tokens, num_heads, _ = absorbed.shape
    num_seqs, latent_dim = len(batch.seq_lens), up.keys.shape[2]
    # Zeros, since nothing is written for sequences without context.
    out = torch.zeros((num_tokens, num_heads, latent_dim), dtype=query.dtype, device=query.device)
    if num_seqs == 0:
        return project_values(out, up)
    device = configs.device_of(query)
    launch = _Launch(absorbed, cache, batch, params, scales or CacheScales(), latent_dim)
    groups = -(-num_heads // HEADS_AT_ONCE)
    num_parts = num_parts_for(device, num_seqs * groups)
    parts = SoftmaxParts.empty(out, num_seqs, num_parts) if num_parts > 1 else None
    tiles = latent_tiles(device, latent_dim, query.element_size(), decode=True)
    launch((num_seqs, groups, num_parts), tiles, out, parts, decode=True)
    if parts is not None:
        combine(out, parts, batch, launch.value_scale)
    if batch.max_query_len != 1:
        tiles = latent_tiles(device, latent_dim, query.element_size(), decode=False)
        num_tiles = num_tokens // (tiles.block_m // HEADS_AT_ONCE) + num_seqs
        launch((num_tiles, groups, 1), tiles, out, None, decode=False)
    return project_values(out, up)


class _Launch:
    """The arguments of the kernel that do not depend on the division of the work."""

    def __init__(
        self,
        query: Tensor,
        cache: Tensor,
        batch: PagedBatch,
        params: AttentionParams,
        scales: CacheScales,
        latent_dim: int,
    ) -> None:
        if not cache.is_contiguous():
            raise ValueError("the cache of a layer must be contiguous")
        kind, block_size = CACHE_KINDS.get(cache.dtype, 0), cache.shape[2]
        if kind > CACHE_KINDS[torch.int8]:
            cache = cache.view(torch.uint8)
        if kind == CACHE_KINDS[torch.float8_e4m3fn] and configs.device_of(query).has_fp8:
            kind = E4M3_IN_HARDWARE
        has_rows, rope_dim = scales.keys is not None and kind != 0, query.shape[2] - latent_dim
        self.value_scale, value_heads = scale_of(scales.value, kind, scales.keys)
        key_scale, key_heads = scale_of(scales.key, kind, scales.keys)
        assert key_heads is value_heads is None, "all heads share one vector of a token, and one scale"
        self._query, self._cache, self._batch, self._scales = query, cache, batch, scales
        self._score_scale = params.scale * key_scale * LOG2_E
        self._shape: dict[str, Any] = {
            "NUM_HEADS": query.shape[1],
            "LATENT": latent_dim,
            "ROPE": rope_dim,
            "BLOCK_L": max(16, power_of_two(latent_dim)),
            "BLOCK_R": max(16, power_of_two(rope_dim)),
            "HEADS": HEADS_AT_ONCE,
            "BLOCK_SIZE": block_size,
            "KIND": kind,
            "ROW_SCALES": has_rows,
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        }

    def __call__(
        self, grid: tuple[int, int, int], tiles: configs.Tiles, out: Tensor, parts: SoftmaxParts | None, *, decode: bool
    ) -> None:
        batch = self._batch
        latent_kernel[grid](
            out,
            None if parts is None else parts.values,
            None if parts is None else parts.stats,
            self._query,
            self._cache,
            self._scales.keys,
            self._scales.values,
            batch.block_tables,
            batch.seq_lens,
            batch.query_start,
            len(batch.seq_lens),
            self._score_scale,
            self.value_scale,
            self._query.stride(0),
            batch.block_tables.stride(0),
            self._cache.stride(0),
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            DECODE=decode,
            PARTS=parts is not None,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            **self._shape,
        )


@triton.jit(do_not_specialize=["num_seqs", "table_stride"])
def latent_kernel(
    out,  # [num_tokens, NUM_HEADS, LATENT]
    parts,  # [num_seqs, NUM_HEADS, programs, LATENT] float32: not normalised
    part_stats,  # [num_seqs, NUM_HEADS, programs, 2] float32: maximum in base 2, sum
    query,  # [num_tokens, NUM_HEADS, LATENT + ROPE]
    cache,  # [num_blocks, 1, BLOCK_SIZE, LATENT + ROPE]
    key_scales,  # [num_blocks, 1, BLOCK_SIZE] float32 with ROW_SCALES
    value_scales,
    block_tables,  # [num_seqs, table_stride]
    seq_lens,  # [num_seqs]
    query_start,  # [num_seqs + 1]
    num_seqs,
    score_scale,
    value_scale,
    query_stride,
    table_stride,
    block_stride,
    NUM_HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_R: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KIND: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    DECODE: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of a sequence's tokens and HEADS of their heads: row r is token r // HEADS and head r % HEADS of it.

    DECODE: grid (num_seqs, head groups, programs), a sequence of one token, its tiles of keys divided evenly. Otherwise
    grid (bound on the tiles, head groups, 1): see `sequence_of_tile`.
    """
    TOKENS: tl.constexpr = 1 if DECODE else BLOCK_M // HEADS
    VECTOR: tl.constexpr = LATENT + ROPE
    if DECODE:
        seq = tl.program_id(0)
    else:
        # The last tiles see most keys, so they begin first.
        index = tl.num_programs(0) - 1 - tl.program_id(0)
        seq = sequence_of_tile(query_start, num_seqs, index, TOKENS)
    begin = tl.load(query_start + seq)
    num_queries = tl.load(query_start + seq + 1) - begin
    context_len = tl.load(seq_lens + seq)
    first_query = 0
    if not DECODE:
        first_query = (index - begin // TOKENS - seq) * TOKENS
    if (num_queries != 1) if DECODE else (num_queries <= 1) | (first_query >= num_queries):
        return
    rows = tl.arange(0, BLOCK_M)
    tokens = rows // HEADS
    heads = tl.program_id(1) * HEADS + rows % HEADS
    in_row = (tokens < TOKENS) & (first_query + tokens < num_queries) & (heads < NUM_HEADS)
    token_rows = tokens.to(tl.int64) + begin + first_query
    positions = context_len - num_queries + first_query + tl.where(in_row, tokens, 0)
    values = tl.arange(0, BLOCK_L)
    rotated = tl.arange(0, BLOCK_R)
    sources = query + (token_rows * query_stride + heads * VECTOR)[:, None]
    q = tl.load(sources + values[None, :], mask=in_row[:, None] & (values < LATENT)[None, :], other=0)
    q_rotated = tl.load(sources + LATENT + rotated[None, :], mask=in_row[:, None] & (rotated < ROPE)[None, :], other=0)

    last = tl.minimum(context_len - num_queries + first_query + TOKENS, context_len) - 1
    first_tile = 0
    end_tile = tl.cdiv(tl.maximum(last, -1) + 1, BLOCK_N)
    if PARTS:
        each = tl.cdiv(end_tile, tl.num_programs(2))
        first_tile = tl.program_id(2) * each
        end_tile = tl.minimum(end_tile, first_tile + each)
    running_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    running_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_L], tl.float32)
    table_row = block_tables + seq.to(tl.int64) * table_stride
    for tile in range(first_tile, end_tile):
        at = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        # Other slots may hold NaN, which a weight of zero would not hide.
        written = at < context_len
        blocks = tl.load(table_row + at // BLOCK_SIZE, mask=written, other=0).to(tl.int64)
        slots = at % BLOCK_SIZE
        vectors = cache + (blocks * block_stride + slots * VECTOR)[:, None]
        stored = tl.load(vectors + values[None, :], mask=written[:, None] & (values < LATENT)[None, :], other=0)
        keys = widen_cached(stored, q.dtype, KIND)
        stored_rotated = tl.load(
            vectors + LATENT + rotated[None, :], mask=written[:, None] & (rotated < ROPE)[None, :], other=0
        )
        scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        scores = dot(q, tl.trans(keys), scores, PRECISION)
        scores = dot(q_rotated, tl.trans(widen_cached(stored_rotated, q.dtype, KIND)), scores, PRECISION)
        if ROW_SCALES:
            scores *= tl.load(key_scales + blocks * BLOCK_SIZE + slots, mask=written, other=0.0)[None, :]
        visible = (at[None, :] <= positions[:, None]) & written[None, :]
        scores = tl.where(visible, scores * score_scale, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1))
        # A row may have seen nothing yet: subtracting -inf from itself would make it NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(running_max - shift)
        running_sum = running_sum * decay + tl.sum(weights, 1)
        if ROW_SCALES:
            weights *= tl.load(value_scales + blocks * BLOCK_SIZE + slots, mask=written, other=0.0)[None, :]
        acc = dot(weights.to(q.dtype), keys, acc * decay[:, None], PRECISION)
        running_max = new_max

    in_tile = in_row[:, None] & (values < LATENT)[None, :]
    if PARTS:
        part = (seq.to(tl.int64) * NUM_HEADS + heads) * tl.num_programs(2) + tl.program_id(2)
        tl.store(parts + part[:, None] * LATENT + values[None, :], acc, mask=in_tile)
        tl.store(part_stats + part * 2, running_max, mask=in_row)
        tl.store(part_stats + part * 2 + 1, running_sum, mask=in_row)
    else:
        total = tl.where(running_sum > 0, running_sum, 1.0)
        result = acc * (value_scale / total)[:, None]
        target = out + ((token_rows * NUM_HEADS + heads) * LATENT)[:, None] + values[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=in_tile)
