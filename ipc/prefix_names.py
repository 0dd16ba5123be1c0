"""Names of prompt prefixes: engines report by name what their caches hold, and routers look up prompts by them.

What a prefix is, besides its tokens, is its `PrefixKey`. Routers' names and the core's block hashes derive from it.

A router's name of a prefix is the CRC-32 of its tokens (little-endian int32) and of what the key says of them, at every
multiple of `chunk_tokens`, continued from the CRC-32 of the key's root. All names of a prompt take one pass over its
bytes, and are equal in every process. If two prefixes have the same name, a router may choose a worse engine; engines
find blocks by other, collision-free names.

    root --crc--> name of chunk 0 --crc--> name of chunk 1 --crc--> ...
"""

from __future__ import annotations

import bisect
import zlib

import msgspec

from headrace.ipc.adapters import KeyAdapter
from headrace.ipc.row_inputs import HASH_BYTES, RowInput

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


class PrefixKey(msgspec.Struct, frozen=True):
    """All that keys and values of a prompt's prefix depend on besides its token ids."""

    cache_salt: str = ""
    weights: str = ""
    """`Welcome.model_version`"""
    adapters: tuple[KeyAdapter, ...] = ()
    """What is added to the weights for this request."""
    inputs: tuple[RowInput, ...] = ()
    """In the order of positions."""

    @property
    def root(self) -> bytes:
        """What the names of all prefixes begin with."""
        of_all = [(each.identity, each.scale) for each in self.adapters if not each.from_position]
        return msgspec.msgpack.encode((self.cache_salt, self.weights, of_all))

    @property
    def is_root_alone(self) -> bool:
        """Whether `of` is empty for all tokens."""
        return not self.inputs and not any(each.from_position for each in self.adapters)

    def of(self, first: int, last: int) -> bytes:
        """What belongs to the tokens [first, last), besides their ids, in the names of prefixes that include them."""
        if self.is_root_alone:
            return b""
        parts = list[bytes | memoryview]()
        for adapter in self.adapters:  # names go on from those before, so where it begins to apply is enough
            if adapter.from_position and first <= adapter.from_position < last:
                parts.append(msgspec.msgpack.encode((adapter.identity, adapter.scale, adapter.from_position - first)))
        for each in self.inputs[bisect.bisect_right(self.inputs, first, key=lambda each: each.end) :]:
            if each.start >= last:
                break
            begin, end = max(first, each.start), min(last, each.end)
            parts.append(msgspec.msgpack.encode((each.kind, begin - first, end - begin)))
            parts.append(each.hashes.data[(begin - each.start) * HASH_BYTES : (end - each.start) * HASH_BYTES])
        return b"".join(parts)


NO_KEY = PrefixKey()


def first_name(key: PrefixKey) -> int:
    """The value from which the names of prompts with this key are continued."""
    return zlib.crc32(key.root)


def next_name(name: int, tokens: bytes | memoryview, key: PrefixKey, first: int) -> int:
    """The name of a prefix that is longer by a chunk. tokens: the chunk's, little-endian int32; first: its position."""
    name = zlib.crc32(tokens, name)
    return name if key.is_root_alone else zlib.crc32(key.of(first, first + len(tokens) // TOKEN_BYTES), name)


def prefix_names(tokens: bytes | memoryview, key: PrefixKey, chunk: int) -> list[int]:
    """The names of a prompt's prefixes. tokens: little-endian int32; chunk: tokens per name."""
    view, name, names = memoryview(tokens), first_name(key), list[int]()
    size = chunk * TOKEN_BYTES
    for start in range(0, len(view) - size + 1, size):
        name = next_name(name, view[start : start + size], key, start // TOKEN_BYTES)
        names.append(name)
    return names
