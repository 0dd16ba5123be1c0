"""Triton's paged attention against the reference, for the batches of an engine."""

from __future__ import annotations

import dataclasses
import random
from unittest import mock

import torch
from paged import make_batch

from headrace.kernels import ops
from headrace.kernels.reference.attention import AttentionParams, CacheScales, PagedBatch, paged_attention
from headrace.kernels.reference.rows import LARGEST_STORED
from headrace.kernels.triton import attention, configs
from headrace.kernels.triton.attention_parts import num_parts_for

BOUND = {torch.float32: 3e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
"""Largest error of an output near 1. The interpreter truncates softmax weights to bfloat16, where a GPU rounds them."""
MIXED = [(1, 1), (5, 5), (1, 40), (36, 70), (1, 0), (1, 33), (9, 100), (2, 0), (1, 101), (2, 32)]
DECODES = [(1, 1), (1, 40), (1, 0), (1, 33), (1, 151), (1, 16)]


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    assert found.isfinite().all()
    bound = BOUND[expected.dtype] * max(1.0, float(expected.abs().max()))
    error = float((found.double() - expected.double()).abs().max())
    assert error < bound, f"{error} is not below {bound}"


def compare(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int, int],
    dtype: torch.dtype,
    params: AttentionParams,
    block_size: int = 16,
) -> None:
    """heads: (query heads, key/value heads, head_dim)."""
    num_heads, num_kv_heads, head_dim = heads
    batch, keys, values = make_batch(lengths, block_size, num_kv_heads, head_dim, dtype)
    if params.sliding_window is not None:  # blocks before the window may belong to other requests
        nobodys = int(keys.isnan().flatten(1).all(1).nonzero()[0])
        for seq, (new, context) in enumerate(lengths):
            passed = max(0, context - new - params.sliding_window + 1) // block_size
            batch.block_tables[seq, :passed] = nobodys
    # A slice of a wider matrix, as in a model.
    joined = torch.randn(sum(new for new, _ in lengths), num_heads + 2, head_dim).to(dtype)
    query = joined[:, :num_heads]
    expected = paged_attention(query, keys, values, batch, params)
    assert_close(attention.paged_attention(query, keys, values, batch, params), expected)


def case_prompts_and_decodes_together() -> None:
    scale = 20**-0.5
    compare(MIXED, (6, 2, 20), torch.float32, AttentionParams(scale))
    compare(MIXED, (7, 1, 20), torch.float32, AttentionParams(scale, 19))
    compare(MIXED, (2, 2, 20), torch.float32, AttentionParams(scale, 80, 1.5))
    compare(MIXED, (7, 1, 20), torch.bfloat16, AttentionParams(scale, None, 1.5))
    compare(MIXED, (6, 2, 20), torch.float16, AttentionParams(scale, 1))


def long_case_decodes_alone() -> None:
    scale = 24**-0.5
    compare(DECODES, (5, 1, 24), torch.float32, AttentionParams(scale))
    compare(DECODES, (4, 4, 24), torch.bfloat16, AttentionParams(scale, 33))
    compare(DECODES, (6, 2, 24), torch.float16, AttentionParams(scale, None, 2.0))
    compare([(1, 300)], (34, 2, 24), torch.float32, AttentionParams(scale))
    compare([(1, 300)], (4, 2, 24), torch.float32, AttentionParams(scale, 130))


def long_case_random_batches() -> None:
    numbers = random.Random(11)
    for dtype in (torch.float32, torch.bfloat16):
        for _ in range(4):
            lengths = [(new := numbers.choice((1, 1, 1, numbers.randint(2, 30))), new + numbers.choice((0, 3, 70)))
                       for _ in range(numbers.randint(1, 5))]  # fmt: skip
            group, num_kv_heads = numbers.randint(1, 9), numbers.randint(1, 2)
            head_dim, block_size = numbers.choice((8, 36, 64)), numbers.choice((1, 8, 16, 20, 64))
            params = AttentionParams(
                head_dim**-0.5, numbers.choice((None, 1, 16, 50)), numbers.choice((None, 0.7)), numbers.random() < 0.3
            )
            compare(lengths, (group * num_kv_heads, num_kv_heads, head_dim), dtype, params, block_size)


def case_scaled_caches() -> None:
    batch, keys, values = make_batch([(1, 40), (9, 50), (1, 0), (1, 5)], 16, 2, 20, torch.float32)
    query = torch.randn(12, 6, 20)
    params, of_heads = AttentionParams(20**-0.5), torch.tensor([[0.04, 0.05], [0.06, 0.03]])
    for stored, largest in LARGEST_STORED.items():
        for per in ("row", "layer", "head"):
            caches, rows = [], []
            for x in (keys, values):
                row = x.nan_to_num().abs().amax(-1).clamp(min=1e-3) / largest if per == "row" else None
                scaled = x.nan_to_num() / (0.04 if row is None else row[..., None])
                caches.append(scaled.round().to(stored) if stored == torch.int8 else scaled.to(stored))
                rows.append(row)
            scales = CacheScales(*of_heads) if per == "head" else CacheScales(0.04, 0.04, *rows)
            stored_keys, stored_values = caches
            expected = paged_attention(query, stored_keys, stored_values, batch, params, scales)
            found = attention.paged_attention(query, stored_keys, stored_values, batch, params, scales)
            assert_close(found, expected)
    large = configs.DeviceProperties((8, 0), 16)
    assert num_parts_for(large, 2 * len(batch.seq_lens)) > 1
    with mock.patch.object(configs, "device_of", return_value=large):  # each sequence of one token in several parts
        for scales in (CacheScales(*of_heads), CacheScales(0.04, 0.05)):
            expected = paged_attention(query, stored_keys, stored_values, batch, params, scales)
            found = attention.paged_attention(query, stored_keys, stored_values, batch, params, scales)
            assert_close(found, expected)


def case_one_sequence_is_divided_into_many_parts() -> None:
    """More parts than are merged at a time, most of them empty."""
    batch, keys, values = make_batch([(1, 300)], 16, 1, 24, torch.float32)
    query, params = torch.randn(1, 3, 24), AttentionParams(24**-0.5)
    with mock.patch.object(configs, "device_of", return_value=configs.DeviceProperties((8, 0), 40)):
        assert num_parts_for(configs.device_of(query), 1) == 64
        found = attention.paged_attention(query, keys, values, batch, params)
    assert_close(found, paged_attention(query, keys, values, batch, params))


def case_sinks_take_their_share() -> None:
    """Sinks with one part, with several and with a window; above all scores, among them and below."""
    for lengths, dtype, window, invariant in (
        (MIXED, torch.float32, None, False),
        (MIXED, torch.bfloat16, 19, False),
        ([(1, 300)], torch.float32, None, False),
        ([(1, 130), (30, 30)], torch.float32, None, True),
    ):
        sinks = torch.tensor([30.0, 0.5, -2.0, 1.0, -40.0, 2.0])
        params = AttentionParams(20**-0.5, window, batch_invariant=invariant, sinks=sinks)
        compare(lengths, (6, 2, 20), dtype, params)


def case_a_prompt_finds_its_sequence_among_hundreds() -> None:
    lengths = [(1, 1)] * 129 + [(2, 3), (5, 5)]
    batch, keys, values = make_batch(lengths, 16, 1, 8, torch.float32)
    query, params = torch.randn(136, 2, 8), AttentionParams(8**-0.5)
    found = torch.zeros_like(query)
    launch = attention.Launch(query, keys, values, batch, params, None)
    launch.prompts(found, configs.prefill_tiles(*launch.facts))
    assert_close(found[129:], paged_attention(query, keys, values, batch, params)[129:])
    assert not found[:129].any()


def case_padding_changes_nothing() -> None:
    """The padding rows of a graph: sequences of one token without context, with an arbitrary block table."""
    batch, keys, values = make_batch(DECODES, 16, 2, 24, torch.float32)
    query, params = torch.randn(6, 4, 24), AttentionParams(24**-0.5)
    found = attention.paged_attention(query, keys, values, batch, params)
    padded = PagedBatch(
        torch.cat([batch.query_start, torch.tensor([7, 8], dtype=torch.int32)]),
        torch.cat([batch.seq_lens, torch.zeros(2, dtype=torch.int32)]),
        torch.cat([batch.block_tables, torch.full_like(batch.block_tables[:2], -1)]),
        torch.cat([batch.slot_mapping, torch.tensor([-1, -1])]),
        16,
        max_query_len=1,
    )
    out = torch.full((8, 4, 24), torch.nan)
    given = attention.paged_attention(torch.cat([query, query[:2]]), keys, values, padded, params, out=out)
    assert given is out
    assert torch.equal(out[:6], found)
    assert not out[6:].any()


def long_case_invariant_results_depend_on_neither_batch_nor_chunks() -> None:
    lengths = [(70, 70), (1, 130), (1, 40)]
    original = attention.FIXED_SPLIT_TOKENS
    attention.FIXED_SPLIT_TOKENS = 32  # so that these contexts have several parts
    try:
        for window, soft_cap in ((None, None), (45, 2.0)):
            params = AttentionParams(24**-0.5, window, soft_cap, batch_invariant=True)
            batch, keys, values = make_batch(lengths, 16, 2, 24, torch.float32)
            query = torch.randn(72, 6, 24)
            whole = attention.paged_attention(query, keys, values, batch, params)
            assert_close(whole, paged_attention(query, keys, values, batch, params))
            # The first sequence's prompt in chunks, alone: 37, 1 and 32 tokens.
            for first, last in ((0, 37), (37, 38), (38, 70)):
                part = dataclasses.replace(
                    batch,
                    query_start=torch.tensor([0, last - first], dtype=torch.int32),
                    seq_lens=torch.tensor([last], dtype=torch.int32),
                    block_tables=batch.block_tables[:1],
                    slot_mapping=batch.slot_mapping[first:last],
                    memo={},
                )
                found = attention.paged_attention(query[first:last], keys, values, part, params)
                assert torch.equal(found, whole[first:last])
            alone = dataclasses.replace(
                batch,
                query_start=torch.tensor([0, 1], dtype=torch.int32),
                seq_lens=batch.seq_lens[1:2],
                block_tables=batch.block_tables[1:2],
                max_query_len=1,
                memo={},
            )
            assert torch.equal(attention.paged_attention(query[70:71], keys, values, alone, params), whole[70:71])
    finally:
        attention.FIXED_SPLIT_TOKENS = original


def case_the_registry_offers_it_and_says_why_not() -> None:
    facts = {"device": torch.device("cpu"), "dtype": torch.bfloat16, "head_dim": 128, "num_heads": 32}
    version = next(v for v in ops()["paged_attention"].versions if v.name == "triton")
    assert version.why_not(**facts, num_kv_heads=8) == ""
    assert "64 query heads" in version.why_not(**facts, num_kv_heads=0)
    assert "512 values, not 1024" in version.why_not(**{**facts, "head_dim": 1024}, num_kv_heads=8)
    assert "not in torch.int32" in version.why_not(**{**facts, "dtype": torch.int32}, num_kv_heads=8)
    batch, keys, values = make_batch(DECODES, 16, 2, 24, torch.float32)
    query, params = torch.randn(6, 4, 24), AttentionParams(24**-0.5)
    found = version.function(query, keys, values, batch, params)
    assert torch.equal(found, attention.paged_attention(query, keys, values, batch, params))
