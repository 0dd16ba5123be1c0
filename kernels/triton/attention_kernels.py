"""Paged attention on the GPU: one tile of queries against a range of keys, and the ways to divide the work.

The online softmax of Milakov and Gimelshein (2018) in base 2, as FlashAttention uses it (Dao et al., 2022): the score's
scale holds log2(e). Query heads that share a key/value head are packed into one tile, row r being token r // GROUP and
head r % GROUP of it, so that keys are read once for all of them (Ainslie et al., 2023).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# What triton.jit compiles has types of its own.

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.triton.combine_kernels import merge
from headrace.kernels.triton.common_kernels import dot


@triton.jit
def widen(stored, dtype: tl.constexpr, KIND: tl.constexpr):
    """Cache values as `dtype`, without their scale. KIND: 0 as stored, 1 int8, 2 e4m3 (bytes), 3 e4m3 in hardware."""
    if KIND == 1:
        return stored.to(tl.float32).to(dtype)
    elif KIND == 2:
        # An e4m3's bits are a float16's with the exponent off by 8: 2 ** 8 times smaller, subnormals included.
        bits = ((stored & 0x80).to(tl.uint16) << 8) | ((stored & 0x7F).to(tl.uint16) << 7)
        return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(dtype)
    elif KIND == 3:
        return stored.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(dtype)
    else:
        return stored.to(dtype)


@triton.jit
def attend_range(
    running_max,  # [BLOCK_M] float32, base 2
    running_sum,  # [BLOCK_M] float32
    acc,  # [BLOCK_M, BLOCK_D] float32, not normalised
    q,  # [BLOCK_M, BLOCK_D]
    positions,  # [BLOCK_M] int32: each row's own position in its sequence
    first_tile,  # tiles of BLOCK_N keys, counted from the start of the sequence
    end_tile,
    context_len,
    head,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    table_row,  # the sequence's row of the block tables
    score_scale,
    soft_cap,
    window,
    block_stride,
    head_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KIND: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds keys [first_tile * BLOCK_N, end_tile * BLOCK_N) to the running softmax. Unless MASKED, all are visible."""
    dims = tl.arange(0, BLOCK_D)
    in_head = dims < HEAD_DIM
    # Up to there nobody sees a key. It may be another sequence's by now.
    hidden = tl.min(positions, 0) - window
    for tile in range(first_tile, end_tile):
        at = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        if MASKED:
            written = at < context_len
            if WINDOW:
                written &= at > hidden
            blocks = tl.load(table_row + at // BLOCK_SIZE, mask=written, other=0)
        else:
            blocks = tl.load(table_row + at // BLOCK_SIZE)
        slots = at % BLOCK_SIZE
        rows = blocks.to(tl.int64) * block_stride + head * head_stride + slots * HEAD_DIM
        elements = rows[:, None] + dims[None, :]
        # What is not masked need not be compared: one kernel serves padded heads and whole ones.
        if MASKED:
            # Other slots may hold NaN, which a weight of zero would not hide.
            stored_keys = tl.load(key_cache + elements, mask=written[:, None] & in_head[None, :], other=0)
            stored_values = tl.load(value_cache + elements, mask=written[:, None] & in_head[None, :], other=0)
        elif HEAD_DIM != BLOCK_D:
            stored_keys = tl.load(key_cache + elements, mask=in_head[None, :], other=0)
            stored_values = tl.load(value_cache + elements, mask=in_head[None, :], other=0)
        else:
            stored_keys = tl.load(key_cache + elements)
            stored_values = tl.load(value_cache + elements)
        keys = widen(stored_keys, q.dtype, KIND)
        scores = dot(q, tl.trans(keys), tl.zeros([q.shape[0], BLOCK_N], tl.float32), PRECISION)
        if ROW_SCALES:
            scale_rows = (rows - slots * HEAD_DIM) // HEAD_DIM + slots
            if MASKED:
                scores *= tl.load(key_scales + scale_rows, mask=written, other=0.0)[None, :]
            else:
                scores *= tl.load(key_scales + scale_rows)[None, :]
        # The last factor, which is positive, waits: it is applied to a row's maximum and within the exponent's one
        # fused operation, so each score costs a multiplication less.
        factor = score_scale
        if SOFT_CAP:
            # score_scale holds scale / cap here, and tanh(x) = 1 - 2 / (1 + e^2x).
            scores = 1.0 - 2.0 / (1.0 + tl.exp2(scores * (score_scale * 2.8853900817779268)))
            factor = soft_cap * 1.4426950408889634
        if MASKED:
            visible = (at[None, :] <= positions[:, None]) & written[None, :]
            if WINDOW:
                visible &= at[None, :] > positions[:, None] - window
            scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(running_max, tl.max(scores, 1) * factor)
        if MASKED:
            # A row may have seen nothing yet: subtracting -inf from itself would make it NaN.
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        else:
            shift = new_max
        # Fused by name: left to the compiler, masked and full tiles might round differently, and what is in which
        # depends on the batch.
        weights = tl.exp2(tl.fma(scores, factor, -shift[:, None]))
        decay = tl.exp2(running_max - shift)
        running_sum = running_sum * decay + tl.sum(weights, 1)
        if ROW_SCALES:
            if MASKED:
                weights *= tl.load(value_scales + scale_rows, mask=written, other=0.0)[None, :]
            else:
                weights *= tl.load(value_scales + scale_rows)[None, :]
        values = widen(stored_values, q.dtype, KIND)
        acc = dot(weights.to(q.dtype), values, acc * decay[:, None], PRECISION)
        running_max = new_max
    return running_max, running_sum, acc


@triton.jit(do_not_specialize=["num_seqs", "num_parts", "window", "table_stride"])
def attend_kernel(
    out,  # [num_tokens, num_heads, HEAD_DIM], or None where there are parts
    parts,  # [num_seqs, num_heads, num_parts, HEAD_DIM] float32: not normalised
    part_stats,  # [num_seqs, num_heads, num_parts, 2] float32: maximum in base 2, sum
    query,  # [num_tokens, num_heads, HEAD_DIM]
    key_cache,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    value_cache,
    key_scales,  # [num_blocks, num_kv_heads, BLOCK_SIZE] float32 with ROW_SCALES
    value_scales,
    block_tables,  # [num_seqs, table_stride]
    seq_lens,  # [num_seqs]
    query_start,  # [num_seqs + 1]
    num_seqs,
    num_parts,
    score_scale,
    value_scale,
    soft_cap,
    window,
    query_stride,
    out_stride,
    table_stride,
    block_stride,
    head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    KIND: tl.constexpr,
    ROW_SCALES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    DECODE: tl.constexpr,
    PARTS: tl.constexpr,
    SKIP_DECODES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of queries of one sequence and key/value head.

    DECODE: grid (num_seqs, NUM_KV_HEADS, programs); a sequence of one token, its keys divided into parts: into
    `programs` of them evenly, or, where SPLIT_TILES is set, one for each SPLIT_TILES tiles. Otherwise: grid (bound on
    the tiles, NUM_KV_HEADS), tiles being numbered as if each sequence ended with one that is not full.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(1)
    if DECODE:
        seq = tl.program_id(0)
        begin = tl.load(query_start + seq)
        num_queries = tl.load(query_start + seq + 1) - begin
        context_len = tl.load(seq_lens + seq)  # before the branch, so that one wait serves all three
        if num_queries != 1:
            return
        first_query = 0
    else:
        # The last tiles see most keys, so they begin first.
        index = tl.num_programs(0) - 1 - tl.program_id(0)
        # Loads that wait for none but themselves: halving would wait for one after the other.
        seq = -1
        for start in range(0, num_seqs, 128):
            seqs = start + tl.arange(0, 128)
            begins = tl.load(query_start + seqs, mask=seqs < num_seqs, other=0)
            seq += tl.sum(((seqs < num_seqs) & (begins // TOKENS + seqs <= index)).to(tl.int32), 0)
        begin = tl.load(query_start + seq)
        num_queries = tl.load(query_start + seq + 1) - begin
        context_len = tl.load(seq_lens + seq)
        first_query = (index - begin // TOKENS - seq) * TOKENS
        if first_query >= num_queries:
            return
        if SKIP_DECODES and num_queries == 1:
            return
    first_position = context_len - num_queries + first_query
    table_row = block_tables + seq.to(tl.int64) * table_stride

    rows = tl.arange(0, BLOCK_M)
    tokens = rows // GROUP
    heads = head * GROUP + rows % GROUP
    dims = tl.arange(0, BLOCK_D)
    in_row = (tokens < TOKENS) & (first_query + tokens < num_queries)
    in_tile = in_row[:, None] & (dims < HEAD_DIM)[None, :]
    token_rows = tokens.to(tl.int64) + begin + first_query
    sources = query + token_rows[:, None] * query_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(sources, mask=in_tile, other=0)
    positions = first_position + tl.where(in_row, tokens, 0)

    # Tiles that any row sees are [low_tile, high_tile); those that every row sees whole are [full_low, full_high).
    last_position = tl.minimum(first_position + TOKENS, context_len) - 1
    low_tile = 0
    high_tile = tl.cdiv(tl.maximum(last_position, -1) + 1, BLOCK_N)
    full_low = 0
    full_high = tl.maximum(first_position + 1, 0) // BLOCK_N
    if WINDOW:
        low_tile = tl.maximum(low_tile, (first_position - window + 1) // BLOCK_N)
        full_low = tl.maximum(low_tile, tl.cdiv(tl.maximum(last_position - window + 1, 0), BLOCK_N))
    full_high = tl.maximum(full_high, full_low)

    none_seen = tl.full([BLOCK_M], float("-inf"), tl.float32)
    nothing = tl.zeros([BLOCK_M], tl.float32)
    empty = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    running_max, running_sum, acc = none_seen, nothing, empty

    # A share is what one running softmax sees: everything, one of num_parts, or SPLIT_TILES tiles.
    if SPLIT_TILES:
        share_tiles = SPLIT_TILES
        first_share = low_tile // SPLIT_TILES
        end_share = tl.cdiv(high_tile, SPLIT_TILES)
        step = 1
        if PARTS:
            step = tl.num_programs(2)
            first_share += (tl.program_id(2) - first_share % step + step) % step
        origin = 0
    else:
        first_share = 0
        end_share = 1
        step = 1
        share_tiles = high_tile - low_tile
        if PARTS:
            share_tiles = tl.maximum(tl.cdiv(high_tile - low_tile, tl.num_programs(2)), 1)
            first_share = tl.program_id(2)
            end_share = first_share + 1
        origin = low_tile
    for share in range(first_share, end_share, step):
        share_low = tl.maximum(origin + share * share_tiles, low_tile)
        share_high = tl.minimum(origin + (share + 1) * share_tiles, high_tile)
        share_max, share_sum, share_acc = none_seen, nothing, empty
        middle_low = tl.minimum(tl.maximum(full_low, share_low), share_high)
        middle_high = tl.minimum(tl.maximum(full_high, middle_low), share_high)
        if DECODE:
            # Waiting for memory anyway, it masks every tile: a loop of its own for the last would first have to fill
            # the pipeline again, in all programs at the same time.
            middle_low = share_low
            middle_high = share_low
        elif WINDOW:
            share_max, share_sum, share_acc = attend_range(
                share_max, share_sum, share_acc, q, positions, share_low, middle_low, context_len, head,
                key_cache, value_cache, key_scales, value_scales, table_row, score_scale, soft_cap, window,
                block_stride, head_stride, HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, KIND, ROW_SCALES, SOFT_CAP, WINDOW,
                True, PRECISION,
            )  # fmt: skip
        if not DECODE:
            share_max, share_sum, share_acc = attend_range(
                share_max, share_sum, share_acc, q, positions, middle_low, middle_high, context_len, head,
                key_cache, value_cache, key_scales, value_scales, table_row, score_scale, soft_cap, window,
                block_stride, head_stride, HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, KIND, ROW_SCALES, SOFT_CAP, WINDOW,
                False, PRECISION,
            )  # fmt: skip
        share_max, share_sum, share_acc = attend_range(
            share_max, share_sum, share_acc, q, positions, middle_high, share_high, context_len, head,
            key_cache, value_cache, key_scales, value_scales, table_row, score_scale, soft_cap, window,
            block_stride, head_stride, HEAD_DIM, BLOCK_D, BLOCK_N, BLOCK_SIZE, KIND, ROW_SCALES, SOFT_CAP, WINDOW,
            True, PRECISION,
        )  # fmt: skip
        if PARTS:
            part = (seq.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads) * num_parts + share
            tl.store(parts + part[:, None] * HEAD_DIM + dims[None, :], share_acc, mask=in_tile)
            tl.store(part_stats + part * 2, share_max, mask=in_row)
            tl.store(part_stats + part * 2 + 1, share_sum, mask=in_row)
        elif SPLIT_TILES:
            running_max, running_sum, acc = merge(running_max, running_sum, acc, share_max, share_sum, share_acc)
        else:
            running_max, running_sum, acc = share_max, share_sum, share_acc
    if not PARTS:
        total = tl.where(running_sum > 0, running_sum, 1.0)
        result = acc * (value_scale / total)[:, None]
        target = out + token_rows[:, None] * out_stride + heads[:, None] * HEAD_DIM + dims[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=in_tile)
