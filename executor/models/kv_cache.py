"""Memory of the paged key/value cache. The core decides which block holds which tokens."""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec
import numpy as np
import torch
from torch import Tensor

from headrace.core.options.cache_groups import ONE_GROUP, CacheGroup, group_layers, page_bytes
from headrace.executor.models.arch import ArchSpec, TokenCache
from headrace.executor.models.blocks import Axis
from headrace.executor.models.state_pages import state_layout, state_pages
from headrace.executor.parallel.rank_place import SINGLE, RankCoordinates
from headrace.ipc.failure import ModelError
from headrace.kernels.reference.attention import CacheScales
from headrace.kernels.reference.rotary_cache import LayerCache
from headrace.kernels.reference.states import KeptUnits, LayerState

HUGE_BYTES = 2 << 20
SMALL_BYTES = 128 << 10
"""Of each tensor of the cache so many bytes may be in use before its first HUGE_BYTES become a huge page. Blocks are
read in any order, and with small pages alone, each read would cost a walk of the page tables. With huge ones alone, the
first block would take 2 MiB for keys and for values of each layer: 120 MiB of a small model's 30 layers, for a server
that is hardly used."""
_MADV_COLLAPSE = 25
"""Of Linux 6.1: makes a huge page of what is in small ones. Python has no name for it."""
SCALED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
"""Cache dtypes that need scales."""
USUAL_ELEMENT_BYTES = 2
"""Of cached keys and values, while their type is not known."""
LayerScales = tuple[tuple[float, ...], tuple[float, ...]]
"""A layer's (key scales, value scales): one number, or one per head. Values are divided by them before rounding."""


@dataclass(frozen=True)
class Beginning:
    """The first HUGE_BYTES of a tensor, in small pages."""

    pages: mmap.mmap
    first_byte: int
    num_blocks: int
    """How many blocks SMALL_BYTES of the tensor have room for."""

    def become_huge(self) -> None:
        with suppress(OSError):  # a kernel without huge pages, or an older one, which makes them when it comes to it
            self.pages.madvise(mmap.MADV_HUGEPAGE, self.first_byte, HUGE_BYTES)
            self.pages.madvise(_MADV_COLLAPSE, self.first_byte, HUGE_BYTES)


@dataclass(frozen=True, eq=False)
class KVCache:
    """A key and a value tensor for each of a rank's layers, [blocks, num_kv_heads, block_size, head_dim]. Layers of
    different cache groups share memory. Where a value is a part of its key, both are one tensor.

    A block belongs to one group at a time; block n is entry n * factors[group] of its group's tensors (see `Layout`).
    A layer that keeps a state per sequence has a `LayerState` in `states` and, without attention, empty tensors.
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
    factors: tuple[int, ...] = (1,)
    """For each cache group with block tables: a block's number in the group's tensors is its id times this."""
    states: tuple[LayerState | None, ...] = ()
    """Per layer; empty if no layer keeps a state."""
    block_size: int = 16
    pages: tuple[mmap.mmap, ...] = ()
    """On a CPU, the mappings that hold `memory`; `release` returns their pages to the system."""
    beginnings: list[Beginning] = field(default_factory=list)
    """Of tensors in `memory`, which are in small pages. Those that the first blocks fill come last."""

    def will_use(self, block_ids: np.ndarray) -> None:
        """Call before these blocks are written for the first time; it need not be known of all."""
        highest = int(block_ids.max()) if block_ids.size else -1
        while self.beginnings and highest >= self.beginnings[-1].num_blocks:
            self.beginnings.pop().become_huge()

    @cached_property
    def layers(self) -> tuple[LayerCache, ...]:
        """Each layer's tensors in the form that kernels take."""
        kept = zip(self.keys, self.values, self.states or (None,) * len(self.keys), strict=True)
        return tuple(LayerCache(k, v, self.scales(layer), state) for layer, (k, v, state) in enumerate(kept))

    @property
    def num_groups(self) -> int:
        """Cache groups of the whole model with block tables; a pipeline stage may have no layer of some of them."""
        return len(self.factors)

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
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.memory)

    @property
    def draft_bytes(self) -> int:
        """Of `nbytes`, what holds inputs of drafts, however many blocks there are."""
        return sum(state.drafted.nbytes for state in self.states if state is not None)


def cache_groups(
    spec: ArchSpec,
    max_model_len: int | None = None,
    tp_size: int = 1,
    block_size: int = 16,
    *,
    windows_apart: bool = True,
    element_bytes: int = USUAL_ELEMENT_BYTES,
) -> tuple[CacheGroup, ...]:
    """The cache groups of a model whose requests have at most max_model_len tokens. A sliding window of at least that
    size hides nothing, so its layers count as full attention; without windows_apart, all of them do. Where a token
    reads those after it, prompts are computed whole, and all layers are one group.

    element_bytes: of cached keys and values, for which the number of a state's pages is chosen; with others a part of
    the pages is wasted. Raises ModelError if no layer keeps anything."""
    if not spec.is_causal:
        return ONE_GROUP
    longest = min(spec.max_positions, max_model_len or spec.max_positions)
    caches = spec.own_caches(tp_size)
    sizes = {
        index: cache.elements
        for index, (layer, cache) in enumerate(zip(spec.layers, caches, strict=True))
        if layer.cache_of is None and cache is not None
    }
    if not windows_apart and not spec.has_states:
        return ONE_GROUP
    own, windows = list(sizes), [spec.layers[index].sliding_window if windows_apart else None for index in sizes]
    kinds = [spec.layers[index].mixer.cache_kind if windows_apart else "" for index in sizes]
    found = group_layers([each if each and each < longest else None for each in windows], list(sizes.values()), kinds)
    groups = tuple(msgspec.structs.replace(g, layers=tuple(own[each] for each in g.layers)) for g in found)
    if not spec.has_states and not groups:
        raise ModelError(
            f"no layer of this {spec.architecture} reads other tokens; at least one must have attention or keep a state"
        )
    if not spec.has_states:
        return groups
    kept = zip(caches, spec.own_states(tp_size), strict=True)
    state = CacheGroup(kind="state", layers=tuple(i for i, (cache, own) in enumerate(kept) if own or cache is None))
    page_bytes = Layout.of(spec, SINGLE, (*groups, state)).page_bytes(block_size, element_bytes)
    return (*groups, msgspec.structs.replace(state, pages=state_pages(spec, page_bytes)))


def with_tables(groups: Sequence[CacheGroup]) -> tuple[CacheGroup, ...]:
    """The groups whose rows have block tables: all but the state group."""
    return tuple(group for group in groups if group.kind != "state")


def group_of_layers(spec: ArchSpec, place: RankCoordinates, groups: Sequence[CacheGroup]) -> tuple[int, ...]:
    """For each of a rank's layers the number of its cache group, of its attention's if it keeps a state too; a layer
    that reads another's cache has its group, and one that keeps nothing the first."""
    if len(groups) == 1:
        return (0,) * len(place.layers(spec.num_layers))
    numbers = {layer: number for number, group in reversed(list(enumerate(groups))) for layer in group.layers}
    sources = (spec.layers[layer].cache_of for layer in place.layers(spec.num_layers))
    own = zip(place.layers(spec.num_layers), sources, strict=True)
    return tuple(numbers.get(layer if source is None else source, 0) for layer, source in own)


@dataclass(frozen=True)
class LayerPlace:
    """Where a layer's part of a block is."""

    layer: int
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

    Where a token reads those after it, prompts are computed whole, and no step reads what another has written: all
    layers have the same place, which each overwrites.
    """

    layers: tuple[LayerPlace, ...]
    """Without those that keep a state or nothing."""
    every_layer: range
    """Numbers of the rank's layers in the model."""

    @classmethod
    def of(cls, spec: ArchSpec, place: RankCoordinates, groups: Sequence[CacheGroup]) -> Layout:
        caches, counts, found = spec.own_caches(place.tp_size), Counter[int](), dict[int, LayerPlace]()
        own = zip(place.layers(spec.num_layers), group_of_layers(spec, place, groups), strict=True)
        for layer, group in own:
            if (source := spec.layers[layer].cache_of) is not None:
                found[layer] = replace(found[source], layer=layer)
                continue
            if (cache := caches[layer]) is None:
                continue
            sharing = groups[group].layers_in_place
            at, nth = divmod(counts[group], sharing)
            if spec.is_causal:
                counts[group] += 1
            found[layer] = LayerPlace(layer, group, at, nth, sharing, cache)
        return cls(tuple(found.values()), place.layers(spec.num_layers))

    @property
    def entry_elements(self) -> int:
        """Least common multiple of what the layers' tensors keep in one entry, per token; 0 without layers. Pages that
        states share are a whole number of entries of each."""
        each = {at.cache.num_heads * size for at in self.layers for size in (at.cache.key_size, at.cache.value_size)}
        each.discard(0)  # a value that is a part of its key
        return math.lcm(*each) if each else 0

    @property
    def elements(self) -> int:
        """Elements of a block per token."""
        places = {each.place: each.sharing * each.cache.elements for each in self.layers}
        return sum(places.values())

    @property
    def rows(self) -> int:
        """Vectors of a block per token; a quantised cache has a scale for each. Layers that share a place but differ in
        their number of heads do not share memory for scales."""
        return sum(each.sharing * each.cache.rows for each in self._scaled_alike.values())

    @property
    def rows_before(self) -> Mapping[int, int]:
        """For each layer, how many of a block's `rows` precede its own."""
        begins, count = dict[tuple[int, ...], int](), 0
        for kind, each in self._scaled_alike.items():
            begins[kind] = count
            count += each.sharing * each.cache.rows
        return {each.layer: begins[_scale_kind(each)] + each.nth * each.cache.rows for each in self.layers}

    @property
    def _scaled_alike(self) -> Mapping[tuple[int, ...], LayerPlace]:
        """One of the layers that share memory for scales, by what these have in common."""
        return {_scale_kind(each): each for each in self.layers}

    def page_bytes(self, block_size: int, element_bytes: int) -> int:
        """Size of a block's keys and values, with a scale for each row where they have one byte."""
        scale_bytes = self.rows * torch.float32.itemsize if element_bytes == 1 else 0
        return block_size * (self.elements * element_bytes + scale_bytes)


def _scale_kind(each: LayerPlace) -> tuple[int, ...]:
    return each.place, each.sharing, each.cache.num_heads


def block_bytes(
    spec: ArchSpec,
    block_size: int,
    dtype: torch.dtype,
    place: RankCoordinates = SINGLE,
    groups: Sequence[CacheGroup] = ONE_GROUP,
) -> int:
    """Bytes of one block on one rank: keys, values and scales of all layers, or a page of a sequence's state."""
    layout, states = Layout.of(spec, place, groups), state_layout(spec, place, groups)
    of_tokens = layout.page_bytes(block_size, dtype.itemsize)
    entry_bytes = block_size * layout.entry_elements * dtype.itemsize
    return page_bytes(of_tokens, states.page_bytes, entry_bytes)


def _own_scale(
    scale: tuple[float, ...], num_heads: int, place: RankCoordinates, device: torch.device | str
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
        self.beginnings: list[Beginning] = []
        self.of_key: dict[object, Tensor] = {}

    def view(self, key: object, layer: LayerPlace, row_size: int, dtype: torch.dtype) -> Tensor:
        """The layer's tensor, [blocks, num_heads, block_size, row_size], or without the last axis if row_size is 0."""
        shape = (layer.cache.num_heads, self._block_size, *((row_size,) if row_size else ()))
        whole = (self._num_blocks * layer.sharing, *shape)
        return self.flat(key, math.prod(whole), dtype).view(whole)[layer.nth :]

    def nothing(self, dtype: torch.dtype) -> Tensor:
        """The tensor of a layer that caches no tokens."""
        return torch.empty(0, 1, self._block_size, 1, dtype=dtype, device=self._device)

    def flat(self, key: object, size: int, dtype: torch.dtype) -> Tensor:
        """[size], zeroed."""
        if key not in self.of_key:
            self.of_key[key] = self._make(size, dtype)
        return self.of_key[key]

    def _make(self, size: int, dtype: torch.dtype) -> Tensor:
        if torch.device(self._device).type != "cpu" or not size:  # of a stage whose layers keep nothing
            return torch.zeros(size, dtype=dtype, device=self._device)
        # torch.zeros would write every page; fresh anonymous memory reads as zeros and costs nothing until written.
        num_bytes = size * dtype.itemsize
        pages = mmap.mmap(-1, num_bytes + 2 * HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.pages.append(pages)
        address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
        first_byte = -address % HUGE_BYTES
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_NOHUGEPAGE, first_byte, HUGE_BYTES)
                pages.madvise(mmap.MADV_HUGEPAGE, first_byte + HUGE_BYTES)
            self.beginnings.append(Beginning(pages, first_byte, SMALL_BYTES * self._num_blocks // num_bytes))
        return torch.frombuffer(pages, dtype=dtype, count=size, offset=first_byte)


def allocate(
    spec: ArchSpec,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    place: RankCoordinates = SINGLE,
    groups: Sequence[CacheGroup] = ONE_GROUP,
    layer_scales: Sequence[LayerScales] = (),
) -> KVCache:
    """A rank's zeroed cache. On a CPU its pages take memory only once they are written. Raises ModelError if the memory
    cannot be allocated, or if num_blocks or block_size is below 1.

    layer_scales: for all layers and heads of the whole model; without them, a quantised cache has a scale per row.
    """
    if num_blocks < 1 or block_size < 1:
        raise ModelError(f"a cache needs at least one block of one token, got {num_blocks} blocks of {block_size}")
    layout, memory = Layout.of(spec, place, groups), _Memory(num_blocks, block_size, device)
    states: tuple[LayerState | None, ...] = ()
    try:
        if spec.has_states:
            size = block_bytes(spec, block_size, dtype, place, groups)
            pages = memory.flat("pages", num_blocks * size, torch.uint8).view(num_blocks, size)
            views = _in_pages(layout, pages, block_size, dtype, len(with_tables(groups)))
            states = _states(spec, place, groups, pages)
        else:
            views = _in_places(layout, memory, dtype, has_row_scales=dtype in SCALED and not layer_scales)
            views = replace(views, factors=tuple(group.layers_in_place for group in groups))
    except (OSError, OverflowError, RuntimeError) as error:
        total = num_blocks * block_bytes(spec, block_size, dtype, place, groups)
        raise ModelError(f"a cache of {num_blocks} blocks needs {total:,} bytes on {device}: {error}") from error
    return KVCache(
        num_blocks,
        tuple(memory.of_key.values()),
        views.keys,
        views.values,
        views.key_scales,
        views.value_scales,
        _layer_scales(spec, place, layer_scales, device, keys_only=views.values is views.keys),
        group_of_layers(spec, place, groups),
        views.factors,
        states,
        block_size,
        tuple(memory.pages),
        sorted(memory.beginnings, key=lambda each: -each.num_blocks),
    )


@dataclass(frozen=True, eq=False)
class _Views:
    """The layers' tensors, as in `KVCache`."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    key_scales: tuple[Tensor, ...] = ()
    value_scales: tuple[Tensor, ...] = ()
    factors: tuple[int, ...] = ()


def _in_places(layout: Layout, memory: _Memory, dtype: torch.dtype, *, has_row_scales: bool) -> _Views:
    placed = {at.layer: at for at in layout.layers}
    layers = [placed.get(layer) for layer in layout.every_layer]

    def parts(name: str) -> tuple[Tensor, ...]:
        return tuple(
            memory.nothing(dtype)
            if at is None
            else memory.view((name, at.place), at, at.cache.key_size if name == "keys" else at.cache.value_size, dtype)
            for at in layers
        )

    def scales(name: str) -> tuple[Tensor, ...]:
        if not has_row_scales:
            return ()
        return tuple(
            memory.nothing(torch.float32)
            if at is None
            else memory.view((name, "scales", at.place, at.sharing, at.cache.num_heads), at, 0, torch.float32)
            for at in layers
        )

    keys, key_scales = parts("keys"), scales("keys")
    if not any(at.cache.value_size for at in layout.layers):
        return _Views(keys, keys, key_scales, key_scales)
    return _Views(keys, parts("values"), key_scales, scales("values"))


def _in_pages(layout: Layout, pages: Tensor, block_size: int, dtype: torch.dtype, num_groups: int) -> _Views:
    """Views of pages [num_blocks, bytes of a page] uint8. Behind the keys and values of a block are the scales of their
    rows, if they have any. Raises ModelError for caches of which a page cannot be a whole number of entries."""
    flat = pages.view(-1).view(dtype)
    page_elements, factors = pages.shape[1] // dtype.itemsize, [1] * num_groups
    found, scales = dict[int, tuple[Tensor, Tensor]](), dict[int, tuple[Tensor, Tensor]]()
    rows_before = layout.rows_before if dtype in SCALED else {}
    for at in layout.layers:
        cache, first = at.cache, block_size * (at.place * at.sharing + at.nth) * at.cache.elements
        entry = block_size * cache.num_heads * cache.key_size
        if cache.value_size not in (0, cache.key_size) or factors[at.group] not in (1, page_elements // entry):
            raise ModelError("keys and values of different sizes are not supported beside layers that keep a state")
        factor = factors[at.group] = page_elements // entry
        shape = ((len(pages) - 1) * factor + 1, cache.num_heads, block_size, cache.key_size)
        keys = flat[first : first + math.prod(shape)].view(shape)
        second = first + entry
        found[at.layer] = keys, (flat[second : second + math.prod(shape)].view(shape) if cache.value_size else keys)
        if rows_before:
            begin = block_size * (layout.elements + 4 * rows_before[at.layer])
            parts = [_scales_in_pages(pages, begin, shape[:3], entry)]
            if cache.value_size:
                parts.append(_scales_in_pages(pages, begin + 4 * block_size * cache.num_heads, shape[:3], entry))
            scales[at.layer] = parts[0], parts[-1]
    nothing = torch.empty(0, 1, block_size, 1, dtype=dtype)
    pairs = [found.get(layer, (nothing, nothing)) for layer in layout.every_layer]
    keys_values = tuple(key for key, _ in pairs), tuple(value for _, value in pairs)
    of_rows = [scales.get(layer, (nothing, nothing)) for layer in layout.every_layer if scales]
    key_scales, value_scales = tuple(key for key, _ in of_rows), tuple(value for _, value in of_rows)
    return _Views(*keys_values, key_scales, value_scales, tuple(factors))


def _scales_in_pages(pages: Tensor, first_byte: int, shape: tuple[int, ...], entry_bytes: int) -> Tensor:
    """[entries, heads, block_size] float32: the scales of rows whose entries of one byte per element are entry_bytes
    apart. first_byte: where those of the first entry are."""
    if first_byte % 4 or entry_bytes % 4:
        raise ModelError(f"scales of a cache with entries of {entry_bytes} bytes cannot be kept beside states")
    floats = pages.view(-1).view(torch.float32)
    return torch.as_strided(floats, shape, (entry_bytes // 4, shape[2], 1), first_byte // 4)


def _states(
    spec: ArchSpec, place: RankCoordinates, groups: Sequence[CacheGroup], pages: Tensor
) -> tuple[LayerState | None, ...]:
    """pages: [num_blocks, bytes of a page] uint8"""
    found: list[LayerState | None] = []
    for places in state_layout(spec, place, groups).layers:
        units = {
            name: KeptUnits(
                pages.view(getattr(torch, at.kept.dtype)),
                torch.tensor(at.pages, device=pages.device),
                torch.tensor(at.offsets, device=pages.device),
                at.kept.shape[1:],
            )
            for name, at in places.items()
        }
        found.append(LayerState(units, torch.empty(0, 0, 0, device=pages.device)) if units else None)
    return tuple(found)


def with_drafts(
    cache: KVCache,
    spec: ArchSpec,
    place: RankCoordinates,
    num_rows: int,
    most_drafts: int,
    device: torch.device | str = "cpu",
) -> KVCache:
    """The cache with room for the inputs of most_drafts drafts of each row, in the layers that keep a state."""
    if not cache.states:
        return cache
    memory, states = _Memory(cache.num_blocks, cache.block_size, device), []
    mixers = [spec.for_ranks(place.tp_size).layers[layer].mixer for layer in place.layers(spec.num_layers)]
    for index, (mixer, state) in enumerate(zip(mixers, cache.states, strict=True)):
        shape = (num_rows, most_drafts, mixer.draft_elements(place.tp_size))
        drafted = memory.flat(index, math.prod(shape), torch.float32).view(shape) if state and most_drafts else None
        states.append(state if state is None or drafted is None else replace(state, drafted=drafted))
    allocated = (*cache.memory, *memory.of_key.values())
    return replace(cache, states=tuple(states), memory=allocated, pages=(*cache.pages, *memory.pages))


def _layer_scales(
    spec: ArchSpec,
    place: RankCoordinates,
    layer_scales: Sequence[LayerScales],
    device: torch.device | str,
    *,
    keys_only: bool,
) -> tuple[CacheScales, ...]:
    """keys_only: latent attention writes the key only; the value is a part of it."""
    found = []
    for layer in place.layers(spec.num_layers) if layer_scales else ():
        key, value = layer_scales[layer]
        cache = spec.for_ranks(place.tp_size).layers[layer].mixer.cache
        values, heads = key if keys_only else value, 1 if cache is None else cache.num_heads
        own = [_own_scale(each, heads, place, device) for each in (key, values)]
        found.append(CacheScales(own[0], own[1]))
    return tuple(found)
