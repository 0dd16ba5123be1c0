"""The blocks of running rows: a block table for each row and cache group, all drawn from one pool.

A table's entry i is the block of the row's tokens [i * block_size, (i + 1) * block_size). The tables of a row have the
same length in all groups. A sliding-window group releases blocks at the front that no later token reads; their entries
become the null block:

    group 0, full             7 12  3 25 31 40
    group 1, window of 2      0  0  0 26 30 41      first_held is 3

Such a block may be allocated again in the same step: steps run in the order of their plans, so a step in flight reads
the block before it is overwritten. The window's position is the smaller of num_computed_tokens and num_known_tokens:
draft tokens that may still be rejected free nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from headrace.core.options.cache_groups import ONE_GROUP, CacheGroup
from headrace.core.schedule.block_hashes import BlockHash
from headrace.core.schedule.blocks import NULL_BLOCK, BlockPool
from headrace.core.schedule.requests import RowTable


class PrefixHit(NamedTuple):
    """The longest prefix of a request that every group has in the cache."""

    num_blocks: int
    """Length of the prefix."""
    blocks: tuple[list[int], ...]
    """For each group, the blocks that it needs: all of the prefix, or only the last ones within a sliding window."""

    @property
    def all_blocks(self) -> list[int]:
        return self.blocks[0] if len(self.blocks) == 1 else [block for each in self.blocks for block in each]


class BlockTables:
    """Owns the block tables and holds references to their blocks in the pool (a `BlockHolder`)."""

    def __init__(
        self,
        pool: BlockPool,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        groups: Sequence[CacheGroup] = ONE_GROUP,
        step_tokens: int = 1,
    ) -> None:
        """step_tokens: the most tokens that one step computes for a row."""
        self.pool, self.block_size, self.groups = pool, block_size, tuple(groups)
        self.table = np.zeros((len(groups), num_rows, -(-max_model_len // block_size)), np.int32)
        self.num_blocks = np.zeros(num_rows, np.int32)
        """[num_rows]: length of the row's tables, including released entries."""
        self.first_held = np.zeros((len(groups), num_rows), np.int32)
        """[num_groups, num_rows]: entries before it were released, or never held."""
        self._windows = [(number, group) for number, group in enumerate(self.groups) if group.window]
        self._full_groups = [number for number, group in enumerate(self.groups) if not group.window]
        self._suffixes = [b"", *(number.to_bytes(2, "little") for number in range(1, len(groups)))]
        self._first_tables = (np.arange(len(groups), dtype=np.int32) * num_rows)[:, None]
        self._step_tokens = step_tokens
        pool.holders.append(self)

    def held_blocks(self) -> Iterator[int]:
        for row in self.num_blocks.nonzero()[0].tolist():
            yield from self.blocks(row)

    def blocks(self, row: int) -> list[int]:
        """All blocks that the row holds, group after group."""
        end, held = self.num_blocks[row], list[int]()
        for table, first in zip(self.table[:, row], self.first_held[:, row].tolist(), strict=True):
            held += table[first:end].tolist()
        return held

    def name(self, token_hash: BlockHash, group: int) -> BlockHash:
        """The block's name in the pool: `token_hash` (of its tokens and all before them) and a suffix for the group."""
        return token_hash + self._suffixes[group]

    # --- growing --------------------------------------------------------------------------------------------------

    def num_free_to_grow(self) -> int:
        """How many blocks can still be added in every group."""
        return self.pool.num_available // len(self.groups)

    def give_back(self, rows: Sequence[int] | np.ndarray, table: RowTable) -> None:
        """Releases blocks of `rows`, [n], that lie before the sliding window of all later tokens."""
        if not self._windows:
            return
        rows = np.asarray(rows)
        # A token that is not known yet may be rejected and computed again.
        positions = np.minimum(table.num_computed_tokens[rows], table.num_known_tokens[rows])
        for number, group in self._windows:
            first_read = np.maximum(positions - (group.window - 1), 0) // self.block_size
            behind = first_read > self.first_held[number, rows]
            for row, end in zip(rows[behind].tolist(), first_read[behind].tolist(), strict=True):
                entries = self.table[number, row, self.first_held[number, row] : end]
                self.pool.release(entries.tolist())
                entries[:] = NULL_BLOCK
                self.first_held[number, row] = end

    def extend_each(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Adds one block to each of `rows` (distinct) in every group. Returns the tables that grew and the new blocks,
        as in `StepPlan`. The caller has checked `num_free_to_grow`."""
        blocks = np.array(self.pool.allocate(len(rows) * len(self.groups)), np.int32)
        self.table[:, rows, self.num_blocks[rows]] = blocks.reshape(len(self.groups), -1)
        self.num_blocks[rows] += 1
        return (rows if len(self.groups) == 1 else (self._first_tables + rows).reshape(-1)), blocks

    def extend(self, row: int, count: int) -> tuple[list[int], list[int]]:
        """Adds `count` blocks to the row in every group; otherwise like `extend_each`."""
        blocks = self.pool.allocate(count * len(self.groups))
        start = int(self.num_blocks[row])
        self.table[:, row, start : start + count] = np.array(blocks, np.int32).reshape(len(self.groups), -1)
        self.num_blocks[row] += count
        return np.repeat(self._first_tables + row, count).tolist(), blocks

    def release(self, row: int) -> None:
        """Releases all blocks of the row."""
        self.pool.release(self.blocks(row))
        self.num_blocks[row] = 0

    def clear(self) -> None:
        """Empties all tables and resets the pool."""
        self.num_blocks[:] = 0
        self.first_held[:] = 0
        self.pool.clear()

    # --- the prefix cache -----------------------------------------------------------------------------------------

    def find(self, hashes: Sequence[BlockHash]) -> PrefixHit:
        """The longest prefix of `hashes` for which each group has the blocks that it needs. Takes no references."""
        if not self._windows and len(self.groups) == 1:
            found = self.pool.find(hashes)
            return PrefixHit(len(found), (found,))
        length, shortened = len(hashes), True
        while shortened:
            before = length
            for number in range(len(self.groups)):
                length = self._longest(hashes[:length], number)
            shortened = length < before
        return PrefixHit(length, tuple(self._needed(hashes[:length], number) for number in range(len(self.groups))))

    def may_go_on(self, hashes: Sequence[BlockHash]) -> bool:
        """Whether a hit can be longer than these first blocks of a request: each full-attention group has the last."""
        return not hashes or all(self.pool.named(self.name(hashes[-1], number)) for number in self._full_groups)

    def _longest(self, hashes: Sequence[BlockHash], number: int) -> int:
        """The longest hit within `hashes` for this group alone, in blocks."""
        window, suffix, named = self.groups[number].window, self._suffixes[number], self.pool.named
        if not window:
            return next((i for i, each in enumerate(hashes) if not named(each + suffix)), len(hashes))
        needed = -(-(window - 1) // self.block_size)
        end = len(hashes)  # end of a run of cached blocks; the search goes backwards from the last block
        for index in range(len(hashes) - 1, -1, -1):
            if end - index > needed:
                break
            if not named(hashes[index] + suffix):
                end = index
        return end

    def _needed(self, hashes: Sequence[BlockHash], number: int) -> list[int]:
        window, suffix = self.groups[number].window, self._suffixes[number]
        first = max(0, len(hashes) - -(-(window - 1) // self.block_size)) if window else 0
        return [self.pool.named(each + suffix) for each in hashes[first:]]

    def num_missing(self, num_tokens: int, hit: PrefixHit) -> int:
        """The most blocks, in all groups together and in addition to the hit's, that a request of num_tokens holds at
        once."""
        return sum(
            max(0, group.num_blocks(num_tokens, self.block_size, self._step_tokens) - len(held))
            for group, held in zip(self.groups, hit.blocks, strict=True)
        )

    def enter(self, row: int, hit: PrefixHit) -> None:
        """Starts the row's tables with the hit's blocks and takes a reference to each."""
        self.num_blocks[row] = end = hit.num_blocks
        for number, blocks in enumerate(hit.blocks):
            self.pool.acquire(blocks)
            first = self.first_held[number, row] = end - len(blocks)
            self.table[number, row, :first] = NULL_BLOCK
            self.table[number, row, first:end] = blocks

    def publish(self, rows: int | np.ndarray, indices: slice | np.ndarray, hashes: Sequence[BlockHash]) -> None:
        """Adds full blocks to the prefix cache: those at `indices` of one row's tables, or at one index of each of
        several rows. hashes: of the blocks' tokens."""
        for blocks, suffix in zip(self.table[:, rows, indices].tolist(), self._suffixes, strict=True):
            for block, token_hash in zip(blocks, hashes, strict=True):
                if block != NULL_BLOCK:  # else the window group released it before its last token was known
                    self.pool.publish(block, token_hash + suffix)

    def forget(self, token_hashes: Sequence[BlockHash]) -> None:
        """Removes the blocks with these hashes from the prefix cache, in all groups."""
        for suffix in self._suffixes:
            self.pool.forget(each + suffix for each in token_hashes)
