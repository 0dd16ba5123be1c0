"""Paged attention: a kernel for one tile of queries over a range of keys, and the launches that divide the work.

It uses the online softmax of Milakov and Gimelshein (2018) in base 2, as in FlashAttention (Dao et al., 2022): the
scale of scores includes log2(e). Query heads that share a key/value head (Ainslie et al., 2023) are packed into one
tile, so that keys are read once for all of them: row r is token r // GROUP and head r % GROUP.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
# Functions under triton.jit handle types that mypy does not know.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.reference.attention import AttentionParams, CacheScales, PagedBatch
from headrace.kernels.triton import configs
from headrace.kernels.triton.attention_parts import FEW_PARTS, PARTS_AT_ONCE, SoftmaxParts, num_parts_for
from headrace.kernels.triton.common import CACHE_KINDS, dot, scale_of, sequence_of_tile, widen_cached
from headrace.kernels.triton.configs import (
    DeviceProperties,
    Tiles,
    decode_tiles,
    invariant_tiles,
    power_of_two,
    prefill_tiles,
)

LOG2_E = 1.4426950408889634
FIXED_SPLIT_TOKENS = 4096
"""Batch-invariant attention divides every context at multiples of this many tokens."""
E4M3_IN_HARDWARE = 3


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    scales: CacheScales | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `reference.attention.paged_attention`. out, if given, has query's shape and dtype; tokens may be strided.

    The keys of sequences of one token are divided among programs. The number of programs depends only on the device
    and the shapes, so that a captured launch serves every context. Unless `batch.max_query_len` is 1, a second launch
    computes the prompts. float32 is multiplied in float32, not in TF32.
    """
    launch = Launch(query, key_cache, value_cache, batch, params, scales)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    if params.batch_invariant:
        tiles = invariant_tiles(*launch.facts)
        launch.decodes(out, tiles, split_tiles=FIXED_SPLIT_TOKENS // tiles.block_n)
        if batch.max_query_len != 1:
            launch.prompts(out, tiles, split_tiles=FIXED_SPLIT_TOKENS // tiles.block_n)
        return out
    launch.decodes(out, decode_tiles(*launch.facts))
    if batch.max_query_len != 1:
        launch.prompts(out, prefill_tiles(*launch.facts))
    return out


class Launch:
    """The arguments of the kernels that do not depend on the division of the work."""

    def __init__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: PagedBatch,
        params: AttentionParams,
        scales: CacheScales | None,
    ) -> None:
        if query.stride(2) != 1 or query.stride(1) != query.shape[2]:
            query = query.contiguous()
        self.query, self.batch, self._sinks = query, batch, params.sinks
        _, num_heads, self.head_dim = query.shape
        self.num_kv_heads, block_size = key_cache.shape[1:3]
        self.num_heads, self.group = num_heads, num_heads // self.num_kv_heads
        self.device = configs.device_of(query)
        self._window = params.sliding_window or 0
        if not key_cache.is_contiguous() or not value_cache.is_contiguous():
            raise ValueError("the key and value caches of a layer must each be contiguous")
        scales = scales or CacheScales()
        kind = CACHE_KINDS.get(key_cache.dtype, 0)
        if kind > CACHE_KINDS[torch.int8]:
            key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
        if kind == CACHE_KINDS[torch.float8_e4m3fn] and self.device.has_fp8:
            kind = E4M3_IN_HARDWARE
        key_scale, key_heads = scale_of(scales.key, kind, scales.keys)
        self._value_scale, value_heads = scale_of(scales.value, kind, scales.values)
        unit = LOG2_E if params.soft_cap is None else 1.0 / params.soft_cap
        self._tensors = (query, key_cache, value_cache, scales.keys, scales.values, key_heads, value_heads)
        self._scalars = (params.scale * key_scale * unit, self._value_scale, params.soft_cap or 0.0, self._window)
        self._shape = {
            "NUM_KV_HEADS": self.num_kv_heads,
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": max(16, power_of_two(self.head_dim)),
            "BLOCK_SIZE": block_size,
            "KIND": kind,
            "ROW_SCALES": scales.keys is not None and kind != 0,
            "SOFT_CAP": params.soft_cap is not None,
            "WINDOW": params.sliding_window is not None,
            "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        }
        self._cache_strides = (key_cache.stride(0), key_cache.stride(1))

    @property
    def facts(self) -> tuple[DeviceProperties, int, int, int]:
        """The arguments of the tables of tiles: device, head_dim, group and itemsize."""
        return self.device, self.head_dim, self.group, self.query.element_size()

    def decodes(self, out: Tensor, tiles: Tiles, split_tiles: int = 0) -> None:
        """Computes sequences of one token. split_tiles: tiles of a part; 0 divides keys evenly among programs."""
        num_seqs = len(self.batch.seq_lens)
        if num_seqs == 0:
            return
        programs = num_parts = num_parts_for(self.device, num_seqs * self.num_kv_heads)
        if split_tiles:
            longest = self.batch.block_tables.shape[1] * self.batch.block_size
            num_parts = max(1, -(-longest // (split_tiles * tiles.block_n)))
            programs = min(num_parts, programs)
        parts = SoftmaxParts.empty(self.query, num_seqs, num_parts) if num_parts > 1 else None
        grid = (num_seqs, self.num_kv_heads, programs)
        self.attend(grid, tiles, out if parts is None else parts, SPLIT_TILES=split_tiles, DECODE=True)
        if parts is not None:
            self.combine(out, parts, split_tiles * tiles.block_n)

    def prompts(self, out: Tensor, tiles: Tiles, split_tiles: int = 0) -> None:
        """Computes sequences of several tokens. split_tiles: tiles of keys per running softmax; 0 for no limit."""
        num_tokens, num_seqs = len(self.query), len(self.batch.seq_lens)
        tokens_per_tile = tiles.block_m // self.group
        # Each sequence has at most one partial tile.
        grid = (num_tokens // tokens_per_tile + num_seqs, self.num_kv_heads, 1)
        self.attend(grid, tiles, out, SPLIT_TILES=split_tiles, SKIP_DECODES=True)

    def attend(
        self, grid: tuple[int, int, int], tiles: Tiles, into: Tensor | SoftmaxParts, **options: int | bool
    ) -> None:
        """Launches `attend_kernel`, into the result or into parts of it."""
        batch = self.batch
        has_parts = isinstance(into, SoftmaxParts)
        out, parts, stats = (None, into.values, into.stats) if isinstance(into, SoftmaxParts) else (into, None, None)
        flags = {"SPLIT_TILES": 0, "DECODE": False, "SKIP_DECODES": False, **options}
        has_most = has_parts and tiles.part_registers and not self._shape["KIND"]
        most = {"maxnreg": tiles.part_registers} if has_most else {}
        attend_kernel[grid](
            out,
            parts,
            stats,
            *self._tensors,
            self._sinks,
            batch.block_tables,
            batch.seq_lens,
            batch.query_start,
            len(batch.seq_lens),
            into.count if isinstance(into, SoftmaxParts) else 1,
            *self._scalars,
            self.query.stride(0),
            0 if out is None else out.stride(0),
            batch.block_tables.stride(0),
            *self._cache_strides,
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            PARTS=has_parts,
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
            **most,
            **self._shape,
            **flags,
        )

    def combine(self, out: Tensor, parts: SoftmaxParts, split_tokens: int = 0) -> None:
        """Merges the parts of sequences of one token into out."""
        combine(out, parts, self.batch, self._value_scale, self._window, self._sinks, split_tokens)


def combine(
    out: Tensor,
    parts: SoftmaxParts,
    batch: PagedBatch,
    value_scale: float = 1.0,
    window: int = 0,
    sinks: Tensor | None = None,
    split_tokens: int = 0,
) -> None:
    """Merges the parts of sequences of one token into out [num_tokens, num_heads, head_dim]."""
    (_, num_heads, head_dim), is_few = out.shape, split_tokens > 0 or parts.count <= FEW_PARTS
    combine_kernel[(len(batch.seq_lens), num_heads)](
        out,
        parts.values,
        parts.stats,
        sinks,
        batch.seq_lens,
        batch.query_start,
        parts.count,
        value_scale,
        window,
        out.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=max(16, power_of_two(head_dim)),
        SPLIT_TOKENS=split_tokens,
        WINDOW=window > 0,
        AT_ONCE=FEW_PARTS if is_few else PARTS_AT_ONCE,
        num_warps=1 if is_few else 4,
    )


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
        keys = widen_cached(stored_keys, q.dtype, KIND)
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
        values = widen_cached(stored_values, q.dtype, KIND)
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
    key_heads,  # [NUM_KV_HEADS] float32, or None: factors besides score_scale and value_scale
    value_heads,
    sinks,  # [num_heads] float32, or None
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
        seq = sequence_of_tile(query_start, num_seqs, index, TOKENS)
        begin = tl.load(query_start + seq)
        num_queries = tl.load(query_start + seq + 1) - begin
        context_len = tl.load(seq_lens + seq)
        first_query = (index - begin // TOKENS - seq) * TOKENS
        if first_query >= num_queries:
            return
        if SKIP_DECODES and num_queries == 1:
            return
    if key_heads is not None:
        score_scale *= tl.load(key_heads + head)
    if value_heads is not None:
        value_scale *= tl.load(value_heads + head)
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
            if value_heads is not None:  # what combines parts knows the scale of all heads alone
                share_acc *= value_scale
            part = (seq.to(tl.int64) * (NUM_KV_HEADS * GROUP) + heads) * num_parts + share
            tl.store(parts + part[:, None] * HEAD_DIM + dims[None, :], share_acc, mask=in_tile)
            tl.store(part_stats + part * 2, share_max, mask=in_row)
            tl.store(part_stats + part * 2 + 1, share_sum, mask=in_row)
        elif SPLIT_TILES:
            running_max, running_sum, acc = merge(running_max, running_sum, acc, share_max, share_sum, share_acc)
        else:
            running_max, running_sum, acc = share_max, share_sum, share_acc
    if not PARTS:
        if sinks is not None:
            running_sum, acc = beside_sink(
                running_max, running_sum, acc, tl.load(sinks + heads, mask=in_row, other=0.0)
            )
        total = tl.where(running_sum > 0, running_sum, 1.0)
        result = acc * (value_scale / total)[:, None]
        target = out + token_rows[:, None] * out_stride + heads[:, None] * HEAD_DIM + dims[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=in_tile)


@triton.jit
def merge(max_a, sum_a, acc_a, max_b, sum_b, acc_b):
    """Two running softmaxes over different keys as one. Either may have seen nothing."""
    new_max = tl.maximum(max_a, max_b)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    decay_a, decay_b = tl.exp2(max_a - shift), tl.exp2(max_b - shift)
    return (new_max, sum_a * decay_a + sum_b * decay_b, acc_a * decay_a[:, None] + acc_b * decay_b[:, None])


@triton.jit
def beside_sink(running_max, running_sum, acc, sink):
    """A running softmax with the score of one more key, whose value is 0; its sum is not 0 then."""
    score = sink * 1.4426950408889634
    new_max = tl.maximum(running_max, score)
    decay = tl.exp2(running_max - new_max)
    return running_sum * decay + tl.exp2(score - new_max), acc * decay[:, None]


@triton.jit(do_not_specialize=["num_parts", "window"])
def combine_kernel(
    out,  # [num_tokens, num_heads, HEAD_DIM]
    parts,  # [num_seqs, num_heads, num_parts, HEAD_DIM] float32
    part_stats,  # [num_seqs, num_heads, num_parts, 2] float32
    sinks,  # [num_heads] float32, or None
    seq_lens,  # [num_seqs]
    query_start,  # [num_seqs + 1]
    num_parts,
    value_scale,
    window,
    out_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    WINDOW: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Merges the parts of sequences of one token. Grid (num_seqs, num_heads).

    Where SPLIT_TOKENS is set, one by one in order, as a prompt's tile merges its own; otherwise AT_ONCE at a time, as
    a loop over parts would wait for memory once for each.
    """
    seq = tl.program_id(0)
    head = tl.program_id(1)
    begin = tl.load(query_start + seq)
    num_queries = tl.load(query_start + seq + 1) - begin
    context_len = tl.load(seq_lens + seq)
    if num_queries != 1:
        return
    dims = tl.arange(0, BLOCK_D)
    in_head = dims < HEAD_DIM
    base = (seq.to(tl.int64) * NUM_HEADS + head) * num_parts
    running_max = tl.full([1], float("-inf"), tl.float32)
    running_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    if SPLIT_TOKENS:
        # Others were not written.
        first = 0
        end = tl.cdiv(context_len, SPLIT_TOKENS)
        if WINDOW:
            first = tl.maximum(context_len - window, 0) // SPLIT_TOKENS
        for part in range(first, end):
            part_max = tl.load(part_stats + (base + part) * 2 + tl.arange(0, 1))
            part_sum = tl.load(part_stats + (base + part) * 2 + 1 + tl.arange(0, 1))
            part_acc = tl.load(parts + (base + part) * HEAD_DIM + dims, mask=in_head, other=0.0)[None, :]
            running_max, running_sum, acc = merge(running_max, running_sum, acc, part_max, part_sum, part_acc)
    else:
        for start in range(0, num_parts, AT_ONCE):
            part = start + tl.arange(0, AT_ONCE)
            part_max = tl.load(part_stats + (base + part) * 2, mask=part < num_parts, other=float("-inf"))
            part_sum = tl.load(part_stats + (base + part) * 2 + 1, mask=part < num_parts, other=0.0)
            in_part = (part < num_parts)[:, None] & in_head[None, :]
            part_acc = tl.load(parts + (base + part)[:, None] * HEAD_DIM + dims[None, :], mask=in_part, other=0.0)
            highest = tl.max(part_max, 0)
            decay = tl.exp2(part_max - tl.where(highest == float("-inf"), 0.0, highest))
            some_max = tl.full([1], 0.0, tl.float32) + highest
            some_sum = tl.zeros([1], tl.float32) + tl.sum(part_sum * decay, 0)
            some_acc = tl.sum(part_acc * decay[:, None], 0)[None, :]
            running_max, running_sum, acc = merge(running_max, running_sum, acc, some_max, some_sum, some_acc)
    if sinks is not None:
        running_sum, acc = beside_sink(running_max, running_sum, acc, tl.load(sinks + head + tl.arange(0, 1)))
    total = tl.where(running_sum > 0, running_sum, 1.0)
    result = acc * (value_scale / total)[:, None]
    target = out + begin.to(tl.int64) * out_stride + head * HEAD_DIM + dims[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=in_head[None, :])
