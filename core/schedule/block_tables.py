"""The blocks of running rows: a block table for each row and cache group, all drawn from one pool.

A table's entry i is the block of tokens [i * block_size, (i + 1) * block_size) of the row. Tables of one row have the
same length in all groups. Groups of a sliding window give back blocks at the front that no later token reads; their
entries become the null block:

    group 0, full             7 12  3 25 31 40
    group 1, window of 2      0  0  0 26 30 41      first_held is 3

What is given back may be handed out in the same step: steps run in the order of their plans, so a step in flight that
still reads such a block reads it before it is written again. A position counts as passed once its token is known and
planned, whichever is less: a token that may yet be rejected frees nothing.
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
    """The longest beginning of a request that every group has in the cache."""

    num_blocks: int
    blocks: tuple[list[int], ...]
    """Of each group those that are needed: all, or the last of them where a window hides the others."""

    @property
    def all_blocks(self) -> list[int]:
        return self.blocks[0] if len(self.blocks) == 1 else [block for each in self.blocks for block in each]


class BlockTables:
    """Owns the tables and takes the pool's references for them (a `BlockHolder`)."""

    def __init__(
        self,
        pool: BlockPool,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        groups: Sequence[CacheGroup] = ONE_GROUP,
        step_tokens: int = 1,
    ) -> None:
        """step_tokens: the most tokens that one step computes of a row."""
        self.pool, self.block_size, self.groups = pool, block_size, tuple(groups)
        self.table = np.zeros((len(groups), num_rows, -(-max_model_len // block_size)), np.int32)
        self.num_blocks = np.zeros(num_rows, np.int32)
        """[num_rows]: the tables' length, entries given back included."""
        self.first_held = np.zeros((len(groups), num_rows), np.int32)
        """[num_groups, num_rows]: entries before it have been given back, or were never held."""
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
        """All that the row holds, group after group."""
        end, held = self.num_blocks[row], list[int]()
        for table, first in zip(self.table[:, row], self.first_held[:, row].tolist(), strict=True):
            held += table[first:end].tolist()
        return held

    def name(self, token_hash: BlockHash, group: int) -> BlockHash:
        """What a block of this group is found by; `token_hash` is of its tokens and those before."""
        return token_hash + self._suffixes[group]

    # --- growing --------------------------------------------------------------------------------------------------

    def num_free_to_grow(self) -> int:
        """By how many blocks in every group a row can grow."""
        return self.pool.num_available // len(self.groups)

    def give_back(self, rows: Sequence[int] | np.ndarray, table: RowTable) -> None:
        """Blocks of rows [n] that no token to come reads go back to the pool."""
        if not self._windows:
            return
        rows = np.asarray(rows)
        # A token that is not known yet may be rejected, and computed again.
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
        """One block more for each of rows (distinct) in every group: the tables that got one and the blocks, as in
        `StepPlan`. The caller has checked `num_free_to_grow`."""
        blocks = np.array(self.pool.allocate(len(rows) * len(self.groups)), np.int32)
        self.table[:, rows, self.num_blocks[rows]] = blocks.reshape(len(self.groups), -1)
        self.num_blocks[rows] += 1
        return (rows if len(self.groups) == 1 else (self._first_tables + rows).reshape(-1)), blocks

    def extend(self, row: int, count: int) -> tuple[list[int], list[int]]:
        """`count` blocks more for the row in every group; the rest as in `extend_each`."""
        blocks = self.pool.allocate(count * len(self.groups))
        start = int(self.num_blocks[row])
        self.table[:, row, start : start + count] = np.array(blocks, np.int32).reshape(len(self.groups), -1)
        self.num_blocks[row] += count
        return np.repeat(self._first_tables + row, count).tolist(), blocks

    def release(self, row: int) -> None:
        """The row holds nothing any more."""
        self.pool.release(self.blocks(row))
        self.num_blocks[row] = 0

    def clear(self) -> None:
        """No row holds anything, and the pool is as it was made."""
        self.num_blocks[:] = 0
        self.first_held[:] = 0
        self.pool.clear()

    # --- the prefix cache -----------------------------------------------------------------------------------------

    def find(self, hashes: Sequence[BlockHash]) -> PrefixHit:
        """The longest run of `hashes` from the start of which each group has the blocks that it needs. Takes no
        reference."""
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
        """Whether a hit could be longer than these first blocks of a request."""
        return not hashes or all(self.pool.named(self.name(hashes[-1], number)) for number in self._full_groups)

    def _longest(self, hashes: Sequence[BlockHash], number: int) -> int:
        """How many blocks a hit within `hashes` can be long for this group alone."""
        window, suffix, named = self.groups[number].window, self._suffixes[number], self.pool.named
        if not window:
            return next((i for i, each in enumerate(hashes) if not named(each + suffix)), len(hashes))
        needed = -(-(window - 1) // self.block_size)
        end = len(hashes)  # of a run of blocks that are there, which is searched from the last one backwards
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
        """How many blocks beside the hit's a request of num_tokens will hold at once in all groups."""
        return sum(
            max(0, group.num_blocks(num_tokens, self.block_size, self._step_tokens) - len(held))
            for group, held in zip(self.groups, hit.blocks, strict=True)
        )

    def enter(self, row: int, hit: PrefixHit) -> None:
        """The row begins with the hit's blocks, one more reference to each."""
        self.num_blocks[row] = end = hit.num_blocks
        for number, blocks in enumerate(hit.blocks):
            self.pool.acquire(blocks)
            first = self.first_held[number, row] = end - len(blocks)
            self.table[number, row, :first] = NULL_BLOCK
            self.table[number, row, first:end] = blocks

    def publish(self, rows: int | np.ndarray, indices: slice | np.ndarray, hashes: Sequence[BlockHash]) -> None:
        """The blocks at these indices of a row's tables, or at one index of each row, are full of tokens with these
        hashes, and can be found from now on."""
        for blocks, suffix in zip(self.table[:, rows, indices].tolist(), self._suffixes, strict=True):
            for block, token_hash in zip(blocks, hashes, strict=True):
                if block != NULL_BLOCK:  # else it was given back before its last token was known
                    self.pool.publish(block, token_hash + suffix)

    def forget(self, token_hashes: Sequence[BlockHash]) -> None:
        """From now on the blocks of these tokens cannot be found in any group."""
        for suffix in self._suffixes:
            self.pool.forget(each + suffix for each in token_hashes)
