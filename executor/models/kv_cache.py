"""Memory of the paged key/value cache. The core decides which block holds which tokens."""

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
"""Cache dtypes that need scales."""
LayerScales = tuple[tuple[float, ...], tuple[float, ...]]
"""A layer's (key scales, value scales): one number, or one per head. Values are divided by them before rounding."""


@dataclass(frozen=True, eq=False)
class KVCache:
    """A key and a value tensor for each of a rank's layers, [blocks, num_kv_heads, block_size, head_dim]. Layers of
    different cache groups share memory. Where a value is a part of its key, both are one tensor.

    A block belongs to one group at a time; block n is entry n * layers_in_place of its group's tensors (see `Layout`).
    In int8 and fp8 (float8_e4m3fn, float8_e5m2) each row of head_dim elements is stored divided by a scale of the row,
    of its head or of its layer.
    """

    num_blocks: int
    memory: tuple[Tensor, ...]
    """All allocated tensors; keys, values and scales are views of them."""
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    key_scales: tuple[Tensor, ...] = ()  # per layer, where scaled: [blocks, num_kv_heads, block_size] float32
    value_scales: tuple[Tensor, ...] = ()
    layer_scales: tuple[CacheScales, ...] = ()
    """Scales of each layer, where the checkpoint gives them."""
    groups: tuple[int, ...] = ()
    """Number of each layer's cache group, whose block tables the layer reads."""
    num_groups: int = 1
    """Cache groups of the whole model; a pipeline stage may have no layer of some of them."""
    pages: tuple[mmap.mmap, ...] = ()
    """On a CPU, the mappings that hold `memory`; `release` returns their pages to the system."""

    @cached_property
    def layers(self) -> tuple[LayerCache, ...]:
        """Each layer's tensors in the form that kernels take."""
        kept = zip(self.keys, self.values, strict=True)
        return tuple(LayerCache(k, v, self.scales(layer)) for layer, (k, v) in enumerate(kept))

    def scales(self, layer: int) -> CacheScales | None:
        if self.key_scales:
            return CacheScales(keys=self.key_scales[layer], values=self.value_scales[layer])
        return self.layer_scales[layer] if self.layer_scales else None

    def release(self) -> None:
        """Frees the cache's memory and drops its contents, until `restore`. The tensors stay the same objects; on a GPU
        they have no storage meanwhile, and new addresses after `restore`."""
        for page in self.pages:
            page.madvise(mmap.MADV_DONTNEED)
        if not self.pages:
            for tensor in self.memory:
                tensor.untyped_storage().resize_(0)

    def restore(self) -> None:
        """Undoes `release`: the memory is there again, zeroed."""
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
    """The cache groups of a model whose requests have at most max_model_len tokens. A sliding window of at least that
    size hides nothing, so its layers count as full attention."""
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
    """For each of a rank's layers the number of its cache group; a layer that reads another's cache has its group."""
    if len(groups) == 1:
        return (0,) * len(place.layers(spec.num_layers))
    numbers = {layer: number for number, group in enumerate(groups) for layer in group.layers}
    sources = (spec.layers[layer].cache_of for layer in place.layers(spec.num_layers))
    own = zip(place.layers(spec.num_layers), sources, strict=True)
    return tuple(numbers[layer if source is None else source] for layer, source in own)


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer's part of a block is."""

    group: int
    place: int
    nth: int
    """The layer's position among the group's layers that share the place."""
    sharing: int
    """Number of the group's layers for which the place has room."""
    cache: TokenCache
    """What the rank caches per token in this layer."""


@dataclass(frozen=True)
class Layout:
    """How a rank lays out a block: as a number of places, each with its own allocation, which spans all blocks.

    If `sharing` layers of a group share a place, each layer's tensor has `sharing` times as many entries, of which the
    layer uses every `sharing`th, and begins one entry after the tensor of the layer before it:

        block                  0           1           2
        place, group f     [ f0 | f1 ] [ f0 | f1 ] [ f0 | f1 ]   f0 and f1 each use entries 0, 2, 4 of their tensors
        same place, w      [    w0   ] [    w0   ] [    w0   ]   w0 uses entries 0, 1, 2

    So kernels see one ordinary tensor per layer, and the group's block tables name every `sharing`th entry of it.
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
        """Elements of a block per token."""
        places = {each.place: each.sharing * each.cache.elements for each in self.layers}
        return sum(places.values())

    @property
    def rows(self) -> int:
        """Vectors of a block per token; a quantised cache has a scale for each. Layers that share a place but differ in
        their number of heads do not share memory for scales."""
        kinds = {(each.place, each.sharing, each.cache.num_heads): each for each in self.layers}
        return sum(each.sharing * each.cache.rows for each in kinds.values())


def block_bytes(
    spec: ArchSpec,
    block_size: int,
    dtype: torch.dtype,
    place: RankPlace = SINGLE,
    groups: Sequence[CacheGroup] = ONE_GROUP,
) -> int:
    """Bytes of one block on one rank: keys, values and scales of all layers."""
    layout = Layout.of(spec, place, groups)
    scale_bytes = layout.rows * torch.float32.itemsize if dtype in SCALED else 0
    return block_size * (layout.elements * dtype.itemsize + scale_bytes)


def _own_scale(
    scale: tuple[float, ...], num_heads: int, place: RankPlace, device: torch.device | str
) -> float | Tensor:
    """This rank's part of a layer's scale: one number for all heads, or [own heads] float32. num_heads: including heads
    of padding, whose scale is 1."""
    if len(scale) == 1:
        return scale[0]
    own = Axis(num_heads).own(place) or slice(None)
    padded = [*scale, *(1.0,) * (num_heads - len(scale))]
    return torch.tensor(padded[own], dtype=torch.float32, device=device)


class _Memory:
    """Allocations, one per key: layers with the same key get views of the same memory."""

    def __init__(self, num_blocks: int, block_size: int, device: torch.device | str) -> None:
        self._num_blocks, self._block_size, self._device = num_blocks, block_size, device
        self.pages: list[mmap.mmap] = []
        self.of_key: dict[tuple[object, ...], Tensor] = {}

    def view(self, key: tuple[object, ...], layer: LayerPlace, row_size: int, dtype: torch.dtype) -> Tensor:
        """The layer's tensor, [blocks, num_heads, block_size, row_size], or without the last axis if row_size is 0."""
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
            # Blocks are read in any order; with small pages, each read would cost a walk of the page tables.
            with suppress(OSError):  # a kernel without huge pages
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
    """A rank's zeroed cache. On a CPU its pages take memory only once they are written. Raises ModelError if the memory
    cannot be allocated, or if num_blocks or block_size is below 1.

    layer_scales: for all layers and heads of the whole model; without them, a quantised cache has a scale per row.
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
        if values is keys:  # latent attention writes the key only; the value is a part of it
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
