"""The blocks of running rows, in every cache group, all drawn from one pool.

A table's entry i is the block of the row's tokens [i * block_size, (i + 1) * block_size). The tables of a row have the
same length in all groups whose tables grow. What a group keeps of them, and what it has in the prefix cache, is said by
its kind (`core/schedule/groups/`); here the groups are asked together.

What a window group gives back lies before the smaller of num_computed_tokens and num_known_tokens: draft tokens that
may still be rejected free nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from headrace.core.options.cache_groups import ONE_GROUP, CacheGroup
from headrace.core.schedule.block_hashes import BlockHash
from headrace.core.schedule.blocks import NULL_BLOCK, BlockPool
from headrace.core.schedule.groups.contained import contain
from headrace.core.schedule.groups.group import KINDS, GroupBlocks, PrefixHit, Sizes, class_of
from headrace.core.schedule.groups.state import StatePages
from headrace.core.schedule.requests import RowTable
from headrace.ipc.failure import OptionError, let_interrupts_pass

_NO_PAGES = np.empty(0, np.int32)


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
        """step_tokens: the most tokens that one step computes for a row. Groups whose tables grow come first."""
        self.pool, self.block_size, self.groups = pool, block_size, tuple(groups)
        sizes = Sizes(num_rows, -(-max_model_len // block_size), block_size, step_tokens)
        kinds = [class_of(group.kind) for group in self.groups]
        self.num_growing = sum(kind.grows for kind in kinds)
        """How many groups need one more block when a row fills its last one."""
        self.table = np.zeros((self.num_growing, num_rows, sizes.max_blocks), np.int32)
        """[num_growing, num_rows, max_blocks]: the tables of the groups that grow."""
        self.num_blocks = np.zeros(num_rows, np.int32)
        """[num_rows]: length of the row's growing tables, including released entries."""
        tables = [*self.table, *[_NO_PAGES] * (len(kinds) - self.num_growing)]
        self.parts: tuple[GroupBlocks, ...] = tuple(
            _part(kind, pool, group, number, sizes, table)
            for number, (kind, group, table) in enumerate(zip(kinds, self.groups, tables, strict=True))
        )
        self.states = next((part for part in self.parts if isinstance(part, StatePages)), None)
        """The group of recurrent layers, if the model has any."""
        self._giving_back = [part for part in self.parts if type(part).give_back is not GroupBlocks.give_back]
        self._leaving = [part for part in self.parts if type(part).leaving is not GroupBlocks.leaving]
        self._is_sparse = any(type(part).known is not GroupBlocks.known for part in self.parts)
        self._first_tables = (np.arange(self.num_growing, dtype=np.int32) * num_rows)[:, None]
        pool.holders.append(self)

    def held_blocks(self) -> Iterator[int]:
        for part in self.parts:
            yield from part.all_held(self.num_blocks)

    def blocks(self, row: int) -> list[int]:
        """All blocks that the row holds, group after group."""
        end = int(self.num_blocks[row])
        return [block for part in self.parts for block in part.held(row, end)]

    def name(self, token_hash: BlockHash, group: int) -> BlockHash:
        """The block's name in the pool: `token_hash` (of its tokens and all before them) and a suffix for the group."""
        return token_hash + self.parts[group].suffix

    def state_pages(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The row's own pages of state, and those of the state that it starts from; both empty without such layers."""
        return (_NO_PAGES, _NO_PAGES) if self.states is None else self.states.pages(row)

    # --- growing --------------------------------------------------------------------------------------------------

    def num_free_to_grow(self) -> int:
        """How many blocks can still be added in every group."""
        return self.pool.num_available // self.num_growing if self.num_growing else self.table.shape[2]

    def give_back(self, rows: Sequence[int] | np.ndarray, table: RowTable) -> None:
        """Releases blocks of `rows`, [n], that no later token reads."""
        if not self._giving_back:
            return
        rows = np.asarray(rows)
        # A token that is not known yet may be rejected and computed again.
        positions = np.minimum(table.num_computed_tokens[rows], table.num_known_tokens[rows])
        for part in self._giving_back:
            part.give_back(rows, positions)

    def extend_each(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Adds one block to each of `rows` (distinct) in every group. Returns the tables that grew and the new blocks,
        as in `StepPlan`. The caller has checked `num_free_to_grow`."""
        blocks = np.array(self.pool.allocate(len(rows) * self.num_growing), np.int32)
        self.table[:, rows, self.num_blocks[rows]] = blocks.reshape(self.num_growing, len(rows))
        self.num_blocks[rows] += 1
        return (rows if self.num_growing == 1 else (self._first_tables + rows).reshape(-1)), blocks

    def extend(self, row: int, count: int) -> tuple[list[int], list[int]]:
        """Adds `count` blocks to the row in every group; otherwise like `extend_each`."""
        blocks = self.pool.allocate(count * self.num_growing)
        start = int(self.num_blocks[row])
        if self.num_growing == 1:
            self.table[0, row, start : start + count] = blocks
            self.num_blocks[row] = start + count
            return [row] * count, blocks
        self.table[:, row, start : start + count] = np.array(blocks, np.int32).reshape(self.num_growing, count)
        self.num_blocks[row] += count
        return np.repeat(self._first_tables + row, count).tolist(), blocks

    def release(self, row: int) -> None:
        """Releases all blocks of the row."""
        held, end = self.blocks(row), int(self.num_blocks[row])
        for part in self._leaving:
            held = part.leaving(row, held, len(self.parts[0].held(row, end)), end)
        self.pool.release(held)
        self.num_blocks[row] = 0

    def clear(self) -> None:
        """Empties all tables and resets the pool."""
        self.num_blocks[:] = 0
        for part in self.parts:
            part.clear()
        self.pool.clear()

    # --- the prefix cache -----------------------------------------------------------------------------------------

    @property
    def nothing(self) -> PrefixHit:
        """What is found where nothing is looked for."""
        return PrefixHit(0, tuple([] for _ in self.parts))

    def find(self, hashes: Sequence[BlockHash]) -> PrefixHit:
        """The longest prefix of `hashes` for which each group has the blocks that it needs. Takes no references."""
        if len(self.parts) == 1 and not self._is_sparse:
            end, found = self.parts[0].find(hashes)
            return PrefixHit(end, (found,), end)
        reach = _agreed(hashes, [part.known for part in self.parts])
        end = _agreed(hashes[:reach], [part.longest for part in self.parts]) if self._is_sparse else reach
        return PrefixHit(end, tuple(part.needed(hashes[:end]) for part in self.parts), reach)

    def may_go_on(self, hashes: Sequence[BlockHash]) -> bool:
        """Whether a hit can be longer than these first blocks of a request."""
        return not hashes or all(part.may_go_on(hashes[-1]) for part in self.parts)

    def num_missing(self, num_tokens: int, hit: PrefixHit) -> int:
        """The most blocks, in all groups together and in addition to the hit's, that a request of num_tokens holds at
        once."""
        return sum(part.num_missing(num_tokens, found) for part, found in zip(self.parts, hit.blocks, strict=True))

    def enter(self, row: int, hit: PrefixHit) -> None:
        """Starts the row's tables with the hit's blocks and takes a reference to each."""
        self.num_blocks[row] = hit.num_blocks
        self.pool.acquire(hit.all_blocks)
        for part, found in zip(self.parts, hit.blocks, strict=True):
            part.enter(row, hit, found)

    def publish(self, rows: int | np.ndarray, indices: slice | np.ndarray, hashes: Sequence[BlockHash]) -> None:
        """Adds full blocks to the prefix cache: those at `indices` of one row's tables, or at one index of each of
        several rows. hashes: of the blocks' tokens."""
        if not self.num_growing:
            for part in self.parts:
                part.filled(hashes)
        for part, blocks in zip(self.parts, self.table[:, rows, indices].tolist(), strict=False):
            for block, token_hash in zip(blocks, hashes, strict=True):
                if block != NULL_BLOCK:  # else the window group released it before its last token was known
                    self.pool.publish(block, token_hash + part.suffix)

    def forget(self, token_hashes: Sequence[BlockHash]) -> None:
        """Removes what rows computed of these hashes from the prefix cache, in all groups."""
        for part in self.parts:
            self.pool.forget(each + part.suffix for each in token_hashes)


def _part(
    kind: type[GroupBlocks], pool: BlockPool, group: CacheGroup, number: int, sizes: Sizes, table: np.ndarray
) -> GroupBlocks:
    """Raises OptionError, naming the kind, if another package's cannot be made."""
    if group.kind in KINDS:
        return kind(pool, group, number, sizes, table)
    try:
        return contain(kind(pool, group, number, sizes, table), group.kind)
    except BaseException as error:
        let_interrupts_pass(error)
        raise OptionError(
            f"the cache kind {group.kind}, {kind.__module__}.{kind.__qualname__}, cannot be made: {error!r:.200}"
        ) from error


def _agreed(hashes: Sequence[BlockHash], found: Sequence[Callable[[Sequence[BlockHash]], int]]) -> int:
    """The longest prefix that each of `found`, which says how much of a prefix a group has, has whole."""
    end, shortened = len(hashes), True
    while shortened:
        before = end
        for length in found:
            end = length(hashes[:end])
        shortened = end < before
    return end
