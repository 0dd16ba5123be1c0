"""Names of prompt prefixes: engines report by name what their caches hold, and routers look up prompts by them.

The name of a prefix is the CRC-32 of its tokens (little-endian int32), continued from the CRC-32 of its cache salt, at
every multiple of `chunk_tokens`. All names of a prompt take one pass over its bytes, and are equal in every process. If
two prefixes have the same name, a router may choose a worse engine; engines find blocks by other, collision-free names.

    salt --crc--> name of chunk 0 --crc--> name of chunk 1 --crc--> ...
"""

from __future__ import annotations

import zlib

CHUNK_TOKENS = 64
"""Approximate number of tokens per name."""
TOKEN_BYTES = 4
_TELL_EVERY_S = 0.25
_MOST_TOLD_PER_S = 400
"""Messages that one engine sends to all subscribers of its cache: each costs sender and receiver about 10 us."""


def chunk_tokens(block_size: int) -> int:
    """Tokens per name: whole blocks, at least CHUNK_TOKENS."""
    return block_size * max(1, -(-CHUNK_TOKENS // block_size))


def tell_every_s(num_followers: int) -> float:
    """How often an engine reports changes of its cache to this many subscribers: less often if more than a hundred.

    With so many, each sends the engine fewer requests, and chooses by older reports.
    """
    return max(_TELL_EVERY_S, num_followers / _MOST_TOLD_PER_S)


def first_key(cache_salt: str) -> int:
    """The value from which the names of prompts with this salt are continued."""
    return zlib.crc32(cache_salt.encode())


def prefix_keys(tokens: bytes | memoryview, cache_salt: str, chunk: int) -> list[int]:
    """The names of a prompt's prefixes. tokens: little-endian int32; chunk: tokens per name."""
    view, key, keys = memoryview(tokens), first_key(cache_salt), list[int]()
    size = chunk * TOKEN_BYTES
    for start in range(0, len(view) - size + 1, size):
        key = zlib.crc32(view[start : start + size], key)
        keys.append(key)
    return keys
