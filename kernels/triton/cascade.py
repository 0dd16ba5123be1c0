"""Attention of many sequences to a common beginning, whose keys are read once for all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.reference_attention import AttentionParams, PagedBatch
from headrace.kernels.triton.attention import Launch, Parts, paged_attention
from headrace.kernels.triton.configs import decode_tiles, prefill_tiles


def cascade_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    num_shared_tokens: int,
    out: Tensor | None = None,
) -> Tensor:
    """As `reference_attention.cascade_attention`.

    Only where every sequence computes one token (`batch.max_query_len` is 1, token i belonging to sequence i) and the
    layer has no window is the beginning read once; elsewhere this is `paged_attention`.
    """
    if num_shared_tokens % batch.block_size:
        raise ValueError(f"{num_shared_tokens} shared tokens are not a whole number of blocks of {batch.block_size}")
    launch = Launch(query, key_cache, value_cache, batch, params, None)
    own_tiles, shared_tiles = decode_tiles(*launch.facts), prefill_tiles(*launch.facts)
    num_shared_tokens -= num_shared_tokens % own_tiles.block_n
    one_each = batch.max_query_len == 1 and len(query) == len(batch.seq_lens)
    if not one_each or num_shared_tokens == 0 or params.sliding_window is not None or params.batch_invariant:
        return paged_attention(query, key_cache, value_cache, batch, params, out=out)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    num_seqs = len(batch.seq_lens)
    num_tiles = -(-num_seqs // (shared_tiles.block_m // launch.group))
    shared_parts = launch.num_parts(num_tiles * launch.num_kv_heads)
    own_parts = launch.num_parts(num_seqs * launch.num_kv_heads)
    parts = Parts.empty(query, num_seqs, shared_parts + own_parts)
    launch.attend((num_tiles, launch.num_kv_heads, shared_parts), shared_tiles, parts, num_shared_tokens, SHARED=True)
    launch.attend(
        (num_seqs, launch.num_kv_heads, own_parts), own_tiles, parts, num_shared_tokens, shared_parts, DECODE=True
    )
    launch.combine(out, parts)
    return out
