"""Launching rotary, the cache write, and both with the q/k norm before them."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.kernels.reference.attention import CacheScales, PagedBatch
from headrace.kernels.reference.rotary_cache import LayerCache, Rotation
from headrace.kernels.triton.configs import power_of_two
from headrace.kernels.triton.rotary_cache_kernels import rotary_cache_kernel

CACHE_KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2}
ELEMENTS_PER_PROGRAM = 1024
NUM_WARPS = 4
NOTHING = Rotation()


def rotary_and_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rotation: Rotation,
    cache: LayerCache,
    batch: PagedBatch,
    out: Tensor | None = None,
) -> Tensor:
    """As `reference_rotary_cache.rotary_and_write`; out is like query and contiguous. One launch."""
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _launch((query, key, value), rotation, cache, batch, (out, None))
    return out


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `reference.rotary`."""
    outs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key))
    _launch((query, key, None), Rotation(cos, sin), None, None, (outs[0], outs[1]))
    return outs[0], outs[1]


def write_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batch: PagedBatch,
    scales: CacheScales | None = None,
) -> None:
    """As `reference.write_cache`."""
    no_query = key[:, :0]
    _launch((no_query, key, value), NOTHING, LayerCache(key_cache, value_cache, scales), batch, (no_query, None))


def _launch(
    heads: tuple[Tensor, Tensor, Tensor | None],
    rotation: Rotation,
    cache: LayerCache | None,
    batch: PagedBatch | None,
    outs: tuple[Tensor, Tensor | None],
) -> None:
    query, key, value = (None if x is None else _rows_of_heads(x) for x in heads)
    assert query is not None
    assert key is not None
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if num_tokens == 0:
        return
    key_cache = value_cache = None
    scales, kind, block_size = CacheScales(), 0, 1
    if cache is not None:
        key_cache, value_cache, scales = cache.keys, cache.values, cache.scales or scales
        kind, block_size = CACHE_KINDS.get(key_cache.dtype, 0), key_cache.shape[2]
        if not key_cache.is_contiguous() or not value_cache.is_contiguous():
            raise ValueError("the key and value caches of a layer must each be contiguous")
        if kind == CACHE_KINDS[torch.float8_e4m3fn]:
            key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    block_d = power_of_two(head_dim)
    at_once = max(1, ELEMENTS_PER_PROGRAM // block_d)
    grid = (num_tokens, -(-num_heads // at_once) - (-num_kv_heads // at_once))
    rotary_cache_kernel[grid](
        query,
        key,
        value,
        *outs,
        rotation.query_norm,
        rotation.key_norm,
        None if rotation.cos is None else rotation.cos.contiguous(),
        None if rotation.sin is None else rotation.sin.contiguous(),
        None if batch is None else batch.slot_mapping,
        key_cache,
        value_cache,
        scales.keys if kind else None,
        scales.values if kind else None,
        scales.key,
        scales.value,
        rotation.eps,
        query.stride(0),
        key.stride(0),
        0 if value is None else value.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        HEADS=at_once,
        HALF=0 if rotation.cos is None else rotation.cos.shape[1],
        INTERLEAVED=rotation.interleaved,
        WRITE=cache is not None,
        BLOCK_SIZE=block_size,
        KIND=kind,
        ROW_SCALES=kind != 0 and scales.keys is not None,
        num_warps=NUM_WARPS,
    )


def _rows_of_heads(x: Tensor) -> Tensor:
    """x [num_tokens, num_heads, head_dim] with the heads of a token side by side; tokens may be strided."""
    return x if x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] <= 1) else x.contiguous()
