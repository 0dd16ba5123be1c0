"""The protocol of a cache group: the blocks that rows hold in it, and what the prefix cache has of it.

A kind of groups is a class that `group_kind` registers under `CacheGroup.kind`. Another package registers one under the
entry points `headrace.cache_kinds`, by the name that its mixers have as their `cache_kind`. It is told no size of its
own: `CacheGroup.window` is the mixers' `sliding_window`, and 0 for mixers that read further back. What a hook of such a
kind may not do without ending the engine is said in `contained.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np

from headrace.core.options.cache_groups import CacheGroup
from headrace.core.schedule.block_hashes import BlockHash
from headrace.core.schedule.blocks import BlockPool
from headrace.ipc.failure import OptionError
from headrace.ipc.plugins import cache_kind_entries, installed_class


class PrefixHit(NamedTuple):
    """The longest prefix of a request that every group has in the cache."""

    num_blocks: int
    """Length of the prefix."""
    blocks: tuple[list[int], ...]
    """For each group, the blocks that it needs: all of the prefix, only the last ones within a sliding window, or the
    leader of the kept state."""
    reach: int = 0
    """Length of the longest prefix that some row has computed, as far as is known; at least num_blocks."""

    @property
    def all_blocks(self) -> list[int]:
        return self.blocks[0] if len(self.blocks) == 1 else [block for each in self.blocks for block in each]


class Sizes(NamedTuple):
    """What the tables of all groups have in common."""

    num_rows: int
    max_blocks: int
    """Length of the longest table that grows."""
    block_size: int
    step_tokens: int
    """The most tokens that one step computes for a row."""


class GroupBlocks:
    """The part of one cache group in all rows. A block's name is a block hash and the group's suffix."""

    grows: ClassVar[bool] = True
    """The table of a row has an entry for each `block_size` of its tokens, and `table` is [num_rows, max_blocks]. Of
    kinds of other packages always."""

    def __init__(self, pool: BlockPool, group: CacheGroup, number: int, sizes: Sizes, table: np.ndarray) -> None:
        """number: of the group in the model. table: int32, this group's part of the tables of all groups that grow;
        empty for a group that does not."""
        self.pool, self.group, self.sizes, self.table = pool, group, sizes, table
        self.suffix = number.to_bytes(2, "little") if number else b""

    # --- rows ---------------------------------------------------------------------------------------------------

    def num_missing(self, num_tokens: int, found: Sequence[int]) -> int:
        """The most blocks that a request of num_tokens holds at once in addition to those found in the cache."""
        return max(0, self.group.num_blocks(num_tokens, self.sizes.block_size, self.sizes.step_tokens) - len(found))

    def enter(self, row: int, hit: PrefixHit, found: list[int]) -> None:
        """A request enters the row with what was found for this group, to which references have been taken."""
        self.table[row, : hit.num_blocks] = found

    def held(self, row: int, end: int) -> list[int]:
        """The blocks that the row holds, in the order of its tokens. end: the length of its growing tables."""
        held: list[int] = self.table[row, :end].tolist()
        return held

    def all_held(self, ends: np.ndarray) -> Iterator[int]:
        """What all rows hold. ends: [num_rows], the lengths of the growing tables."""
        for row in ends.nonzero()[0].tolist():
            yield from self.held(row, int(ends[row]))

    def give_back(self, rows: np.ndarray, positions: np.ndarray) -> None:
        """Releases what no token from `positions`, [num_rows], on reads."""

    def leaving(self, row: int, held: list[int], num_first: int, end: int) -> list[int]:
        """The blocks to release when the row is left; those at the end are evicted first. held: of all groups, of which
        num_first belong to the first one; they may be rearranged, and blocks be added with a reference to each."""
        return held

    def clear(self) -> None:
        """Forgets all rows, without releasing anything."""

    # --- the prefix cache ---------------------------------------------------------------------------------------

    def named(self, token_hash: BlockHash) -> int:
        """The block that the cache has of this group for the tokens up to there, or NULL_BLOCK."""
        return self.pool.named(token_hash + self.suffix)

    def find(self, hashes: Sequence[BlockHash]) -> tuple[int, list[int]]:
        """`longest`, and what it needs, for a model's only group."""
        end = self.longest(hashes)
        return end, self.needed(hashes[:end])

    def longest(self, hashes: Sequence[BlockHash]) -> int:
        """The longest hit within `hashes` for this group alone, in blocks."""
        raise NotImplementedError

    def known(self, hashes: Sequence[BlockHash]) -> int:
        """How many of these first blocks some row has computed, whether a hit can end there or not."""
        return self.longest(hashes)

    def needed(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks that a hit of all `hashes` needs."""
        raise NotImplementedError

    def may_go_on(self, token_hash: BlockHash) -> bool:
        """Whether a hit can be longer than a prefix that ends in this block."""
        return True

    def filled(self, hashes: Sequence[BlockHash]) -> None:
        """Rows have filled the blocks of these hashes. Called only if no group's table grows."""


K = TypeVar("K", bound=type[GroupBlocks])
KINDS: dict[str, type[GroupBlocks]] = {}
"""The registered classes by `CacheGroup.kind`."""


def group_kind(name: str) -> Callable[[K], K]:
    """Registers the class of a kind of cache groups."""

    def register(kind: K) -> K:
        KINDS[name] = kind
        return kind

    return register


def class_of(kind: str) -> type[GroupBlocks]:
    """The class of a kind of cache groups. Raises OptionError if none is registered or installed under this name, or
    two are."""
    entries, registered = cache_kind_entries(), KINDS.get(kind)
    entry = entries.get(kind)
    if entry is None:
        if registered is not None:
            return registered
        raise OptionError(
            f"the model's layers have the cache kind {kind!r}, which nothing registers; there are "
            f"{', '.join(sorted({*KINDS, *entries}))}"
        )
    found = installed_class(entry, "cache kind", GroupBlocks)
    if registered is not None and registered is not found:
        raise OptionError(
            f"the cache kind {kind}, {entry.value}, has the name of {registered.__module__}.{registered.__qualname__}; "
            "it must have one of its own"
        )
    if not found.grows:
        raise OptionError(
            f"the cache kind {kind}, {entry.value}, has grows={found.grows!r}; the tables of another package's kind "
            "grow with their rows"
        )
    return found
