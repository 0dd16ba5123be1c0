"""Cache groups: layers that keep the same tokens and so share block tables. All groups share one pool of blocks.

A block is a page: the keys and values of `block_size` tokens in one group's layers. The layers of each group together
keep the same amount per token (a group may have fewer layers and waste the rest). So all pages have the same size in
bytes, and any page can serve any group:

    Gemma 3, sliding-window (w) and full layers (f):     w w w w w f  w w w w w f  w w w w w f
    the group of each layer:                             1 2 3 4 5 0  1 2 3 4 5 0  1 2 3 4 5 0
    a page of any group:                                 3 layers' keys and values of 16 tokens

A page consists of places of equal size. Layers that keep less per token than others share a place with the next layers
of their group. Here full layers keep half as much per token as the others, and all pages still have the same size:

    layers:                                              w w f  w w f  w w f  w w f
    the group of each layer:                             1 2 0  1 2 0  1 2 0  1 2 0
    a page of group 0, of group 1 or 2:                  [f f] [f f]   [w  ] [w  ]

A row has a block table for each group. A full-attention group holds all of a request's tokens; a sliding-window group
releases blocks that no later token reads. All recurrent layers form one group, the last one, in which a row holds a
constant number of pages for its state, however long it gets.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

import msgspec

PAGE_ALIGNMENT = 64
MOST_PADDING = 1.5
"""If the kinds' numbers of layers differ by less than this factor, each kind is one group of the larger number."""


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share one block table per row."""

    kind: str = "full"
    """full, sliding_window, state or a kind of another package's: which class in `core/schedule/groups/` keeps the
    rows' tables"""
    layers: tuple[int, ...] = ()
    """The layers' numbers in the whole model, ascending; may be empty for a model's only group. A pipeline stage has
    some of them."""
    window: int = 0
    """Size of a sliding window: a token reads itself and at most the window - 1 tokens before it. 0: full attention."""
    layers_in_place: int = 1
    """How many of the layers share one place of a page."""
    pages: int = 0
    """Of kind "state": how many pages a row's state takes, whatever its length. 0 for the other kinds."""

    def first_read(self, position: int) -> int:
        """The first position that the token at `position` reads."""
        return max(0, position - self.window + 1) if self.window else 0

    def num_blocks(self, num_tokens: int, block_size: int, step_tokens: int = 1) -> int:
        """The most blocks that a request of num_tokens holds at once if a step computes at most step_tokens of it."""
        if self.pages:
            return self.pages
        whole = -(-num_tokens // block_size)
        if not self.window:
            return whole
        held_tokens = self.window - 1 + step_tokens
        return min(whole, (held_tokens + block_size - 2) // block_size + 1)  # the first may be in a block's last slot


ONE_GROUP = (CacheGroup(),)
"""The groups of a model in which every layer attends to all tokens."""


def group_layers(
    windows: Sequence[int | None], token_elements: Sequence[int] | None = None, kinds: Sequence[str] | None = None
) -> tuple[CacheGroup, ...]:
    """The cache groups of a model. windows[i]: window of layer i, None for full attention. token_elements[i]: number of
    values that layer i keeps per token; None: all layers keep equally many. kinds[i]: kind of layer i's group; empty:
    its window decides.

    Each group has as many places as the rarest kind of layers needs (but see MOST_PADDING); full-attention groups come
    first. The layers of a kind are assigned to its groups in turn, so that each pipeline stage has about equally many
    of each group.
    """
    if not windows:
        return ()
    sizes = token_elements or [1] * len(windows)
    place_elements = math.lcm(*sizes)
    alike: dict[tuple[int, int, str], list[int]] = {}
    for layer, (window, size, kind) in enumerate(zip(windows, sizes, kinds or [""] * len(windows), strict=True)):
        named = kind or ("sliding_window" if window else "full")
        alike.setdefault((window or 0, place_elements // size, named), []).append(layer)
    counts = [-(-len(layers) // in_place) for (_, in_place, _), layers in alike.items()]
    places = max(counts) if max(counts) < MOST_PADDING * min(counts) else min(counts)
    groups = []
    for (window, in_place, kind), layers in sorted(alike.items()):
        num_groups = -(-len(layers) // (places * in_place))
        for first in range(num_groups):
            own = tuple(layers[first::num_groups])
            groups.append(CacheGroup(kind=kind, layers=own, window=window, layers_in_place=in_place))
    return tuple(groups)


def request_blocks(groups: Sequence[CacheGroup], num_tokens: int, block_size: int, step_tokens: int = 1) -> int:
    """The most blocks, in all groups together, that one request holds at once. Arguments as in `num_blocks`."""
    return sum(group.num_blocks(num_tokens, block_size, step_tokens) for group in groups)


def page_bytes(token_bytes: int, state_bytes: int, entry_bytes: int) -> int:
    """Size of a block on one rank. token_bytes: of the keys and values in it; state_bytes: of a page of a sequence's
    state, 0 where no layer keeps one; entry_bytes: the page is a whole number of these where states share it."""
    if not state_bytes:
        return token_bytes
    unit = math.lcm(entry_bytes or 1, PAGE_ALIGNMENT)
    return -(-max(token_bytes, state_bytes) // unit) * unit


def longest_request(
    groups: Sequence[CacheGroup], num_blocks: int, block_size: int, step_tokens: int, most_tokens: int
) -> int:
    """The length in tokens of the longest request that num_blocks can hold, at most most_tokens."""

    def blocks(num_tokens: int) -> int:
        return request_blocks(groups, num_tokens, block_size, step_tokens)

    return bisect.bisect_right(range(1, most_tokens + 1), num_blocks, key=blocks)
