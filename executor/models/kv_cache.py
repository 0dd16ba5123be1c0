"""The paged key/value cache's memory. Which block holds what is the core's business."""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from headrace.core.options.cache_groups import ONE_GROUP, CacheGroup, group_layers
from headrace.executor.models.arch import ArchSpec
from headrace.executor.parallel.rank_place import SINGLE, RankPlace
from headrace.ipc.failure import ModelError
from headrace.kernels.reference.attention import CacheScales
from headrace.kernels.reference.rotary_cache import LayerCache

SCALED = (torch.int8, torch.float8_e4m3fn)
"""What a cache can keep only with a scale for each row."""


@dataclass(frozen=True, eq=False)
class KVCache:
    """A key and a value tensor for each of a rank's layers, [num_blocks, num_kv_heads, block_size, head_dim]. Where a
    value is a part of its key, both are one tensor.

    Layers of different cache groups share tensors, as a block belongs to one group at a time: the first layer of each
    group has the first pair, and so on. In int8 and fp8 (float8_e4m3fn) each row of head_dim elements is stored divided
    by its scale.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    key_scales: tuple[Tensor, ...] = ()  # per layer, where scaled: [num_blocks, num_kv_heads, block_size] float32
    value_scales: tuple[Tensor, ...] = ()
    groups: tuple[int, ...] = ()
    """Of each layer: the number of its cache group, whose block tables it reads."""
    num_groups: int = 1
    """Of the whole model; a stage of a pipeline may have no layer of some."""
    pages: tuple[mmap.mmap, ...] = ()
    """A CPU's memory of all of them, from which pages can be given back."""

    @cached_property
    def layers(self) -> tuple[LayerCache, ...]:
        """As a layer's kernels take them."""
        if not self.key_scales:
            return tuple(LayerCache(k, v) for k, v in zip(self.keys, self.values, strict=True))
        scales = [CacheScales(keys=k, values=v) for k, v in zip(self.key_scales, self.value_scales, strict=True)]
        return tuple(LayerCache(k, v, s) for k, v, s in zip(self.keys, self.values, scales, strict=True))

    def release(self) -> None:
        """Gives its memory back, with what it held, until `restore`. The tensors stay the same objects; on a device
        they then have no memory, and new addresses afterwards."""
        for page in self.pages:
            page.madvise(mmap.MADV_DONTNEED)
        if not self.pages:
            for tensor in self._tensors:
                tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Zeroed memory again."""
        if not self.pages:
            for tensor in self._tensors:
                tensor.untyped_storage().resize_(tensor.nbytes)
                tensor.zero_()

    @property
    def num_blocks(self) -> int:
        return self.keys[0].shape[0]

    @property
    def block_size(self) -> int:
        return self.keys[0].shape[2]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        every = (*self.keys, *self.values, *self.key_scales, *self.value_scales)
        return tuple({id(tensor): tensor for tensor in every}.values())


def cache_groups(spec: ArchSpec, max_model_len: int | None = None) -> tuple[CacheGroup, ...]:
    """The groups of a model whose requests have at most max_model_len tokens: a window that hides none of them is
    none."""
    longest = min(spec.max_positions, max_model_len or spec.max_positions)
    windows = (layer.sliding_window for layer in spec.layers)
    return group_layers([window if window and window < longest else None for window in windows])


def group_of_layers(num_layers: int, place: RankPlace, groups: Sequence[CacheGroup]) -> tuple[int, ...]:
    """For each of a rank's layers: the number of its group."""
    if len(groups) == 1:
        return (0,) * len(place.layers(num_layers))
    numbers = {layer: number for number, group in enumerate(groups) for layer in group.layers}
    return tuple(numbers[layer] for layer in place.layers(num_layers))


def layers_in_block(num_layers: int, place: RankPlace, groups: Sequence[CacheGroup]) -> int:
    """How many layers of a rank have a place in each block: those of the group that has most of them here."""
    return max(Counter(group_of_layers(num_layers, place, groups)).values())


def block_bytes(
    spec: ArchSpec,
    block_size: int,
    dtype: torch.dtype,
    place: RankPlace = SINGLE,
    groups: Sequence[CacheGroup] = ONE_GROUP,
) -> int:
    """Memory of one block of a rank, keys and values."""
    own = spec.own_cache(place.tp_size)
    token_bytes = own.elements * dtype.itemsize + (own.rows * torch.float32.itemsize if dtype in SCALED else 0)
    return layers_in_block(spec.num_layers, place, groups) * block_size * token_bytes


def allocate(
    spec: ArchSpec,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    place: RankPlace = SINGLE,
    groups: Sequence[CacheGroup] = ONE_GROUP,
) -> KVCache:
    """A rank's zeroed cache; on a CPU its pages take memory once they are written. Raises ModelError if it cannot."""
    if num_blocks < 1 or block_size < 1:
        raise ModelError(f"a cache needs at least one block of one token, got {num_blocks} blocks of {block_size}")
    own = spec.own_cache(place.tp_size)
    shape = (num_blocks, own.num_heads, block_size)
    own_groups = group_of_layers(spec.num_layers, place, groups)
    places = [own_groups[:index].count(group) for index, group in enumerate(own_groups)]  # each layer's in its group
    pages: list[mmap.mmap] = []

    def make(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if torch.device(device).type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=device)
        # torch.zeros would write every page; fresh anonymous memory reads as zeros and costs nothing until written.
        pages.append(mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Blocks lie in any order, and each short one would cost a walk of the page tables.
            with suppress(OSError):  # of a kernel without them
                pages[-1].madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages[-1], dtype=dtype).view(shape)

    def for_layers(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
        made = [make(shape, dtype) for _ in range(max(places) + 1)]
        return tuple(made[place] for place in places)

    try:
        keys = values = for_layers((*shape, own.key_size), dtype)
        key_scales = value_scales = for_layers(shape, torch.float32) if dtype in SCALED else ()
        if own.value_size:
            values = for_layers((*shape, own.value_size), dtype)
            value_scales = for_layers(shape, torch.float32) if dtype in SCALED else ()
    except (OSError, OverflowError, RuntimeError) as error:
        total = num_blocks * block_bytes(spec, block_size, dtype, place, groups)
        raise ModelError(f"a cache of {num_blocks} blocks needs {total:,} bytes on {device}: {error}") from error
    return KVCache(keys, values, key_scales, value_scales, own_groups, len(groups), tuple(pages))
