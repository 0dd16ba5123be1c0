"""The CPU's paged attention against torch in float64, to stated bounds: any shape, storage type and layout."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from cpu_pools import many_threads_ops, two_threads_ops  # noqa: F401
from thinned import every
from torch import Tensor

from headrace.kernels.cpu import build
from headrace.kernels.cpu.attention.cache import LAYOUT_GROUPS, best_layout, describe_cache
from headrace.kernels.cpu.ops import CpuOps
from headrace.kernels.reference.attention import AttentionParams, CacheScales, PagedBatch, SinkRows, paged_attention
from headrace.kernels.reference.rows import LARGEST_STORED

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

FLOAT_TYPES = [torch.float32, torch.bfloat16, torch.float16]
SCALED = [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]
EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Largest relative error of rounding to a type."""


@dataclass
class Case:
    """Sequences over a paged cache whose unused slots hold NaN, in the cache's own type where it has one."""

    query: Tensor  # [num_tokens, num_heads, head_dim]
    keys: Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    values: Tensor
    query_lens: list[int]
    context_lens: list[int]
    tables: Tensor  # [num_seqs, max_blocks]

    def batch(self, seqs: list[int] | None = None, spans: list[tuple[int, int]] | None = None) -> PagedBatch:
        """All sequences, or some; `spans` are the positions that each computes, by default its query's."""
        seqs = list(range(len(self.context_lens))) if seqs is None else seqs
        spans = [self.span(i) for i in seqs] if spans is None else spans
        block_size = self.keys.shape[2]
        slots = [
            int(self.tables[i, p // block_size]) * block_size + p % block_size
            for i, (start, end) in zip(seqs, spans, strict=True)
            for p in range(start, end)
        ]
        return PagedBatch(
            torch.tensor([0, *np.cumsum([end - start for start, end in spans])], dtype=torch.int32),
            torch.tensor([end for _, end in spans], dtype=torch.int32),
            self.tables[seqs],
            torch.tensor(slots, dtype=torch.int64),
            block_size,
        )

    def span(self, seq: int) -> tuple[int, int]:
        return self.context_lens[seq] - self.query_lens[seq], self.context_lens[seq]

    def query_of(self, seq: int) -> Tensor:
        start = sum(self.query_lens[:seq])
        return self.query[start : start + self.query_lens[seq]]

    def expected(self, params: AttentionParams, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of every sequence in float64, from caches that hold the exact values."""
        num_heads, kv_heads, block_size = self.query.shape[1], keys.shape[1], keys.shape[2]
        found = []
        for seq, length in enumerate(self.context_lens):
            blocks = self.tables[seq, : -(-length // block_size)].long()
            k, v = (cache[blocks].double().transpose(0, 1).flatten(1, 2)[:, :length] for cache in (keys, values))
            before = 0
            if params.sink_tokens is not None:
                own = (each.double().transpose(0, 1) for each in params.sink_tokens)
                k, v = (torch.cat(pair, dim=1) for pair in zip(own, (k, v), strict=True))
                before = len(params.sink_tokens.keys)
            k, v = (x.repeat_interleave(num_heads // kv_heads, 0) for x in (k, v))
            start, end = self.span(seq)
            scores = torch.einsum("qhd,hkd->hqk", self.query_of(seq).double(), k) * params.scale
            if params.soft_cap is not None:
                scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
            row, column = torch.arange(start, end)[:, None], torch.arange(-before, length)
            if params.grow_after is not None:
                late = row.double().clamp(min=params.grow_after)
                scores = scores * late.log() / math.log(params.grow_after)
            if params.alibi is not None:
                distances = (row - column).abs().double()
                lengths = distances.sqrt() if params.alibi_root else distances
                scores = scores - params.alibi.double()[:, None, None] * lengths
            hidden = column > row
            if params.sliding_window is not None:
                hidden |= column <= row - params.sliding_window
            scores = scores.masked_fill(hidden, -torch.inf)
            if params.sinks is not None:
                sinks = params.sinks.double()[:, None, None].expand(-1, end - start, 1)
                scores = torch.cat([scores, sinks], dim=-1)
            found.append(torch.einsum("hqk,hkd->qhd", scores.softmax(-1)[..., : before + length], v))
        return torch.cat(found)


def make_case(
    lens: list[tuple[int, int]],
    heads: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    seed: int = 0,
) -> Case:
    """lens: (tokens to compute, context) of each sequence; heads: (query, key/value, size)."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, kv_heads, head_dim = heads
    counts = [-(-context // block_size) for _, context in lens]
    order = torch.randperm(sum(counts) + 2, generator=generator).int()
    tables = torch.full((len(lens), max(counts)), -1, dtype=torch.int32)
    keys, values = torch.full((2, sum(counts) + 2, kv_heads, block_size, head_dim), torch.nan).unbind(0)
    used = 0
    for seq, ((_, context), count) in enumerate(zip(lens, counts, strict=True)):
        tables[seq, :count] = order[used : used + count]
        used += count
        for position in range(context):
            block = tables[seq, position // block_size]
            for cache in (keys, values):
                cache[block, :, position % block_size] = torch.randn(kv_heads, head_dim, generator=generator)
    query = torch.randn(sum(tokens for tokens, _ in lens), num_heads, head_dim, generator=generator).to(dtype)
    keys, values = keys.to(cache_dtype), values.to(cache_dtype)
    return Case(query, keys, values, [tokens for tokens, _ in lens], [context for _, context in lens], tables)


def in_groups(cache: Tensor, *, is_key: bool) -> Tensor:
    """A cache in rows as one in groups: the same blocks, each group of 16 keys in the order of attention/cache.h."""
    blocks, heads, block_size, head_dim = cache.shape
    pair = 1 if cache.dtype == torch.float32 else 2
    if is_key:
        parts = cache.view(blocks, heads, block_size // 16, 16, head_dim // pair, pair).transpose(3, 4)
    else:
        parts = cache.view(blocks, heads, block_size // 16, 16 // pair, pair, head_dim).transpose(4, 5)
    return parts.reshape(cache.shape)


def attend(ops: CpuOps, case: Case, params: AttentionParams | None = None, scales: CacheScales | None = None) -> Tensor:
    """All sequences' attention over the cache in rows, and to the bit the same over it in groups where they fit."""
    params = params or PARAMS["plain"]
    found = ops.paged_attention(case.query, case.keys, case.values, case.batch(), params, scales)
    if best_layout(case.keys.shape[2], case.keys.shape[3]) == LAYOUT_GROUPS:
        keys, values = in_groups(case.keys, is_key=True), in_groups(case.values, is_key=False)
        again = ops.paged_attention(case.query, keys, values, case.batch(), params, scales, LAYOUT_GROUPS)
        assert torch.equal(again, found)
    return found


MIXED = [(1, 1), (5, 5), (0, 9), (1, 300), (30, 77), (200, 600), (1, 129), (17, 128)]
HEADS = [(9, 3, 64), (4, 4, 80), (5, 1, 72), (7, 7, 8), (8, 2, 128), (2, 1, 256), (2, 1, 512), (6, 2, 96)]
PARAMS = {
    "plain": AttentionParams(0.125),
    "window": AttentionParams(0.2, sliding_window=20),
    "window of one": AttentionParams(0.2, sliding_window=1),
    "soft cap": AttentionParams(0.3, soft_cap=2.0),
    "window and cap": AttentionParams(0.2, sliding_window=140, soft_cap=5.0),
    "negative scale": AttentionParams(-0.125),
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("heads", every(2, [(heads,) for heads in HEADS]))
def test_fp32_attention_is_exact_to_rounding(ops: CpuOps, heads: tuple[int, int, int], params: AttentionParams) -> None:
    case = make_case(MIXED, heads, 16, torch.float32, torch.float32)
    params = replace(params, scale=params.scale * (64 / heads[2]) ** 0.5)
    found = attend(ops, case, params)
    # Values are around 1; a score of size s adds s * 2^-24 to a weight, and there are head_dim products in one.
    assert (found - case.expected(params, case.keys, case.values)).abs().max() < 4e-6


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bf16_attention_is_within_its_roundings(ops: CpuOps, dtype: torch.dtype, params: AttentionParams) -> None:
    case = make_case(MIXED, (9, 3, 64), 16, dtype, torch.bfloat16)
    found = attend(ops, case, params).double()
    # The query rounded to bf16 moves a score by 2^-8 of its products (exact for a bf16 query), each weight is
    # rounded to 2^-8, and the output to its type.
    error = (found - case.expected(params, case.keys, case.values)).abs()
    assert error.max() < 0.03
    assert error.mean() < 0.002


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize(("num_heads", "lens"), [(6, MIXED), (2, [(1, 600)])], ids=["a batch", "one long sequence"])
def test_sinks_take_a_share_of_every_softmax(
    ops: CpuOps, num_heads: int, lens: list[tuple[int, int]], window: int | None
) -> None:
    case = make_case(lens, (num_heads, 2, 64), 16, torch.float32, torch.float32)
    # Below all scores, among them and so far above that no power of the difference is a float.
    sinks = torch.tensor([-300.0, 300.0, -2.0, 0.0, 2.0, 9.0])[:num_heads]
    params = AttentionParams(0.125, sliding_window=window, sinks=sinks)
    assert (attend(ops, case, params) - case.expected(params, case.keys, case.values)).abs().max() < 4e-6


@pytest.mark.parametrize("count", [5, 128, 150])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_token_attends_to_sinks_with_values(
    ops: CpuOps, other_ops: list[CpuOps], dtype: torch.dtype, count: int
) -> None:
    case = make_case(MIXED, (6, 2, 64), 16, dtype, dtype)
    generator = torch.Generator().manual_seed(1)
    sinks = SinkRows(*torch.randn((2, count, 2, 64), generator=generator))
    params = AttentionParams(0.125, sink_tokens=sinks)
    expected = case.expected(params, case.keys, case.values)
    in_torch = paged_attention(case.query, case.keys, case.values, case.batch(), params)
    for found in (in_torch, *(attend(each, case, params) for each in (ops, *other_ops))):
        assert (found.double() - expected).abs().max() < (4e-6 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize("per", ["layer", "token"])
def test_sinks_with_values_beside_a_quantised_cache(ops: CpuOps, per: str) -> None:
    case = make_case(MIXED, (6, 2, 64), 16, torch.float32, torch.float32)
    codes = [(each.nan_to_num() * 40).round().clamp(-127, 127).to(torch.int8) for each in (case.keys, case.values)]
    rows = torch.full(codes[0].shape[:3], 1 / 40)
    scales = CacheScales(1 / 40, 1 / 40) if per == "layer" else CacheScales(keys=rows, values=rows)
    sinks = SinkRows(*torch.randn((2, 20, 2, 64), generator=torch.Generator().manual_seed(1)))
    params = AttentionParams(0.125, sink_tokens=sinks)
    expected = case.expected(params, *(each / 40 for each in codes))
    found = attend(ops, replace(case, keys=codes[0], values=codes[1]), params, scales)
    assert (found.double() - expected).abs().max() < 0.03


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_alibi_lowers_scores_by_the_distance_or_its_root(ops: CpuOps, dtype: torch.dtype, root: bool) -> None:
    case = make_case(MIXED, (6, 2, 64), 16, dtype, dtype)
    slopes = torch.tensor([0.0, 0.7, 0.3, 0.1, 0.05, 0.004])
    params = AttentionParams(0.125, alibi=slopes, alibi_root=root)
    error = (attend(ops, case, params).double() - case.expected(params, case.keys, case.values)).abs()
    assert error.max() < (4e-6 if dtype == torch.float32 else 0.03)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores_grow_at_later_positions(ops: CpuOps, dtype: torch.dtype, soft_cap: float | None) -> None:
    case = make_case(MIXED, (6, 2, 64), 16, dtype, dtype)
    params = AttentionParams(0.125, soft_cap=soft_cap, grow_after=40)
    expected = case.expected(params, case.keys, case.values)
    in_torch = paged_attention(case.query, case.keys, case.values, case.batch(), params)
    for found in (attend(ops, case, params), in_torch):
        assert (found.double() - expected).abs().max() < (4e-6 if dtype == torch.float32 else 0.04)


@pytest.mark.parametrize("window", every(2, [1, 20, 140]))
@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_that_a_window_has_passed_may_hold_anything(
    ops: CpuOps, window: int, block_size: int, dtype: torch.dtype
) -> None:
    """They serve other requests by then; here each is a block of NaN."""
    case, params = make_case(MIXED, (9, 3, 64), block_size, dtype, dtype), AttentionParams(0.2, sliding_window=window)
    expected = attend(ops, case, params)
    tables, nobodys = case.tables.clone(), next(block for block in range(len(case.keys)) if block not in case.tables)
    for seq, (tokens, context) in enumerate(MIXED):
        tables[seq, : max(0, context - tokens - window + 1) // block_size] = nobodys
    assert torch.equal(attend(ops, replace(case, tables=tables), params), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scores_far_apart_leave_the_highest_key_alone(ops: CpuOps, dtype: torch.dtype) -> None:
    case = make_case([(1, 300), (40, 131)], (6, 2, 64), 16, dtype, dtype)
    # Scores of tens of thousands: the weight of every key but one is zero, and none of a power overflows.
    case = replace(case, query=case.query * 1e4)
    found = attend(ops, case)
    wanted = case.expected(PARAMS["plain"], case.keys, case.values)
    assert (found - wanted).abs().max() < (2.0**-7 if dtype == torch.bfloat16 else 1e-5) * wanted.abs().max()


@pytest.mark.parametrize("block_size", [1, 8, 16, 17, 128])
def test_blocks_of_any_size(ops: CpuOps, block_size: int) -> None:
    case = make_case([(1, 200), (40, 131)], (4, 2, 32), block_size, torch.float32, torch.float32)
    found = attend(ops, case)
    assert (found - case.expected(PARAMS["plain"], case.keys, case.values)).abs().max() < 4e-6


def test_fp16_cache(ops: CpuOps) -> None:
    case = make_case(MIXED, (4, 2, 64), 16, torch.float16, torch.float16)
    found = attend(ops, case)
    expected = case.expected(PARAMS["plain"], case.keys, case.values)
    assert (found - expected).abs().max() < 2.0**-11 * expected.abs().max()


@pytest.mark.parametrize("per", ["layer", "head", "row"])
@pytest.mark.parametrize("cache_dtype", SCALED)
def test_quantised_caches(ops: CpuOps, cache_dtype: torch.dtype, per: str) -> None:
    wide = make_case(MIXED, (6, 2, 64), 16, torch.float32, torch.float32)
    shape = wide.keys.shape
    keys, values = torch.zeros(2, *shape, dtype=torch.float32).to(cache_dtype).unbind(0)
    largest = LARGEST_STORED[cache_dtype]
    if per == "row":
        row_scales = torch.full((2, *shape[:3]), torch.nan)
        scales = CacheScales(keys=row_scales[0], values=row_scales[1])
    elif per == "head":
        scales = CacheScales(key=torch.tensor([5.0, 4.9]) / largest, value=torch.tensor([6.0, 5.0]) / largest)
    else:
        scales = CacheScales(key=5 / largest, value=6 / largest)
    for seq, length in enumerate(wide.context_lens):
        every = wide.batch([seq], [(0, length)])
        blocks, offsets = every.slot_mapping // 16, every.slot_mapping % 16
        ops.write_cache(wide.keys[blocks, :, offsets], wide.values[blocks, :, offsets], keys, values, every, scales)

    def exact(cache: Tensor, rows: Tensor | None, scale: float | Tensor) -> Tensor:
        whole = scale[:, None, None] if isinstance(scale, Tensor) else scale
        return cache.float() * (whole if rows is None else rows.nan_to_num()[..., None])

    exact_keys, exact_values = exact(keys, scales.keys, scales.key), exact(values, scales.values, scales.value)
    written = ~wide.keys.isnan()
    # Half the distance of neighbours: 1 in int8, 32 among the largest of e4m3, 8192 of e5m2.
    step = 5 / largest * {torch.int8: 0.5, torch.float8_e4m3fn: 16, torch.float8_e5m2: 4096}[cache_dtype]
    assert (exact_keys - wide.keys)[written].abs().max() <= step * 1.01
    found = attend(ops, replace(wide, keys=keys, values=values), PARAMS["plain"], scales)
    error = (found - wide.expected(PARAMS["plain"], exact_keys, exact_values)).abs()
    assert error.max() < 0.03  # the roundings of bf16 products, as above
    assert error.mean() < 0.002


@pytest.mark.parametrize(("cache_dtype", "count"), [(torch.float8_e4m3fn, 127), (torch.float8_e5m2, 124)])
def test_writes_in_floats_of_8_bits_round_as_torch_does_and_saturate(
    ops: CpuOps, cache_dtype: torch.dtype, count: int
) -> None:
    values = torch.arange(count, dtype=torch.uint8).view(cache_dtype).float()
    halfway = (values[1:] + values[:-1]) / 2  # to the even one
    largest = float(values[-1])
    assert largest == LARGEST_STORED[cache_dtype]
    beyond = torch.tensor([largest * 0.998, largest * 1.002, largest * 1.1, 1e9])
    every = torch.cat((values, halfway, halfway * 1.001, halfway * 0.999, beyond))
    every = torch.cat((every, -every, torch.zeros(-2 * len(every) % 32))).view(-1, 1, 32)
    count = len(every)
    caches = torch.zeros(2, count, 1, 1, 32).to(cache_dtype)
    batch = PagedBatch(
        torch.tensor([0, count]), torch.tensor([count]), torch.arange(count)[None], torch.arange(count), 1
    )
    ops.write_cache(every, every, caches[0], caches[1], batch)
    wanted = every.clamp(-largest, largest).to(cache_dtype)
    assert torch.equal(caches[0].view(torch.uint8).flatten(), wanted.view(torch.uint8).flatten())


@pytest.mark.parametrize("cache_dtype", SCALED)
def test_every_number_of_one_byte_is_read_exactly(ops: CpuOps, cache_dtype: torch.dtype) -> None:
    case = make_case([(1, 1)], (1, 1, 256), 16, torch.float32, torch.float32)
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[127, 128, 255]] = 0  # no numbers in e4m3; int8 has no -128
    if cache_dtype == torch.float8_e5m2:
        codes[(codes & 127) > 123] = 0  # infinities and NaN, which are never written
    case.values = codes.view(cache_dtype).expand(case.values.shape).contiguous()
    case.keys = torch.zeros_like(case.values)
    # Of a single key the output is the value.
    assert torch.equal(attend(ops, case)[0, 0], codes.view(cache_dtype).float())


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(9, 3, 64), (3, 3, 40)])
def test_attention_is_the_same_whatever_the_threads_batch_and_chunks(
    ops: CpuOps, other_ops: list[CpuOps], heads: tuple[int, int, int], cache_dtype: torch.dtype
) -> None:
    case = make_case(MIXED, heads, 16, torch.float32, cache_dtype)
    params = AttentionParams(0.15, sliding_window=400, soft_cap=8.0)
    wanted = attend(ops, case, params)
    for other in other_ops:
        assert torch.equal(attend(other, case, params), wanted)
    for seq, part in enumerate(wanted.split(case.query_lens)):
        query, (start, end) = case.query_of(seq), case.span(seq)
        for chunk in (1, 13, 64, 600):
            found = [
                ops.paged_attention(
                    query[low - start : low - start + chunk],
                    case.keys,
                    case.values,
                    case.batch([seq], [(low, min(low + chunk, end))]),
                    params,
                )
                for low in range(start, end, chunk)
            ]
            assert torch.equal(torch.cat([part[:0], *found]), part)


@pytest.mark.parametrize("num_sinks", [0, 150])
def test_a_lone_long_sequence_is_divided_and_stays_the_same(
    ops: CpuOps, other_ops: list[CpuOps], num_sinks: int
) -> None:
    case = make_case([(1, 3000)], (6, 2, 64), 16, torch.bfloat16, torch.bfloat16)
    params = AttentionParams(0.125, sink_tokens=SinkRows(*torch.randn(2, num_sinks, 2, 64)) if num_sinks else None)
    alone = attend(other_ops[0], case, params)
    for other in (ops, *other_ops[1:]):
        for _ in range(3):  # the counters of finished tiles are left ready for the next
            assert torch.equal(attend(other, case, params), alone)


@pytest.mark.parametrize("cache_dtype", [*FLOAT_TYPES, *SCALED])
def test_a_cache_in_groups_has_the_rows_in_another_order(ops: CpuOps, cache_dtype: torch.dtype) -> None:
    key, value = torch.randn(5, 2, 2, 48).unbind(1)
    slots = torch.tensor([3, 39, 32, 16, 94])  # of 3 blocks of 32
    batch = PagedBatch(torch.tensor([0, 5]), torch.tensor([5]), torch.zeros(1, 1), slots, 32)
    rows, groups = torch.full((2, 2, 3, 2, 32, 48), 7.0).to(cache_dtype).unbind(0)
    scales = torch.zeros(2, 2, 3, 2, 32)
    ops.write_cache(key, value, rows[0], rows[1], batch, CacheScales(keys=scales[0, 0], values=scales[0, 1]))
    in_order = CacheScales(keys=scales[1, 0], values=scales[1, 1])
    ops.write_cache(key, value, groups[0], groups[1], batch, in_order, LAYOUT_GROUPS)
    assert torch.equal(in_groups(rows[0], is_key=True).float(), groups[0].float())
    assert torch.equal(in_groups(rows[1], is_key=False).float(), groups[1].float())
    assert torch.equal(scales[0], scales[1])


def test_a_cache_that_cannot_be_in_groups_is_refused() -> None:
    for block_size, head_dim in ((8, 64), (16, 72)):
        cache = torch.zeros(1, 1, block_size, head_dim)
        with pytest.raises(
            ValueError, match=f"whole multiples of 16, not blocks of {block_size} and heads of {head_dim}"
        ):
            describe_cache(cache, cache, layout=LAYOUT_GROUPS)
