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

A *bundle* is several blocks that live and die together: the first, its leader, is held, named, cached and evicted as
any block, and the others, its companions, stay with it until it becomes free. The pool itself holds them.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np

from headrace.core.schedule.block_hashes import BlockHash
from headrace.core.schedule.block_residency import BlockResidency
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
        self._companions: dict[int, tuple[int, ...]] = {}  # leader of a bundle -> its other blocks
        self._num_cached_companions = 0  # of cached leaders
        self.holders: list[BlockHolder] = []
        """All owners of references, for `audit`."""
        self.observers: list[BlockObserver] = []
        self.residency: BlockResidency | None = None
        """Measures how long blocks stay, if that was asked for."""

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free and cached ones."""
        return len(self._free) + len(self._cached) + self._num_cached_companions

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
                if self.residency is not None:
                    self.residency.evicted(block)
                self._forget(block)
                if block in self._companions:
                    self._num_cached_companions -= len(self._companions[block])
                    self._disband(block)
            self._references[block] = 1
            blocks.append(block)
        if self.residency is not None:
            self.residency.allocated(blocks)
        return blocks

    def allocate_bundle(self, count: int) -> list[int]:
        """A bundle of `count` blocks, its leader first, with one reference to the leader. Raises as `allocate`."""
        leader, *companions = blocks = self.allocate(count)
        if companions:
            self._companions[leader] = tuple(companions)
        return blocks

    def bundle(self, leader: int) -> list[int]:
        """All blocks of a bundle, its leader first."""
        return [leader, *self._companions.get(leader, ())]

    def _disband(self, leader: int) -> None:
        """Frees the companions of a leader that has become free."""
        for block in self._companions.pop(leader):
            self._references[block] = 0
            self._free.append(block)

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

    def has_name(self, block: int) -> bool:
        return self._hash_of[block] is not None

    def name_of(self, block: int) -> BlockHash:
        """The name of a block that has one. Raises InconsistentError for another."""
        name = self._hash_of[block]
        if name is None:
            raise InconsistentError(f"block {block} has no name")
        return name

    def num_unheld(self, blocks: Sequence[int]) -> int:
        """By how much `num_available` falls when these blocks are acquired: those that are not referenced."""
        if not blocks:
            return 0
        unheld = [block for block in blocks if self._references[block] == 0]
        return len(unheld) + sum(len(self._companions.get(block, ())) for block in unheld if self._companions)

    def acquire(self, blocks: Sequence[int]) -> None:
        """Takes a reference to each of these blocks, which `find` or `named` returned."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
                if block in self._companions:
                    self._num_cached_companions -= len(self._companions[block])
            self._references[block] += 1
        if self.residency is not None:
            self.residency.used(blocks)

    def publish(self, block: int, block_hash: BlockHash) -> None:
        """Makes a full, held block findable by its hash. If another block already has the hash, that one keeps it."""
        if block_hash not in self._block_of and self._hash_of[block] is None:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash
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
                    if block in self._companions:
                        self._disband(block)
                else:
                    self._cached[block] = None
                    if block in self._companions:
                        self._num_cached_companions += len(self._companions[block])

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
                self.acquire([block])
                self.release([block])  # which has no name now, so that it becomes free

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
        companions = itertools.chain.from_iterable(self._companions.values())
        held = itertools.chain(companions, *(holder.held_blocks() for holder in self.holders))
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
        if any(self._hash_of[b] is not None for each in self._companions.values() for b in each):
            raise InconsistentError("a block of a bundle can be found without its leader")
        if self._num_cached_companions != sum(len(each) for b, each in self._companions.items() if b in self._cached):
            raise InconsistentError("the count of cached bundles' blocks is wrong")
        if not set(self._companions).isdisjoint(self._free):
            raise InconsistentError("a bundle was left without its leader")
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
        if self.residency is not None:
            self.residency.clear()
        self._references = [0] * self.num_blocks
        self._hash_of = [None] * self.num_blocks
        self._block_of.clear()
        self._cached.clear()
        self._companions.clear()
        self._num_cached_companions = 0
        self._free = list(range(self.num_blocks - 1, NULL_BLOCK, -1))


def _pieces(items: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(items)
    while piece := list(itertools.islice(rest, AUDITED_AT_ONCE)):
        yield piece
