"""The paged key/value cache's memory. Which block holds what is the core's business."""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import msgspec
import torch
from torch import Tensor

from headrace.core.options.cache_groups import ONE_GROUP, CacheGroup, group_layers
from headrace.executor.models.arch import ArchSpec, TokenCache
from headrace.executor.models.blocks import Axis
from headrace.executor.parallel.rank_place import SINGLE, RankPlace
from headrace.ipc.failure import ModelError
from headrace.kernels.reference.attention import CacheScales
from headrace.kernels.reference.rotary_cache import LayerCache

SCALED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
"""What a cache can keep only with scales."""
LayerScales = tuple[tuple[float, ...], tuple[float, ...]]
"""What a layer's keys and its values are divided by before they are rounded: one number, or one for each head."""


@dataclass(frozen=True, eq=False)
class KVCache:
    """A key and a value tensor for each of a rank's layers, [blocks, num_kv_heads, block_size, head_dim], over memory
    that it shares with layers of other cache groups. Where a value is a part of its key, both are one tensor.

    A block belongs to one group at a time, and is number n * layers_in_place of the group's tensors (see `Layout`). In
    int8 and fp8 (float8_e4m3fn, float8_e5m2) each row of head_dim elements is stored divided by its scale, or by its
    layer's or head's.
    """

    num_blocks: int
    memory: tuple[Tensor, ...]
    """All of it, of which the others are views."""
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    key_scales: tuple[Tensor, ...] = ()  # per layer, where scaled: [blocks, num_kv_heads, block_size] float32
    value_scales: tuple[Tensor, ...] = ()
    layer_scales: tuple[CacheScales, ...] = ()
    """Per layer, where those of the checkpoint are used."""
    groups: tuple[int, ...] = ()
    """Of each layer: the number of its cache group, whose block tables it reads."""
    num_groups: int = 1
    """Of the whole model; a stage of a pipeline may have no layer of some."""
    pages: tuple[mmap.mmap, ...] = ()
    """A CPU's memory of all of them, from which pages can be given back."""

    @cached_property
    def layers(self) -> tuple[LayerCache, ...]:
        """As a layer's kernels take them."""
        kept = zip(self.keys, self.values, strict=True)
        return tuple(LayerCache(k, v, self.scales(layer)) for layer, (k, v) in enumerate(kept))

    def scales(self, layer: int) -> CacheScales | None:
        if self.key_scales:
            return CacheScales(keys=self.key_scales[layer], values=self.value_scales[layer])
        return self.layer_scales[layer] if self.layer_scales else None

    def release(self) -> None:
        """Gives its memory back, with what it held, until `restore`. The tensors stay the same objects; on a device
        they then have no memory, and new addresses afterwards."""
        for page in self.pages:
            page.madvise(mmap.MADV_DONTNEED)
        if not self.pages:
            for tensor in self.memory:
                tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Zeroed memory again."""
        if not self.pages:
            for tensor in self.memory:
                tensor.untyped_storage().resize_(tensor.nbytes)
                tensor.zero_()

    @property
    def block_size(self) -> int:
        return self.keys[0].shape[2]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.memory)


def cache_groups(spec: ArchSpec, max_model_len: int | None = None, tp_size: int = 1) -> tuple[CacheGroup, ...]:
    """The groups of a model whose requests have at most max_model_len tokens: a window that hides none of them is
    none."""
    longest = min(spec.max_positions, max_model_len or spec.max_positions)
    own = [index for index, layer in enumerate(spec.layers) if layer.cache_of is None]
    windows = [spec.layers[index].sliding_window for index in own]
    caches = spec.own_caches(tp_size)
    groups = group_layers(
        [window if window and window < longest else None for window in windows],
        [caches[index].elements for index in own],
    )
    return tuple(msgspec.structs.replace(g, layers=tuple(own[each] for each in g.layers)) for g in groups)


def group_of_layers(spec: ArchSpec, place: RankPlace, groups: Sequence[CacheGroup]) -> tuple[int, ...]:
    """For each of a rank's layers: the number of its group, or of that whose cache it reads."""
    if len(groups) == 1:
        return (0,) * len(place.layers(spec.num_layers))
    numbers = {layer: number for number, group in enumerate(groups) for layer in group.layers}
    sources = (spec.layers[layer].cache_of for layer in place.layers(spec.num_layers))
    own = zip(place.layers(spec.num_layers), sources, strict=True)
    return tuple(numbers[layer if source is None else source] for layer, source in own)


@dataclass(frozen=True)
class LayerPlace:
    """Where in a block a layer's part is."""

    group: int
    place: int
    nth: int
    """Of those that share the place."""
    sharing: int
    """Layers of the group that may share it."""
    cache: TokenCache
    """What the rank keeps of a token in this layer."""


@dataclass(frozen=True)
class Layout:
    """A block as a rank has it: places one after another, each in memory of its own over all blocks.

    Where several layers share a place, their tensors begin one layer's part after another, and each has `sharing` times
    as many blocks, of which it uses every `sharing`th:

        block          0           1           2
        place      [ f0 | f1 ] [ f0 | f1 ] [ f0 | f1 ]      f0's blocks: 0, 2, 4; f1's, which begins a part later: too
        the same   [    w0   ] [    w0   ] [    w0   ]      w0's blocks: 0, 1, 2

    So a layer's kernels see a tensor of its own, and its group's block tables name every `sharing`th block of it.
    """

    layers: tuple[LayerPlace, ...]

    @classmethod
    def of(cls, spec: ArchSpec, place: RankPlace, groups: Sequence[CacheGroup]) -> Layout:
        caches, counts, found = spec.own_caches(place.tp_size), Counter[int](), dict[int, LayerPlace]()
        own = zip(place.layers(spec.num_layers), group_of_layers(spec, place, groups), strict=True)
        for layer, group in own:
            if (source := spec.layers[layer].cache_of) is not None:
                found[layer] = found[source]
                continue
            sharing = groups[group].layers_in_place
            at, nth = divmod(counts[group], sharing)
            counts[group] += 1
            found[layer] = LayerPlace(group, at, nth, sharing, caches[layer])
        return cls(tuple(found.values()))

    @property
    def elements(self) -> int:
        """Values of one token in a block."""
        places = {each.place: each.sharing * each.cache.elements for each in self.layers}
        return sum(places.values())

    @property
    def rows(self) -> int:
        """Vectors of one token in a block, each of which has a scale where the cache is quantised. Layers of one place
        that differ in their heads share no scales."""
        kinds = {(each.place, each.sharing, each.cache.num_heads): each for each in self.layers}
        return sum(each.sharing * each.cache.rows for each in kinds.values())


def block_bytes(
    spec: ArchSpec,
    block_size: int,
    dtype: torch.dtype,
    place: RankPlace = SINGLE,
    groups: Sequence[CacheGroup] = ONE_GROUP,
) -> int:
    """Memory of one block of a rank, keys and values."""
    layout = Layout.of(spec, place, groups)
    scale_bytes = layout.rows * torch.float32.itemsize if dtype in SCALED else 0
    return block_size * (layout.elements * dtype.itemsize + scale_bytes)


def _own_scale(
    scale: tuple[float, ...], num_heads: int, place: RankPlace, device: torch.device | str
) -> float | Tensor:
    """The rank's part of one scale for all heads, or of one for each; num_heads: with those of padding."""
    if len(scale) == 1:
        return scale[0]
    own = Axis(num_heads).own(place) or slice(None)
    padded = [*scale, *(1.0,) * (num_heads - len(scale))]
    return torch.tensor(padded[own], dtype=torch.float32, device=device)


class _Memory:
    """Memory of layers' parts, which those of one key share."""

    def __init__(self, num_blocks: int, block_size: int, device: torch.device | str) -> None:
        self._num_blocks, self._block_size, self._device = num_blocks, block_size, device
        self.pages: list[mmap.mmap] = []
        self.of_key: dict[tuple[object, ...], Tensor] = {}

    def view(self, key: tuple[object, ...], layer: LayerPlace, row_size: int, dtype: torch.dtype) -> Tensor:
        """[blocks, num_heads, block_size, row_size], or without row_size where that is 0: the layer's part."""
        shape = (layer.cache.num_heads, self._block_size, *((row_size,) if row_size else ()))
        whole = (self._num_blocks * layer.sharing, *shape)
        if key not in self.of_key:
            self.of_key[key] = self._make(math.prod(whole), dtype)
        return self.of_key[key].view(whole)[layer.nth :]

    def _make(self, size: int, dtype: torch.dtype) -> Tensor:
        if torch.device(self._device).type != "cpu":
            return torch.zeros(size, dtype=dtype, device=self._device)
        # torch.zeros would write every page; fresh anonymous memory reads as zeros and costs nothing until written.
        self.pages.append(mmap.mmap(-1, size * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Blocks lie in any order, and each short one would cost a walk of the page tables.
            with suppress(OSError):  # of a kernel without them
                self.pages[-1].madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(self.pages[-1], dtype=dtype)


def allocate(
    spec: ArchSpec,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    place: RankPlace = SINGLE,
    groups: Sequence[CacheGroup] = ONE_GROUP,
    layer_scales: Sequence[LayerScales] = (),
) -> KVCache:
    """A rank's zeroed cache; on a CPU its pages take memory once they are written. Raises ModelError if it cannot.

    layer_scales: of the whole model's layers and heads; without, a quantised cache has one for each row.
    """
    if num_blocks < 1 or block_size < 1:
        raise ModelError(f"a cache needs at least one block of one token, got {num_blocks} blocks of {block_size}")
    layers, memory = Layout.of(spec, place, groups).layers, _Memory(num_blocks, block_size, device)

    def parts(name: str) -> tuple[Tensor, ...]:
        sizes = (each.cache.key_size if name == "keys" else each.cache.value_size for each in layers)
        return tuple(memory.view((name, at.place), at, size, dtype) for at, size in zip(layers, sizes, strict=True))

    def scales(name: str) -> tuple[Tensor, ...]:
        if dtype not in SCALED or layer_scales:
            return ()
        keys = ((name, "scales", each.place, each.sharing, each.cache.num_heads) for each in layers)
        return tuple(memory.view(key, at, 0, torch.float32) for key, at in zip(keys, layers, strict=True))

    try:
        keys = values = parts("keys")
        key_scales = value_scales = scales("keys")
        if layers[0].cache.value_size:
            values, value_scales = parts("values"), scales("values")
    except (OSError, OverflowError, RuntimeError) as error:
        total = num_blocks * block_bytes(spec, block_size, dtype, place, groups)
        raise ModelError(f"a cache of {num_blocks} blocks needs {total:,} bytes on {device}: {error}") from error
    own_scales = []
    for layer in place.layers(spec.num_layers) if layer_scales else ():
        key, value = layer_scales[layer]
        heads = spec.for_ranks(place.tp_size).layers[layer].mixer.cache.num_heads
        if values is keys:  # what is written of a value is its key
            value = key
        own_scales.append(CacheScales(_own_scale(key, heads, place, device), _own_scale(value, heads, place, device)))
    return KVCache(
        num_blocks,
        tuple(memory.of_key.values()),
        keys,
        values,
        key_scales,
        value_scales,
        tuple(own_scales),
        tuple(each.group for each in layers),
        len(groups),
        tuple(memory.pages),
    )
