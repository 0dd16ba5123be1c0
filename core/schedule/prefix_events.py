"""Records which prompt prefixes enter and leave the prefix cache, under the names that routers use.

The scheduler finds blocks by its own hashes, while routers use names of runs of several blocks (ipc/prefix_names.py).
When the last block of such a run is hashed, the run's name is computed and kept; the pool then reports when that block
is stored or evicted. The number of changes that wait for `take` is bounded. Changes beyond it are left out, which can
only make a router's choice worse.
"""

from __future__ import annotations

import numpy as np

from headrace.core.schedule.block_hashes import BlockHash, BlockHasher
from headrace.core.schedule.blocks import BlockPool
from headrace.ipc.prefix_names import PrefixKey, chunk_tokens, first_name, next_name

MOST_UNTAKEN = 1 << 14
"""Most changes that wait for `PrefixEvents.take`."""
_SPARE_NAMES = 1 << 12
"""Names kept in addition to twice as many as the cache can hold, before those of blocks not stored are dropped."""


class PrefixObserver:
    """Observes a pool (`BlockObserver`) and a hasher, from its construction on."""

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
        """The names stored and the names evicted since the last call. A name is in the list of its latest change."""
        changes, self._changes = self._changes, {}
        return [key for key, stored in changes.items() if stored], [key for key in changes if not changes[key]]

    def held(self) -> list[int]:
        """All known names of prefixes that are in the cache."""
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

    def _hashed(self, hashes: list[BlockHash], num_before: int, key: PrefixKey, token_ids: np.ndarray) -> None:
        """Names the runs that end in blocks whose hashes were just added: those from index num_before on."""
        every, size = self._blocks_of_name, self._block_size
        for end in range(num_before // every * every + every, len(hashes) + 1, every):
            block_hash = hashes[end - 1]
            if block_hash in self._names:
                continue
            begin = end - every
            # If the parent run was hashed before this object existed, it has no name: compute from the first run.
            name = self._names.get(hashes[begin - 1]) if begin else None
            start, name = (0, first_name(key)) if name is None else (begin * size, name)
            for first in range(start, end * size, every * size):
                data = token_ids[first : first + every * size].astype("<i4", copy=False).tobytes()
                name = next_name(name, data, key, first)
            self._names[block_hash] = name
            if self._pool.named(block_hash):  # the block was stored before it was named
                self._change(block_hash, stored=True)
        if len(self._names) > self._most_names:
            self._names = {each: key for each, key in self._names.items() if self._pool.named(each)}
