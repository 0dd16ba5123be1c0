"""Hashes of KV blocks for prefix caching: each is hash(parent block's hash, tokens, what the `PrefixKey` says of them);
the first parent is from the key's root.

`sha256` and `xxhash` hash canonical bytes (the parent's digest, then the tokens as little-endian int32), so equal
prefixes have equal hashes in every process and on every machine. `sha256` is the default because a collision would give
one user's context to another; `xxhash` is faster and not collision-resistant; `builtin` is Python's hash of a tuple, as
fast, and valid only within the process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from headrace.ipc.prefix_names import PrefixKey

BlockHash = bytes
Step = Callable[[BlockHash, bytes], BlockHash]


class BlockHasher:
    """Computes the hashes of a token sequence's full blocks."""

    def __init__(self, algorithm: str, block_size: int) -> None:
        """`algorithm` is sha256, xxhash or builtin. Raises ModuleNotFoundError if the xxhash package is missing."""
        self.block_size = block_size
        self._step = _ALGORITHMS[algorithm]()
        self.on_hashed: Callable[[list[BlockHash], int, PrefixKey, np.ndarray], None] | None = None
        """Called at the end of `extend` with: hashes, number of hashes before the call, key, token ids."""

    def extend(self, hashes: list[BlockHash], key: PrefixKey, token_ids: np.ndarray, num_blocks: int) -> None:
        """Appends hashes of the sequence's next blocks to `hashes` until it has num_blocks.

        hashes: of the sequence's first blocks; token_ids: [at least num_blocks * block_size] int32, from its start.
        """
        size, step, num_before = self.block_size, self._step, len(hashes)
        parent = hashes[-1] if hashes else step(b"headrace", key.root)
        is_root_alone = key.is_root_alone
        data = token_ids[len(hashes) * size : num_blocks * size].astype("<i4", copy=False).tobytes()
        for start in range(0, len(data), 4 * size):
            block = data[start : start + 4 * size]
            if not is_root_alone:
                first = len(hashes) * size
                block += key.of(first, first + size)
            parent = step(parent, block)
            hashes.append(parent)
        if self.on_hashed is not None:
            self.on_hashed(hashes, num_before, key, token_ids)


def _sha256() -> Step:
    return lambda parent, data: hashlib.sha256(parent + data).digest()


def _xxhash() -> Step:
    import xxhash

    return lambda parent, data: xxhash.xxh3_128_digest(parent + data)


def _builtin() -> Step:
    return lambda parent, data: hash((parent, data)).to_bytes(8, "little", signed=True)


_ALGORITHMS: dict[str, Callable[[], Step]] = {"sha256": _sha256, "xxhash": _xxhash, "builtin": _builtin}
