"""The paged cache as the kernels see it: its element types and layouts, and what attention supports."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.kernels.cpu.attention.args import KvCacheC
from headrace.kernels.cpu.runtime.pointers import pointer
from headrace.kernels.reference.attention import CacheScales

CACHE_TYPES = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.int8: 3,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
}
LAYOUT_ROWS, LAYOUT_GROUPS = 0, 1
"""`CacheLayout` in attention/cache.h, which draws both."""
GROUP_KEYS = 16
"""`kGroupKeys` in attention/cache.h."""
MOST_HEAD_DIM = 512
"""`kMostHeadDim` in attention/cache.h."""
MOST_LATENT_DIM = 1024
"""`kMostLatentDim` in latent.h."""


def best_layout(block_size: int, head_dim: int) -> int:
    """The faster layout of a cache that only the kernels read: in groups, if block and head sizes allow it."""
    return LAYOUT_GROUPS if block_size % GROUP_KEYS == 0 and head_dim % GROUP_KEYS == 0 else LAYOUT_ROWS


def describe_cache(
    key_cache: Tensor, value_cache: Tensor, scales: CacheScales | None = None, layout: int = LAYOUT_ROWS
) -> KvCacheC:
    """The C description of one layer's caches, [num_blocks, num_kv_heads, block_size, head_dim] each.

    Raises ValueError if the kernels do not support them.
    """
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    for name, cache in (("key", key_cache), ("value", value_cache)):
        if cache.dtype not in CACHE_TYPES or not cache.is_contiguous():
            raise ValueError(f"the {name} cache is {cache.dtype} and must be contiguous in one of {list(CACHE_TYPES)}.")
    if value_cache.shape != key_cache.shape or value_cache.dtype != key_cache.dtype:
        raise ValueError("the key and value caches differ in shape or type; they must be alike.")
    is_latent = pointer(key_cache) == pointer(value_cache)
    if reason := why_no_latent_attention(head_dim) if is_latent else why_no_attention(head_dim=head_dim):
        raise ValueError(reason)
    if layout == LAYOUT_GROUPS and best_layout(block_size, head_dim) != LAYOUT_GROUPS:
        sizes = f"not blocks of {block_size} and heads of {head_dim}"
        raise ValueError(f"a cache in groups has blocks and heads in whole multiples of {GROUP_KEYS}, {sizes}.")
    scales = scales or CacheScales()
    return KvCacheC(
        keys=pointer(key_cache),
        values=pointer(value_cache),
        key_scales=None if scales.keys is None else pointer(scales.keys),
        value_scales=None if scales.values is None else pointer(scales.values),
        key_heads=pointer(scales.key) if isinstance(scales.key, Tensor) else None,
        value_heads=pointer(scales.value) if isinstance(scales.value, Tensor) else None,
        key_scale=1.0 if isinstance(scales.key, Tensor) else scales.key,
        value_scale=1.0 if isinstance(scales.value, Tensor) else scales.value,
        type=CACHE_TYPES[key_cache.dtype],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        layout=layout,
        scales_skip=0 if scales.keys is None else scales.keys.stride(0) - num_kv_heads * block_size,
    )


def why_no_attention(head_dim: int | None = None, **_: Any) -> str:
    """The reason why the CPU attention does not support a head size, in a sentence; "" if it does."""
    if head_dim is None or head_dim % 8 != 0 or not 0 < head_dim <= MOST_HEAD_DIM:
        return f"the CPU attention takes heads of 8 to {MOST_HEAD_DIM} values in steps of 8, not {head_dim}."
    return ""


def why_no_latent_attention(latent_size: int) -> str:
    """The reason why latent attention does not support a size of cached vectors, in a sentence; "" if it does."""
    if latent_size % 8 != 0 or not 0 < latent_size <= MOST_LATENT_DIM:
        return f"latent attention keeps up to {MOST_LATENT_DIM} values in steps of 8 on the CPU, not {latent_size}."
    return ""


def why_no_prepared_heads(head_dim: int) -> str:
    """The reason why heads of this size cannot be normed and rotated, in a sentence; "" if they can."""
    return "" if head_dim <= MOST_HEAD_DIM else f"heads of {head_dim} are not rotated on the CPU, {MOST_HEAD_DIM} are."
