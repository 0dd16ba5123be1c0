"""Groups of layers that hold the same tokens, and so share block tables; all groups share one pool of blocks.

A block is a page: the keys and values of `block_size` tokens of one group's layers. All groups have equally many
layers (a few may have fewer, and waste the rest), so all pages have the same bytes, and any page may serve any group:

    Gemma 3, layers of a window (w) and full ones (f):   w w w w w f  w w w w w f  w w w w w f
    the group of each layer:                             1 2 3 4 5 0  1 2 3 4 5 0  1 2 3 4 5 0
    a page of any group:                                 3 layers' keys and values of 16 tokens

A row has a block table for each group. A group of full attention holds all of a request's tokens; one of a sliding
window gives back blocks that no later token reads. A kind that keeps something else of a token (latent attention), or
one state for all of them, becomes another `kind` here, with pages made equal by how many tokens they hold.
"""

from __future__ import annotations

import bisect
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


def group_layers(windows: Sequence[int | None]) -> tuple[CacheGroup, ...]:
    """The groups of a model: windows[i] is that of layer i, None where it attends to all tokens.

    Groups have as many layers as the rarest kind has, and those of full attention come first. The layers of a kind are
    dealt out in turns, so that each stage of a pipeline has about as many of each group.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    counts = [len(layers) for layers in kinds.values()]
    size = max(counts) if max(counts) < MOST_PADDING * min(counts) else min(counts)
    groups = []
    for window, layers in sorted(kinds.items(), key=lambda each: each[0] or 0):
        num_groups = -(-len(layers) // size)
        for first in range(num_groups):
            own = tuple(layers[first::num_groups])
            groups.append(CacheGroup(kind="sliding_window" if window else "full", layers=own, window=window or 0))
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
