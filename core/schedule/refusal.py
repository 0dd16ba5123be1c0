"""Remembers that the head of the queue found no blocks, so that it is not looked up again in every step.

Looking up a long prompt takes milliseconds. As long as no blocks have become available, no request has left, and none
of the blocks that its prefix hit lacked has entered the cache, another look-up would be futile. In which group a block
was lacking does not matter: all names of the same tokens begin with their hash.
"""

from __future__ import annotations

from headrace.core.schedule.block_hashes import BlockHash
from headrace.core.schedule.blocks import BlockPool
from headrace.core.schedule.requests import Request


class Refusal:
    """The last refusal, if any. Observes the pool (`BlockObserver`) while there is one."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._request: Request | None = None
        self._num_available = self._num_running = self._hash_bytes = 0
        self._lacking: set[BlockHash] = set()
        self._hit_may_have_grown = False

    def remember(self, request: Request, num_blocks: int, num_running: int) -> None:
        """The request's hit of num_blocks left too much to compute."""
        if self._request is None:
            self._pool.observers.append(self)
        self._request, self._num_running, self._num_available = request, num_running, self._pool.num_available
        self._lacking, self._hit_may_have_grown = set(request.block_hashes[num_blocks:]), False
        self._hash_bytes = len(next(iter(self._lacking), b""))

    def forget(self) -> None:
        if self._request is not None:
            self._request = None
            self._pool.observers.remove(self)

    def stands(self, request: Request, num_running: int) -> bool:
        """Whether looking up this request again is futile."""
        if self._request is not request or self._hit_may_have_grown:
            return False
        return self._pool.num_available <= self._num_available and num_running >= self._num_running

    def stored(self, block: int, name: BlockHash) -> None:
        if name[: self._hash_bytes] in self._lacking:
            self._hit_may_have_grown = True

    def evicted(self, block: int, name: BlockHash) -> None:
        pass
