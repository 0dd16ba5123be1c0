"""Groups of layers that hold the same tokens, and so share block tables; all groups share one pool of blocks.

A block is a page: the keys and values of `block_size` tokens of one group's layers. All groups' layers keep equally
much of a token together (a few groups may have fewer layers, and waste the rest), so all pages have the same bytes, and
any page may serve any group:

    Gemma 3, layers of a window (w) and full ones (f):   w w w w w f  w w w w w f  w w w w w f
    the group of each layer:                             1 2 3 4 5 0  1 2 3 4 5 0  1 2 3 4 5 0
    a page of any group:                                 3 layers' keys and values of 16 tokens

A page is a row of equal places. A layer that keeps less of a token than others shares its place with the next ones of
its group. Here full layers keep half of what the others do, and no two groups' pages differ:

    layers:                                              w w f  w w f  w w f  w w f
    the group of each layer:                             1 2 0  1 2 0  1 2 0  1 2 0
    a page of group 0, of group 1 or 2:                  [f f] [f f]   [w  ] [w  ]

A row has a block table for each group. A group of full attention holds all of a request's tokens; one of a sliding
window gives back blocks that no later token reads.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Literal

import msgspec

MOST_PADDING = 1.5
"""Kinds whose numbers of layers differ by less than this become one group each, of the larger number."""


class CacheGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers with one block table for each row."""

    kind: Literal["full", "sliding_window"] = "full"
    layers: tuple[int, ...] = ()
    """Their numbers in the whole model, ascending; a model's only group may leave them out. A pipeline's stage has some
    of them."""
    window: int = 0
    """Of a sliding window: a token reads itself and the window - 1 before it."""
    layers_in_place: int = 1
    """How many of its layers share one place of a page."""

    def first_read(self, position: int) -> int:
        """The first position that the token at `position` reads."""
        return max(0, position - self.window + 1) if self.window else 0

    def num_blocks(self, num_tokens: int, block_size: int, step_tokens: int = 1) -> int:
        """The most blocks that one request of num_tokens holds at once, computed by at most step_tokens a step."""
        whole = -(-num_tokens // block_size)
        if not self.window:
            return whole
        held_tokens = self.window - 1 + step_tokens
        return min(whole, (held_tokens + block_size - 2) // block_size + 1)  # they may begin at a block's last slot


ONE_GROUP = (CacheGroup(),)
"""Of a model whose layers all attend to all tokens."""


def group_layers(windows: Sequence[int | None], token_elements: Sequence[int] | None = None) -> tuple[CacheGroup, ...]:
    """The groups of a model: windows[i] is that of layer i, None where it attends to all tokens. token_elements[i]:
    values that layer i keeps of a token; None: as many as all others.

    Groups have as many places as the rarest kind needs, and those of full attention come first. The layers of a kind
    are dealt out in turns, so that each stage of a pipeline has about as many of each group.
    """
    sizes = token_elements or [1] * len(windows)
    place_elements = math.lcm(*sizes)
    kinds: dict[tuple[int, int], list[int]] = {}
    for layer, (window, size) in enumerate(zip(windows, sizes, strict=True)):
        kinds.setdefault((window or 0, place_elements // size), []).append(layer)
    counts = [-(-len(layers) // in_place) for (_, in_place), layers in kinds.items()]
    places = max(counts) if max(counts) < MOST_PADDING * min(counts) else min(counts)
    groups = []
    for (window, in_place), layers in sorted(kinds.items()):
        num_groups = -(-len(layers) // (places * in_place))
        for first in range(num_groups):
            own = tuple(layers[first::num_groups])
            kind: Literal["full", "sliding_window"] = "sliding_window" if window else "full"
            groups.append(CacheGroup(kind=kind, layers=own, window=window, layers_in_place=in_place))
    return tuple(groups)


def request_blocks(groups: Sequence[CacheGroup], num_tokens: int, block_size: int, step_tokens: int = 1) -> int:
    """The most blocks of all groups that one request holds at once; the arguments are those of `num_blocks`."""
    return sum(group.num_blocks(num_tokens, block_size, step_tokens) for group in groups)


def longest_request(
    groups: Sequence[CacheGroup], num_blocks: int, block_size: int, step_tokens: int, most_tokens: int
) -> int:
    """The tokens of the longest request, at most most_tokens, that num_blocks can hold."""

    def blocks(num_tokens: int) -> int:
        return request_blocks(groups, num_tokens, block_size, step_tokens)

    return bisect.bisect_right(range(1, most_tokens + 1), num_blocks, key=blocks)
