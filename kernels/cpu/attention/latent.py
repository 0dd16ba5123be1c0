"""Latent attention (DeepSeek-V2, section 2.1) in a program: arguments of its cache write and of its expanded form."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from headrace.kernels.cpu.attention.args import KvCacheC, LatentArgs, LatentExpandedArgs
from headrace.kernels.cpu.attention.cache import CACHE_TYPES, GROUP_KEYS, describe_cache
from headrace.kernels.cpu.build import Library
from headrace.kernels.cpu.program.parts import Buffer, LayerCache, Rotary, check_tables, require_same
from headrace.kernels.cpu.runtime.pointers import pointer

NEVER = (1 << 31) - 1


@dataclass(frozen=True, eq=False)
class LatentLayer:
    """One layer's latent attention. A query head has nope_dim dimensions and then the rotated ones; the cache's values
    are the first `latent_dim` elements of its keys."""

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
        """Size of a token's vector in the cache: `latent_dim` and the rotated dimensions."""
        return self.cache.keys.shape[3]

    @property
    def latent_dim(self) -> int:
        """Size of the compressed vector, which is also the value."""
        return self.vector_dim - 2 * self.rotary.cos.shape[1]

    def least_expanded(self, value_dim: int) -> int:
        """The fewest tokens of a sequence for which the expanded form takes fewer multiplications than the absorbed."""
        saved = 2 * self.latent_dim - self.nope_dim - value_dim
        return self.latent_dim * (self.nope_dim + value_dim) // saved + 1 if saved > 0 else NEVER

    def describe_cache(self) -> KvCacheC:
        cache = describe_cache(self.cache.keys, self.cache.keys, self.cache.scales)
        cache.slots_offset, cache.tables_offset = self.cache.slots_offset, self.cache.tables_offset
        return cache


def latent_args(query: Buffer, absorbed: Buffer, latent: Buffer, layer: LatentLayer) -> LatentArgs:
    """The arguments of the cache write of latent attention. Raises ValueError for buffers of other shapes or types."""
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
        cos=pointer(layer.rotary.cos),
        sin=pointer(layer.rotary.sin),
        cache=layer.describe_cache(),
        num_heads=layer.num_heads,
        nope_dim=layer.nope_dim,
        rotary_half=layer.rotary.cos.shape[1],
        interleaved=layer.interleaved,
    )


@dataclass(frozen=True, eq=False)
class PackedLatentUp:
    """A layer's up-projections from compressed vectors to keys and values, in the layout of `hr_op_latent_expanded`:
    bf16 or float32, whichever attention over the layer's cache multiplies in."""

    keys: Tensor
    """[num_heads, nope_dim, latent_dim], contiguous within each head"""
    values: Tensor
    """[num_heads, ceil(value_dim / GROUP_KEYS), latent_dim / pair, GROUP_KEYS, pair], pair 2 for bf16 and 1 for fp32"""
    value_dim: int

    @classmethod
    def of(cls, up: Tensor, nope_dim: int, cache: Tensor, library: Library) -> PackedLatentUp:
        """Packs up [num_heads, nope_dim + value_dim, latent_dim] for attention over the layer's `cache`."""
        count = library.dll.hr_latent_weight_bytes
        count.restype, count.argtypes = ctypes.c_int64, (ctypes.c_int32,)
        dtype = torch.bfloat16 if count(CACHE_TYPES[cache.dtype]) == 2 else torch.float32
        pair = 2 if dtype == torch.bfloat16 else 1
        keys, values = up.to(dtype).split((nope_dim, up.shape[1] - nope_dim), dim=1)
        filled = functional.pad(values, (0, 0, 0, -values.shape[1] % GROUP_KEYS))
        groups = filled.unflatten(2, (-1, pair)).unflatten(1, (-1, GROUP_KEYS)).transpose(2, 3).contiguous()
        return cls(keys, groups, values.shape[1])


def expanded_args(latent: LatentArgs, out: Buffer, layer: LatentLayer, up: PackedLatentUp) -> LatentExpandedArgs:
    """The arguments of the expanded form, which runs after the cache write with the arguments `latent`. Raises
    ValueError for shapes that do not match the layer's."""
    require_same(out.columns, layer.num_heads * up.value_dim, "expanded attention's output", "its heads'")
    shape = (layer.num_heads, layer.nope_dim, layer.latent_dim)
    require_same(tuple(up.keys.shape), shape, "what makes keys", "its layer's")
    return LatentExpandedArgs(
        latent=latent,
        keys=pointer(up.keys),
        values=pointer(up.values),
        keys_stride=up.keys.stride(0),
        output=out.address,
        output_stride=out.stride,
        scale=layer.scale,
        value_dim=up.value_dim,
        least_tokens=layer.least_expanded(up.value_dim),
        output_type=out.type,
    )
