"""Triton's latent attention against the reference, for the batches of an engine."""

from __future__ import annotations

import torch
from paged import make_batch
from triton_cases_attention import DECODES, MIXED, assert_close

from headrace.kernels import ops
from headrace.kernels.reference.attention import AttentionParams, CacheScales, PagedBatch
from headrace.kernels.reference.latent import LatentUp, latent_attention
from headrace.kernels.reference.rows import LARGEST_STORED
from headrace.kernels.triton import latent


def inputs(lengths: list[tuple[int, int]], num_heads: int, dtype: torch.dtype) -> tuple[torch.Tensor, LatentUp]:
    """Queries and projections for vectors of 20 compressed and 8 rotated values."""
    up = LatentUp((torch.randn(num_heads, 12, 20) / 4).to(dtype), (torch.randn(num_heads, 20, 16) / 4).to(dtype))
    return torch.randn(sum(new for new, _ in lengths), num_heads, 20).to(dtype), up


def compare(lengths: list[tuple[int, int]], num_heads: int, dtype: torch.dtype, block_size: int = 16) -> None:
    batch, cache, _ = make_batch(lengths, block_size, 1, 28, dtype)
    query, up = inputs(lengths, num_heads, dtype)
    params = AttentionParams(0.3)
    assert_close(
        latent.latent_attention(query, up, cache, batch, params), latent_attention(query, up, cache, batch, params)
    )


def case_prompts_and_decodes_together() -> None:
    compare(MIXED, 3, torch.float32)
    compare(MIXED[:5], 18, torch.bfloat16, 8)
    compare(MIXED[5:], 3, torch.float16, 20)


def case_decodes_alone_and_divided() -> None:
    compare(DECODES, 5, torch.float32)
    compare([(1, 300)], 4, torch.float32)
    compare([(1, 300)], 20, torch.bfloat16)


def case_a_prompt_that_the_reference_expands() -> None:
    lengths = [(48, 30), (1, 9)]
    _, up = inputs(lengths, 2, torch.float32)
    assert up.least_expanded < 48
    compare(lengths, 2, torch.float32)


def long_case_scaled_caches() -> None:
    lengths = [(1, 40), (9, 50), (1, 0), (1, 5)]
    batch, cache, _ = make_batch(lengths, 16, 1, 28, torch.float32)
    query, up = inputs(lengths, 3, torch.float32)
    params = AttentionParams(0.3)
    for stored, largest in LARGEST_STORED.items():
        for dynamic in (False, True):
            row = cache.nan_to_num().abs().amax(-1).clamp(min=1e-3) / largest if dynamic else None
            scaled = cache.nan_to_num() / (0.04 if row is None else row[..., None])
            kept = scaled.round().to(stored) if stored == torch.int8 else scaled.to(stored)
            scales = CacheScales(0.04, 0.04, row, row)
            expected = latent_attention(query, up, kept, batch, params, scales)
            assert_close(latent.latent_attention(query, up, kept, batch, params, scales), expected)


def case_padding_changes_nothing() -> None:
    """The padding rows of a graph: sequences of one token without context, with an arbitrary block table."""
    batch, cache, _ = make_batch(DECODES, 16, 1, 28, torch.float32)
    query, up = inputs(DECODES, 3, torch.float32)
    params = AttentionParams(0.3)
    found = latent.latent_attention(query, up, cache, batch, params)
    padded = PagedBatch(
        torch.cat([batch.query_start, torch.tensor([7, 8], dtype=torch.int32)]),
        torch.cat([batch.seq_lens, torch.zeros(2, dtype=torch.int32)]),
        torch.cat([batch.block_tables, torch.full_like(batch.block_tables[:2], -1)]),
        torch.cat([batch.slot_mapping, torch.tensor([-1, -1])]),
        16,
        max_query_len=1,
    )
    given = latent.latent_attention(torch.cat([query, query[:2]]), up, cache, padded, params)
    assert torch.equal(given[:6], found)
    assert not given[6:].any()


def case_the_registry_offers_it_and_says_why_not() -> None:
    facts = {"device": torch.device("cpu"), "dtype": torch.bfloat16, "num_heads": 16, "latent_dim": 512}
    version = next(v for v in ops()["latent_attention"].versions if v.name == "triton")
    assert version.why_not(**facts, rope_dim=64) == ""
    assert "not 512 and 1024" in version.why_not(**facts, rope_dim=1024)
