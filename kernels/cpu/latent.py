"""Latent attention (DeepSeek-V2, section 2.1) in a program: the pass before it, and its expanded form."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .build import Library
from .ops import CACHE_TYPES, GROUP_KEYS, describe_cache
from .program_args import KvCacheC, LatentArgs, LatentExpandedArgs
from .program_parts import Buffer, LayerCache, Rotary, check_tables, require_same

NEVER = (1 << 31) - 1


@dataclass(frozen=True, eq=False)
class LatentLayer:
    """Heads of nope_dim and then 2 * len(rotary) dimensions over a cache whose values are the start of its keys."""

    num_heads: int
    nope_dim: int
    cache: LayerCache
    scale: float
    rotary: Rotary
    interleaved: bool

    @property
    def head_dim(self) -> int:
        return self.nope_dim + 2 * self.rotary.cos.shape[1]

    @property
    def vector_dim(self) -> int:
        """Of what the cache keeps of a token."""
        return self.cache.keys.shape[3]

    @property
    def latent_dim(self) -> int:
        """Of the part of it that is the value."""
        return self.vector_dim - 2 * self.rotary.cos.shape[1]

    def least_expanded(self, value_dim: int) -> int:
        """From how many tokens of a sequence on making its context's keys and values multiplies less."""
        saved = 2 * self.latent_dim - self.nope_dim - value_dim
        return self.latent_dim * (self.nope_dim + value_dim) // saved + 1 if saved > 0 else NEVER

    def describe_cache(self) -> KvCacheC:
        cache = describe_cache(self.cache.keys, self.cache.keys, self.cache.scales)
        cache.slots_offset, cache.tables_offset = self.cache.slots_offset, self.cache.tables_offset
        return cache


def latent_args(query: Buffer, absorbed: Buffer, latent: Buffer, layer: LatentLayer) -> LatentArgs:
    """What a layer's latent attention knows of its inputs. Raises ValueError for what does not fit."""
    check_tables(layer.rotary)
    for buffer, columns, what in (
        (query, layer.num_heads * layer.head_dim, "queries"),
        (absorbed, layer.num_heads * layer.vector_dim, "absorbed queries"),
        (latent, layer.vector_dim, "compressed vectors"),
    ):
        require_same((buffer.columns, buffer.tensor.dtype), (columns, torch.float32), f"the buffer of {what}", "theirs")
    return LatentArgs(
        query=query.address,
        absorbed=absorbed.address,
        latent=latent.address,
        query_stride=query.stride,
        absorbed_stride=absorbed.stride,
        latent_stride=latent.stride,
        cos=layer.rotary.cos.data_ptr(),
        sin=layer.rotary.sin.data_ptr(),
        cache=layer.describe_cache(),
        num_heads=layer.num_heads,
        nope_dim=layer.nope_dim,
        rotary_half=layer.rotary.cos.shape[1],
        interleaved=layer.interleaved,
    )


@dataclass(frozen=True, eq=False)
class LatentUp:
    """What makes a layer's keys and values of compressed vectors, as `hr_op_latent_expanded` multiplies it: bf16 or
    float32, as attention over the cache does."""

    keys: Tensor
    """[num_heads, nope_dim, latent_dim], each head's contiguous"""
    values: Tensor
    """[num_heads, value_dim in whole groups / GROUP_KEYS, latent_dim / pair, GROUP_KEYS, pair]"""
    value_dim: int

    @classmethod
    def of(cls, up: Tensor, nope_dim: int, cache: Tensor, library: Library) -> LatentUp:
        """up: [num_heads, nope_dim + value_dim, latent_dim]; cache: the layer's."""
        count = library.dll.hr_latent_weight_bytes
        count.restype, count.argtypes = ctypes.c_int64, (ctypes.c_int32,)
        dtype = torch.bfloat16 if count(CACHE_TYPES[cache.dtype]) == 2 else torch.float32
        pair = 2 if dtype == torch.bfloat16 else 1
        keys, values = up.to(dtype).split((nope_dim, up.shape[1] - nope_dim), dim=1)
        filled = functional.pad(values, (0, 0, 0, -values.shape[1] % GROUP_KEYS))
        groups = filled.unflatten(2, (-1, pair)).unflatten(1, (-1, GROUP_KEYS)).transpose(2, 3).contiguous()
        return cls(keys, groups, values.shape[1])


def expanded_args(latent: LatentArgs, out: Buffer, layer: LatentLayer, up: LatentUp) -> LatentExpandedArgs:
    """Of the expanded form, after the pass that `latent` are the arguments of. Raises ValueError."""
    require_same(out.columns, layer.num_heads * up.value_dim, "expanded attention's output", "its heads'")
    shape = (layer.num_heads, layer.nope_dim, layer.latent_dim)
    require_same(tuple(up.keys.shape), shape, "what makes keys", "its layer's")
    return LatentExpandedArgs(
        latent=latent,
        keys=up.keys.data_ptr(),
        values=up.values.data_ptr(),
        keys_stride=up.keys.stride(0),
        output=out.address,
        output_stride=out.stride,
        scale=layer.scale,
        value_dim=up.value_dim,
        least_tokens=layer.least_expanded(up.value_dim),
        output_type=out.type,
    )
