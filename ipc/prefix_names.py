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
_TELL_EVERY_S = 0.25
_MOST_TOLD_PER_S = 400
"""Messages that one engine sends to all that follow its cache: each costs it, and those who get them, some 10 us."""


def chunk_tokens(block_size: int) -> int:
    """Whole blocks of about CHUNK_TOKENS."""
    return block_size * max(1, -(-CHUNK_TOKENS // block_size))


def tell_every_s(num_followers: int) -> float:
    """How often an engine tells so many clients what its cache has come to hold: of more than a hundred, less often.
    Each of those sends it fewer requests, and chooses by older news."""
    return max(_TELL_EVERY_S, num_followers / _MOST_TOLD_PER_S)


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
