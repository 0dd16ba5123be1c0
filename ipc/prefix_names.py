"""Names of prompts' beginnings, by which engines say what their caches hold and routers look for it.

A prefix is named by the CRC-32 of its tokens (little-endian int32), begun with that of its cache salt, at every
multiple of `chunk_tokens`. So a prompt's names are one pass over its bytes, equal in every process. Two prefixes of one
name cost at most a worse choice: an engine finds its blocks by names of its own that do not collide.

    salt --crc--> name of chunk 0 --crc--> name of chunk 1 --crc--> ...
"""

from __future__ import annotations

import zlib

CHUNK_TOKENS = 64
"""About how many tokens one name stands for."""
TOKEN_BYTES = 4


def chunk_tokens(block_size: int) -> int:
    """Whole blocks of about CHUNK_TOKENS."""
    return block_size * max(1, -(-CHUNK_TOKENS // block_size))


def first_key(cache_salt: str) -> int:
    """What the names of prompts with this salt begin with."""
    return zlib.crc32(cache_salt.encode())


def prefix_keys(tokens: bytes | memoryview, cache_salt: str, chunk: int) -> list[int]:
    """The names of a prompt's prefixes. tokens: little-endian int32; chunk: tokens of each."""
    view, key, keys = memoryview(tokens), first_key(cache_salt), list[int]()
    size = chunk * TOKEN_BYTES
    for start in range(0, len(view) - size + 1, size):
        key = zlib.crc32(view[start : start + size], key)
        keys.append(key)
    return keys
