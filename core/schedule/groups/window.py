"""Sliding windows: a row releases the blocks at the front that no later token reads.

Their entries in the table become the null block:

    group 0, full             7 12  3 25 31 40
    group 1, window of 2      0  0  0 26 30 41      first_held is 3

Such a block may be allocated again in the same step: steps run in the order of their plans, so a step in flight reads
the block before it is overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.core.options.cache_groups import CacheGroup
from headrace.core.schedule.block_hashes import BlockHash
from headrace.core.schedule.blocks import NULL_BLOCK, BlockPool
from headrace.core.schedule.groups.group import GroupBlocks, PrefixHit, Sizes, group_kind


@group_kind("sliding_window")
class WindowBlocks(GroupBlocks):
    def __init__(self, pool: BlockPool, group: CacheGroup, number: int, sizes: Sizes, table: np.ndarray) -> None:
        super().__init__(pool, group, number, sizes, table)
        self.first_held = np.zeros(sizes.num_rows, np.int32)
        """[num_rows]: entries before it were released, or never held."""
        self._needed = -(-(group.window - 1) // sizes.block_size)  # the last blocks of a prefix that later tokens read

    def enter(self, row: int, hit: PrefixHit, found: list[int]) -> None:
        first = self.first_held[row] = hit.num_blocks - len(found)
        self.table[row, :first] = NULL_BLOCK
        self.table[row, first : hit.num_blocks] = found

    def held(self, row: int, end: int) -> list[int]:
        held: list[int] = self.table[row, self.first_held[row] : end].tolist()
        return held

    def give_back(self, rows: np.ndarray, positions: np.ndarray) -> None:
        first_read = np.maximum(positions - (self.group.window - 1), 0) // self.sizes.block_size
        behind = first_read > self.first_held[rows]
        for row, end in zip(rows[behind].tolist(), first_read[behind].tolist(), strict=True):
            entries = self.table[row, self.first_held[row] : end]
            self.pool.release(entries.tolist())
            entries[:] = NULL_BLOCK
            self.first_held[row] = end

    def clear(self) -> None:
        self.first_held[:] = 0

    def longest(self, hashes: Sequence[BlockHash]) -> int:
        suffix, named = self.suffix, self.pool.named
        end = len(hashes)  # end of a run of cached blocks; the search goes backwards from the last block
        for index in range(len(hashes) - 1, -1, -1):
            if end - index > self._needed:
                break
            if not named(hashes[index] + suffix):
                end = index
        return end

    def needed(self, hashes: Sequence[BlockHash]) -> list[int]:
        return [self.named(each) for each in hashes[max(0, len(hashes) - self._needed) :]]
