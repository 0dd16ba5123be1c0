"""KV block accounting and automatic prefix caching.

A block is in exactly one state:

    free   - not referenced, and its content is of no use
    cached - not referenced, but its content can be found by its hash; evicted least recently used first
    held   - referenced by rows or other registered holders (reference count > 0); can be found by its hash once full

       allocate            release, has a hash
    free -----> held ---------------------------> cached --+
      ^          |  ^                                |      | allocate: evicted, the hash is forgotten
      +----------+  +--------------------------------+      v
        release, no hash            hit                    held

Block 0, the null block, is never allocated: padding and empty table entries point to it, so they never touch live data.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np

from headrace.core.schedule.block_hashes import BlockHash
from headrace.ipc.failure import InconsistentError

T = TypeVar("T")
NULL_BLOCK = 0
AUDITED_AT_ONCE = 16_384
"""Blocks that an audit checks in one piece."""


class BlockHolder(Protocol):
    """An owner of references to blocks: the block tables of running rows, or a transfer to or from other memory."""

    def held_blocks(self) -> Iterable[int]:
        """Each block, once per reference that this holder has to it."""
        ...


class BlockObserver(Protocol):
    """Called when blocks enter or leave the prefix cache, while a step is scheduled: must be quick and not raise."""

    def stored(self, block: int, name: BlockHash) -> None:
        """From now on the block can be found by this name."""
        ...

    def evicted(self, block: int, name: BlockHash) -> None:
        """From now on the block cannot be found by this name."""
        ...


class BlockPool:
    """Reference counts and the prefix cache of all blocks. Sequences of block ids are in the order of the request's
    tokens.

    A block's name is made of a hash of its tokens and all before them, and of its cache group (`BlockTables.name`).
    """

    def __init__(self, num_blocks: int) -> None:
        """num_blocks includes the null block. Raises ValueError if it is less than 2."""
        if num_blocks < 2:
            raise ValueError(f"a block pool needs at least 2 blocks (one is never handed out), got {num_blocks}")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._block_of: dict[BlockHash, int] = {}
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))  # a stack: recently used blocks are warm in cache
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self.holders: list[BlockHolder] = []
        """All owners of references, for `audit`."""
        self.observers: list[BlockObserver] = []
        self.num_published = 0
        """How often a block became findable. While this is the same, no prefix has got longer."""

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by their hash, held or not."""
        return len(self._block_of)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. Raises ValueError if fewer are available."""
        if count > self.num_available:
            raise ValueError(f"asked for {count} blocks, {self.num_available} are available")
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def find(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks of the longest prefix of `hashes` that is in the cache. Takes no references."""
        found = []
        for each in hashes:
            block = self._block_of.get(each)
            if block is None:
                break
            found.append(block)
        return found

    def named(self, name: BlockHash) -> int:
        """The block of this name, or NULL_BLOCK. Takes no reference."""
        return self._block_of.get(name, NULL_BLOCK)

    def num_unheld(self, blocks: Sequence[int]) -> int:
        """How many of these blocks are not referenced, so that acquiring them reduces `num_available`."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def acquire(self, blocks: Sequence[int]) -> None:
        """Takes a reference to each of these blocks, which `find` or `named` returned."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def publish(self, block: int, block_hash: BlockHash) -> None:
        """Makes a full, held block findable by its hash. If another block already has the hash, that one keeps it."""
        if block_hash not in self._block_of and self._hash_of[block] is None:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash
            self.num_published += 1
            for observer in self.observers:
                observer.stored(block, block_hash)

    def release(self, blocks: Sequence[int]) -> None:
        """Drops one reference to each. The last blocks of a sequence are evicted first: prefixes are shared most.

        Raises ValueError for a block without references.
        """
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise ValueError(f"block {block} is released more often than it was held")
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hash_of[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def reset_cache(self) -> None:
        """Empties the prefix cache. Held blocks stay held, and become free when released."""
        self.forget(list(self._block_of))

    def forget(self, names: Iterable[BlockHash]) -> None:
        """Removes the blocks of these names from the prefix cache."""
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                continue
            self._forget(block)
            if self._references[block] == 0:
                del self._cached[block]
                self._free.append(block)

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block] = None
            for observer in self.observers:
                observer.evicted(block, block_hash)

    def audit(self) -> Iterator[None]:
        """Raises InconsistentError unless reference counts and block lists agree with what all holders report.

        A generator of pieces of work of a few milliseconds; the state must not change between them.
        """
        held = itertools.chain.from_iterable(holder.held_blocks() for holder in self.holders)
        counts, listed = np.zeros(self.num_blocks, np.int32), np.zeros(self.num_blocks, np.int32)
        for blocks in _pieces(held):
            np.add.at(counts, blocks, 1)
            yield
        for blocks in _pieces(itertools.chain(self._free, self._cached)):
            np.add.at(listed, blocks, 1)
            yield
        if listed[NULL_BLOCK] != 0:
            raise InconsistentError("the null block was handed out")
        for first in range(1, self.num_blocks, AUDITED_AT_ONCE):
            piece = slice(first, first + AUDITED_AT_ONCE)
            if not np.array_equal(counts[piece], self._references[piece]):
                raise InconsistentError("reference counts differ from what is held")
            if not np.array_equal(listed[piece], counts[piece] == 0):
                raise InconsistentError("a block is lost, listed twice, or held and free at once")
            yield
        for blocks in _pieces(self._cached):
            if not all(self._hash_of[b] is not None for b in blocks):
                raise InconsistentError("a cached block has no hash")
            yield
        for named in _pieces(self._block_of.items()):
            if not all(self._hash_of[b] == h for h, b in named):
                raise InconsistentError("a hash names the wrong block")
            yield

    def check(self) -> None:
        """All of `audit` at once."""
        for _ in self.audit():
            pass

    def clear(self) -> None:
        """Resets the pool: every block is free and the prefix cache is empty. Holders must drop their blocks first."""
        for name, block in self._block_of.items():
            for observer in self.observers:
                observer.evicted(block, name)
        self._references = [0] * self.num_blocks
        self._hash_of = [None] * self.num_blocks
        self._block_of.clear()
        self._cached.clear()
        self._free = list(range(self.num_blocks - 1, NULL_BLOCK, -1))


def _pieces(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while piece := list(itertools.islice(rest, AUDITED_AT_ONCE)):
        yield piece
