"""Recurrent layers: a row holds a constant number of pages, its state after the tokens that it has computed.

The pages of a state are a bundle of the pool (`blocks.py`). A state cannot be cut to fewer tokens, so a prefix is
cached only where a *snapshot* of exactly that prefix was kept, in a bundle of its own under the prefix's hash. Kept
states are not copied: a row that starts from one reads it in its first step, as the others that share it do, and writes
its own pages:

    row 2    own pages     41 42 43      source   17 18 19, the state after the first 48 tokens, under their hash
    row 5    own pages     50 51 52      source   17 18 19

A row's *spare* is a snapshot that is overwritten at each end of a block while the row decodes. It is an ordinary entry
of the cache under a name that no hash has, so it lasts until pages are short, and gets the prefix's name when the row
is left.

Which states are kept is decided in `core/schedule/features/state_snapshots.py`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence

import numpy as np

from headrace.core.options.cache_groups import CacheGroup
from headrace.core.schedule.block_hashes import BlockHash
from headrace.core.schedule.blocks import NULL_BLOCK, BlockPool
from headrace.core.schedule.groups.group import GroupBlocks, PrefixHit, Sizes, group_kind

SEEN_HASHES = 1 << 16
"""Blocks that a model without keys and values remembers to have computed."""


@group_kind("state")
class StatePages(GroupBlocks):
    grows = False

    def __init__(self, pool: BlockPool, group: CacheGroup, number: int, sizes: Sizes, table: np.ndarray) -> None:
        super().__init__(pool, group, number, sizes, np.zeros((sizes.num_rows, group.pages), np.int32))
        self.sources: dict[int, int] = {}
        """Row that has not been computed yet -> leader of the snapshot that it starts from."""
        self.reach = np.zeros(sizes.num_rows, np.int32)
        """[num_rows]: how much of the row's prompt was known when it was entered, in blocks (`PrefixHit.reach`)."""
        self._read: deque[tuple[int, int]] = deque()  # (step in flight that reads a snapshot, its leader)
        self._kept: dict[int, list[tuple[int, BlockHash]]] = {}  # row -> its snapshots' lengths in blocks, and names
        self._seen: OrderedDict[BlockHash, None] = OrderedDict()  # blocks that rows computed, if no group tells it
        self._is_alone = number == 0

    # --- rows ---------------------------------------------------------------------------------------------------

    def num_missing(self, num_tokens: int, found: Sequence[int]) -> int:
        return self.group.pages

    def enter(self, row: int, hit: PrefixHit, found: list[int]) -> None:
        self.table[row] = self.pool.allocate_bundle(self.group.pages)
        self.reach[row], self._kept[row] = hit.reach, []
        if found:
            self.sources[row] = found[0]
            self._kept[row].append((hit.num_blocks, self.pool.name_of(found[0])))

    def pages(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The row's own pages, and those that it starts from, none if it starts from nothing."""
        source = self.pool.bundle(self.sources[row]) if row in self.sources else ()
        return self.table[row].copy(), np.array(source, np.int32)

    def held(self, row: int, end: int) -> list[int]:
        own = [int(self.table[row, 0])] if row in self._kept else []
        return [*own, self.sources[row]] if row in self.sources else own

    def all_held(self, ends: np.ndarray) -> Iterator[int]:
        for row in self._kept:
            yield from self.held(row, 0)
        for _, leader in self._read:
            yield leader

    def leaving(self, row: int, held: list[int], num_first: int, end: int) -> list[int]:
        """Puts the row's snapshots that are still cached between its blocks: each is evicted before the blocks that it
        continues, and after those that are of no use without it."""
        self.sources.pop(row, None)
        for length, name in sorted(self._kept.pop(row, ()), reverse=True):
            leader = self.pool.named(name)
            if leader != NULL_BLOCK:
                self.pool.acquire([leader])
                held.insert(max(0, num_first - (end - length)), leader)
        return held

    def clear(self) -> None:
        self.sources.clear()
        self._read.clear()
        self._kept.clear()

    # --- steps --------------------------------------------------------------------------------------------------

    def planned(self, step: int, rows: np.ndarray) -> None:
        """The step computes `rows`: the first step of a row is the one that reads its source."""
        for row in self.sources.keys() & rows.tolist() if self.sources else ():
            self._read.append((step, self.sources.pop(row)))

    def computed(self, step: int) -> None:
        """The result of this step has come, so what it read is free to go."""
        while self._read and self._read[0][0] <= step:
            self.pool.release([self._read.popleft()[1]])

    # --- snapshots ----------------------------------------------------------------------------------------------

    def keep(self, row: int, length: int, token_hash: BlockHash) -> list[int] | None:
        """Pages for the row's state after `length` blocks, which end in this hash, with a reference to their leader
        that the caller releases when the step is planned. None if it is kept already, or pages are short."""
        name = token_hash + self.suffix
        self._kept[row].append((length, name))
        return None if self.pool.named(name) else self._new(name)

    def spare(self, row: int) -> list[int] | None:
        """As `keep`: the pages of the row's spare, whose content is overwritten."""
        leader = self.pool.named(_spare_name(row))
        if leader:
            self.pool.acquire([leader])
            return self.pool.bundle(leader)
        return self._new(_spare_name(row))

    def _new(self, name: BlockHash) -> list[int] | None:
        if self.pool.num_available < self.group.pages:
            return None
        pages = self.pool.allocate_bundle(self.group.pages)
        self.pool.publish(pages[0], name)
        return pages

    def drop_spare(self, row: int) -> None:
        self.pool.forget([_spare_name(row)])

    def keep_spare(self, row: int, length: int, token_hash: BlockHash) -> None:
        """The row's spare, which is its state after `length` blocks, becomes a snapshot of its own."""
        leader = self.pool.named(_spare_name(row))
        if leader:
            name = token_hash + self.suffix
            self.pool.acquire([leader])
            self.drop_spare(row)
            self.pool.publish(leader, name)
            self.pool.release([leader])
            self._kept[row].append((length, name))

    # --- the prefix cache ---------------------------------------------------------------------------------------

    def longest(self, hashes: Sequence[BlockHash]) -> int:
        suffix, named = self.suffix, self.pool.named
        return next((end for end in range(len(hashes), 0, -1) if named(hashes[end - 1] + suffix)), 0)

    def needed(self, hashes: Sequence[BlockHash]) -> list[int]:
        return [self.named(hashes[-1])] if hashes else []

    def known(self, hashes: Sequence[BlockHash]) -> int:
        if not self._is_alone:
            return len(hashes)
        return next((i for i, each in enumerate(hashes) if each not in self._seen), len(hashes))

    def may_go_on(self, token_hash: BlockHash) -> bool:
        return not self._is_alone or token_hash in self._seen

    def filled(self, hashes: Sequence[BlockHash]) -> None:
        for each in hashes:
            self._seen[each] = None
            self._seen.move_to_end(each)
        while len(self._seen) > SEEN_HASHES:
            self._seen.popitem(last=False)


def _spare_name(row: int) -> BlockHash:
    return b"spare" + row.to_bytes(4, "little")  # 9 bytes, as no hash with a suffix has
