"""Which engines hold the keys and values of which prefixes: a bounded index of hints.

A prefix is named by the CRC-32 of its tokens (little-endian int32), begun with that of its cache salt, at every
multiple of `chunk_tokens`. So a prompt's names are one pass over its bytes, equal in every process. Two prefixes of one
name cost at most a worse choice: an engine finds its blocks by names of its own that do not collide.

    salt --crc--> key of chunk 0 --crc--> key of chunk 1 --crc--> ...
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

CHUNK_TOKENS = 64
"""About how many tokens one name stands for."""
MOST_PREFIXES = 1 << 17
_TOKEN_BYTES = 4


def chunk_tokens(block_size: int) -> int:
    """Whole blocks of about CHUNK_TOKENS."""
    return block_size * max(1, -(-CHUNK_TOKENS // block_size))


def first_key(cache_salt: str) -> int:
    """What the names of prompts with this salt begin with."""
    return zlib.crc32(cache_salt.encode())


def prefix_keys(tokens: bytes | memoryview, cache_salt: str, chunk: int) -> list[int]:
    """The names of a prompt's prefixes. tokens: little-endian int32; chunk: tokens of each."""
    view, key, keys = memoryview(tokens), first_key(cache_salt), list[int]()
    size = chunk * _TOKEN_BYTES
    for start in range(0, len(view) - size + 1, size):
        key = zlib.crc32(view[start : start + size], key)
        keys.append(key)
    return keys


class PrefixIndex:
    """By name, the engines that are thought to hold the prefix: a bit for each engine.

    Two generations bound it: what nobody asks for in the time that the younger one takes to fill is forgotten.
    """

    def __init__(self, most_prefixes: int = MOST_PREFIXES) -> None:
        self._most = max(1, most_prefixes // 2)
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._young) + sum(key not in self._young for key in self._old)

    def holders(self, keys: Iterable[int], alive: int) -> list[int]:
        """Of each prefix, shortest first, the engines that hold it and all before it, as bits; up to the first that
        none of the `alive` holds."""
        young, old, masks = self._young, self._old, list[int]()
        for key in keys:
            mask = young.get(key)
            if mask is None:
                mask = old.get(key)
                if mask is None:
                    break
                self._put(key, mask)
            alive &= mask
            if not alive:
                break
            masks.append(alive)
        return masks

    def add(self, keys: Iterable[int], engine: int) -> None:
        """The engine with this bit holds these."""
        for key in keys:
            self._put(key, self._find(key) | engine)

    def discard(self, keys: Iterable[int], engine: int) -> None:
        """It does not any more."""
        for key in keys:
            left = self._find(key) & ~engine
            if left:
                self._put(key, left)
            else:
                self._young.pop(key, None)
                self._old.pop(key, None)

    def forget(self, engine: int) -> None:
        """The engine holds nothing."""
        for generation in (self._young, self._old):
            for key in [key for key, mask in generation.items() if mask & engine]:
                generation[key] &= ~engine
                if not generation[key]:
                    del generation[key]

    def _find(self, key: int) -> int:
        mask = self._young.get(key)
        return self._old.get(key, 0) if mask is None else mask

    def _put(self, key: int, mask: int) -> None:
        self._young[key] = mask
        if len(self._young) > self._most:
            self._old, self._young = self._young, {}
