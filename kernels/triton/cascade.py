"""Attention of many sequences to a common beginning, whose keys are read once for all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.reference.attention import AttentionParams, CacheScales, PagedBatch
from headrace.kernels.triton.attention import Launch, Parts, paged_attention
from headrace.kernels.triton.configs import decode_tiles, prefill_tiles


def cascade_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    params: AttentionParams,
    scales: CacheScales | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `reference_attention.cascade_attention`.

    The beginning is read once for all sequences where each computes one token (`batch.max_query_len` is 1, and token i
    belongs to sequence i) and the layer has no window; elsewhere this is `paged_attention`. How many tokens are shared
    is read on the device, so one captured launch serves every number, 0 included. Sequences of length 0 are padding,
    and may hold anything.
    """
    launch = Launch(query, key_cache, value_cache, batch, params, scales)
    one_each = batch.max_query_len == 1 and len(query) == len(batch.seq_lens)
    if not one_each or batch.shared_tokens is None or params.sliding_window is not None or params.batch_invariant:
        return paged_attention(query, key_cache, value_cache, batch, params, scales, out=out)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    own_tiles, shared_tiles = decode_tiles(*launch.facts), prefill_tiles(*launch.facts)
    unit = max(own_tiles.block_n, shared_tiles.block_n)
    num_seqs, num_kv_heads = len(batch.seq_lens), launch.num_kv_heads
    num_tiles = -(-num_seqs // (shared_tiles.block_m // launch.group))
    # A multiprocessor has room for one program with a prompt's tiles.
    shared_parts = launch.num_parts(num_tiles * num_kv_heads, per_multiprocessor=1)
    own_parts = launch.num_parts(num_seqs * num_kv_heads)
    parts = Parts.empty(query, num_seqs, shared_parts + own_parts)
    launch.attend((num_tiles, num_kv_heads, shared_parts), shared_tiles, parts, SHARED=True, SHARED_UNIT=unit)
    launch.attend((num_seqs, num_kv_heads, own_parts), own_tiles, parts, shared_parts, DECODE=True, SHARED_UNIT=unit)
    launch.combine(out, parts)
    return out
