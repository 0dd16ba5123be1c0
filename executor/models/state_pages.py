"""How a rank lays out the pages of a model with layers that keep a state per sequence.

One pool serves all layers, so a page is one run of bytes: the keys and values of `block_size` tokens in a group's
layers, or a part of one sequence's state in all state layers. A state takes the same number of pages on every rank.

    page, group of full attention   [ layer 2: keys | values | layer 5: keys | values |   ]
    first page of a state           [ layer 0: past inputs | layer 1: head 0 | head 1 |   ]    a unit is never divided
    second page                     [ layer 1: head 2 | head 3 | ...                      ]

The tensor of an attention layer begins within the first page. A page is a whole number of its entries, so that kernels
see one ordinary tensor, and block tables have the numbers of blocks times the entries of a page.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.core.options.cache_groups import CacheGroup
from headrace.executor.models.arch import STATE_BYTES, ArchSpec, Kept
from headrace.executor.parallel.rank_place import RankCoordinates

ALIGNED_BYTES = 64
"""To a multiple of which a unit is rounded up: a cache line."""


@dataclass(frozen=True)
class KeptPlace:
    """Where the units of one kept thing are in a sequence's pages."""

    kept: Kept
    pages: tuple[int, ...]
    offsets: tuple[int, ...]
    """In elements of the unit's type, from the page's begin."""


def state_pages(spec: ArchSpec, page_bytes: int) -> int:
    """How many pages a sequence's state takes; 0 without one. page_bytes: of a page's keys and values; 0 if the model
    keeps none."""
    needed = sum(unit for layer in spec.own_states(1) for kept in layer for unit in _units(kept))
    if not needed or not page_bytes:
        return 1 if needed else 0
    return -(-needed // page_bytes)


def state_layout(spec: ArchSpec, place: RankCoordinates, groups: Sequence[CacheGroup]) -> StateLayout:
    """The layout of a rank's states; without a state group it is empty."""
    pages = groups[-1].pages
    states = spec.own_states(place.tp_size)
    own = [states[layer] for layer in place.layers(spec.num_layers)]
    units = [unit for layer in own for kept in layer for unit in _units(kept)]
    if not pages or not units:
        return StateLayout(0, tuple({} for _ in own))
    least = max(*units, -(-sum(units) // pages))
    candidates = range(least, least + max(units) + 1)  # the last fits: a page wastes less than a unit
    size = candidates[bisect.bisect_left(candidates, True, key=lambda size: _pages_taken(units, size) <= pages)]
    return StateLayout(size, _placed(own, size))


@dataclass(frozen=True)
class StateLayout:
    page_bytes: int
    """Of a page that the states need at least."""
    layers: tuple[Mapping[str, KeptPlace], ...]
    """By layer of the rank: places by `Kept.name`; empty for layers that cache tokens."""


def _units(kept: Kept) -> list[int]:
    """The bytes of each unit."""
    return [-(-kept.unit_bytes // ALIGNED_BYTES) * ALIGNED_BYTES] * kept.shape[0]


def _pages_taken(units: Sequence[int], size: int) -> int:
    page = offset = 0
    for unit in units:
        page, offset = _next(page, offset, unit, size)
        offset += unit
    return page + 1


def _next(page: int, offset: int, unit: int, size: int) -> tuple[int, int]:
    """Where a unit goes: here, or at the begin of the next page."""
    return (page, offset) if offset + unit <= size else (page + 1, 0)


def _placed(own: Sequence[Sequence[Kept]], size: int) -> tuple[Mapping[str, KeptPlace], ...]:
    page = offset = 0
    found = []
    for layer in own:
        places = {}
        for kept in layer:
            pages, offsets = [], []
            for unit in _units(kept):
                page, offset = _next(page, offset, unit, size)
                pages.append(page)
                offsets.append(offset // STATE_BYTES[kept.dtype])
                offset += unit
            places[kept.name] = KeptPlace(kept, tuple(pages), tuple(offsets))
        found.append(places)
    return tuple(found)
