"""Which beginnings of prompts the cache has come to hold, and which it has lost, under the names that routers look for.

The scheduler finds blocks by hashes of its own, routers look for names of runs of blocks (ipc/prefix_names.py). Where a
block ends such a run, the run's name is noted as the block is hashed; the pool then says when it is stored or evicted.
What has not been taken yet is bounded: of more, the latest is left out, which costs a worse choice and nothing else.
"""

from __future__ import annotations

import zlib

import numpy as np

from headrace.core.schedule.block_hashes import BlockHash, BlockHasher
from headrace.core.schedule.blocks import BlockPool
from headrace.ipc.prefix_names import chunk_tokens, first_key

MOST_UNTAKEN = 1 << 14
_SPARE_NAMES = 1 << 12
"""How many names of blocks that are not stored are kept, besides as many as the cache can hold."""


class PrefixEvents:
    """Observes a pool (`BlockObserver`) and a hasher, from its making on."""

    def __init__(self, pool: BlockPool, hasher: BlockHasher) -> None:
        self._pool, self._block_size = pool, hasher.block_size
        self._blocks_of_name = chunk_tokens(hasher.block_size) // hasher.block_size
        self._names: dict[BlockHash, int] = {}
        self._most_names = 2 * (pool.num_blocks // self._blocks_of_name) + _SPARE_NAMES
        self._changes: dict[int, bool] = {}
        self.num_left_out = 0
        pool.observers.append(self)
        hasher.on_hashed = self._hashed

    def __len__(self) -> int:
        return len(self._changes)

    def take(self) -> tuple[list[int], list[int]]:
        """The names that came and those that went since the last call. One that came and went is among the latter."""
        changes, self._changes = self._changes, {}
        return [key for key, stored in changes.items() if stored], [key for key in changes if not changes[key]]

    def held(self) -> list[int]:
        """All names of what the cache holds, as far as they are known."""
        return [key for block_hash, key in self._names.items() if self._pool.named(block_hash)]

    def stored(self, block: int, name: BlockHash) -> None:
        self._change(name, stored=True)

    def evicted(self, block: int, name: BlockHash) -> None:
        self._change(name, stored=False)

    def _change(self, name: BlockHash, *, stored: bool) -> None:
        key = self._names.get(name)
        if key is None:
            return
        if key not in self._changes and len(self._changes) >= MOST_UNTAKEN:
            self.num_left_out += 1
            return
        self._changes[key] = stored

    def _hashed(self, hashes: list[BlockHash], num_before: int, cache_salt: str, token_ids: np.ndarray) -> None:
        """A sequence's blocks from the num_before-th on have their hashes."""
        every, size = self._blocks_of_name, self._block_size
        for end in range(num_before // every * every + every, len(hashes) + 1, every):
            block_hash = hashes[end - 1]
            if block_hash in self._names:
                continue
            begin = end - every
            # A parent that nobody has named, from before there were followers, is named on the way.
            key = self._names.get(hashes[begin - 1]) if begin else first_key(cache_salt)
            start = 0 if key is None else begin * size
            for first in range(start, end * size, every * size):
                data = token_ids[first : first + every * size].astype("<i4", copy=False).tobytes()
                key = zlib.crc32(data, first_key(cache_salt) if key is None else key)
            assert key is not None, "it has been computed"
            self._names[block_hash] = key
            if self._pool.named(block_hash):  # stored before it was named
                self._change(block_hash, stored=True)
        if len(self._names) > self._most_names:
            self._names = {each: key for each, key in self._names.items() if self._pool.named(each)}
