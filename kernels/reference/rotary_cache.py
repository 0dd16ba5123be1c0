"""The steps between a layer's QKV projection and attention as one op: q/k norm, rotary and the cache write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.reference.attention import CacheScales, PagedBatch
from headrace.kernels.reference.rows import rms_norm, rotary, write_cache
from headrace.kernels.reference.states import LayerState


@dataclass(frozen=True, eq=False)
class Rotation:
    """The q/k norms and rotary embedding of one layer. A part whose fields are None is skipped."""

    cos: Tensor | None = None
    """[num_tokens, half] float32; the first 2 * half dimensions of each head are rotated"""
    sin: Tensor | None = None
    """[num_tokens, half] float32"""
    interleaved: bool = False
    """Whether dimension 2i is paired with 2i + 1 (GPT-J, GLM, Cohere) instead of i with i + half."""
    query_norm: Tensor | None = None
    """[head_dim] float32: the weight of the RMS norm of each query head, applied before the rotation"""
    key_norm: Tensor | None = None
    """[head_dim] float32: the same for key heads"""
    eps: float = 0.0


@dataclass(frozen=True, eq=False)
class LayerCache:
    """What one layer keeps between steps."""

    keys: Tensor
    """[num_blocks, num_kv_heads, block_size, head_dim]"""
    values: Tensor
    scales: CacheScales | None = None
    """Scales of an int8, float8_e4m3fn or float8_e5m2 cache."""
    state: LayerState | None = None
    """Of a layer that keeps a state per sequence; without attention its keys and values are empty."""


def rotary_and_write(
    query: Tensor, key: Tensor, value: Tensor, rotation: Rotation, cache: LayerCache, batch: PagedBatch
) -> Tensor:
    """Normalises and rotates queries and keys, writes keys and values into the cache, and returns the queries.

    query [num_tokens, num_heads, head_dim]; key, value [num_tokens, num_kv_heads, head_dim], all of one dtype. The
    normalised values are rounded to that dtype before the rotation, as the separate ops do.
    Returns [num_tokens, num_heads, head_dim] in query's dtype.
    """
    if rotation.query_norm is not None:
        query = rms_norm(query, None, rotation.query_norm, rotation.eps)[0]
    if rotation.key_norm is not None:
        key = rms_norm(key, None, rotation.key_norm, rotation.eps)[0]
    if rotation.cos is not None and rotation.sin is not None:
        rotate = rotary_interleaved if rotation.interleaved else rotary
        query, key = rotate(query, key, rotation.cos, rotation.sin)
    write_cache(key, value, cache.keys, cache.values, batch, cache.scales)
    return query


def rotary_interleaved(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As `reference.rotary`, with dimension 2i paired with 2i + 1."""
    width = 2 * cos.shape[-1]
    rotated = []
    for x in (query, key):
        pairs = torch.cat([x[..., 0:width:2], x[..., 1:width:2]], dim=-1)
        turned, _ = rotary(pairs, pairs[:, :0], cos, sin)
        both = turned.unflatten(-1, (2, width // 2)).transpose(-1, -2).flatten(-2)
        rotated.append(torch.cat([both, x[..., width:]], dim=-1))
    return rotated[0], rotated[1]


REFERENCES: Mapping[str, Callable[..., Any]] = MappingProxyType({"rotary_and_write": rotary_and_write})
