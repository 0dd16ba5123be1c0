"""Names for KV blocks: the hash of (parent block's name, this block's tokens), the chain rooted in the cache salt.

`sha256` and `xxhash` hash canonical bytes (the parent's digest, then the tokens as little-endian int32), so equal
prefixes have equal names in every process and on every machine. `sha256` is the default because a collision
would hand one user's context to another; `xxhash` is quicker and not collision-resistant; `builtin` is Python's
own hash of a tuple, as quick, and private to the process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

BlockHash = bytes
Step = Callable[[BlockHash, bytes], BlockHash]


class BlockHasher:
    """Names the full blocks of token sequences."""

    def __init__(self, algorithm: str, block_size: int) -> None:
        """`algorithm` is sha256, xxhash or builtin. Raises ModuleNotFoundError without the xxhash package."""
        self.block_size = block_size
        self._step = _ALGORITHMS[algorithm]()
        self.on_hashed: Callable[[list[BlockHash], int, str, np.ndarray], None] | None = None
        """Called with what `extend` was, once it has appended: the hashes, how many there were before, salt, tokens."""

    def extend(self, hashes: list[BlockHash], cache_salt: str, token_ids: np.ndarray, num_blocks: int) -> None:
        """Appends those of the sequence's next blocks, until there are num_blocks.

        hashes: of the sequence's first blocks; token_ids: [at least num_blocks * block_size] int32, all of it.
        """
        size, step, num_before = self.block_size, self._step, len(hashes)
        # What stands for the parent of the first block is made of the salt.
        parent = hashes[-1] if hashes else step(b"headrace", cache_salt.encode())
        data = token_ids[len(hashes) * size : num_blocks * size].astype("<i4", copy=False).tobytes()
        for start in range(0, len(data), 4 * size):
            parent = step(parent, data[start : start + 4 * size])
            hashes.append(parent)
        if self.on_hashed is not None:
            self.on_hashed(hashes, num_before, cache_salt, token_ids)


def _sha256() -> Step:
    return lambda parent, data: hashlib.sha256(parent + data).digest()


def _xxhash() -> Step:
    import xxhash

    return lambda parent, data: xxhash.xxh3_128_digest(parent + data)


def _builtin() -> Step:
    return lambda parent, data: hash((parent, data)).to_bytes(8, "little", signed=True)


_ALGORITHMS: dict[str, Callable[[], Step]] = {"sha256": _sha256, "xxhash": _xxhash, "builtin": _builtin}
