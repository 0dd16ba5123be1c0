"""How long blocks stay in the prefix cache, and how they are used there: of a random sample, when they are evicted."""

from __future__ import annotations

import itertools
import random
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable

from headrace.ipc.messages import BLOCK_TIME_BOUNDS, BlockTimes, Counted

_LAST_USES = 4
"""Of a block, between which gaps are counted."""


class BlockResidency:
    """Follows a sample of the blocks from their allocation on."""

    def __init__(self, share: float, clock: Callable[[], float] = time.monotonic) -> None:
        """share: the probability with which a block is followed, above 0 and at most 1."""
        self._share, self._clock, self._random = share, clock, random.Random()
        self._allocated_s: dict[int, float] = {}  # of the blocks that are followed
        self._uses_s: dict[int, deque[float]] = {}
        self._lifetime, self._idle, self._gap = _Histogram(), _Histogram(), _Histogram()

    def allocated(self, blocks: Iterable[int]) -> None:
        """These blocks have new content."""
        now_s = self._clock()
        for block in blocks:
            self._allocated_s.pop(block, None)
            self._uses_s.pop(block, None)
            if self._random.random() < self._share:
                self._allocated_s[block] = now_s

    def used(self, blocks: Iterable[int]) -> None:
        """The content of these blocks was found in the prefix cache, and is used again."""
        now_s = self._clock()
        for block in blocks:
            if block in self._allocated_s:
                self._uses_s.setdefault(block, deque(maxlen=_LAST_USES)).append(now_s)

    def evicted(self, block: int) -> None:
        """The content of this block gives way to another."""
        if (allocated_s := self._allocated_s.pop(block, None)) is None:
            return
        now_s, uses_s = self._clock(), list(self._uses_s.pop(block, ()))
        self._lifetime.add(now_s - allocated_s)
        self._idle.add(now_s - (uses_s[-1] if uses_s else allocated_s))
        for before_s, after_s in itertools.pairwise(uses_s):
            self._gap.add(after_s - before_s)

    def clear(self) -> None:
        """Forgets all blocks; what was counted stays."""
        self._allocated_s.clear()
        self._uses_s.clear()

    def times(self) -> BlockTimes:
        return BlockTimes(
            lifetime=self._lifetime.counted(), idle_before_evict=self._idle.counted(), reuse_gap=self._gap.counted()
        )


class _Histogram:
    def __init__(self) -> None:
        self._counts = [0] * (len(BLOCK_TIME_BOUNDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BLOCK_TIME_BOUNDS, seconds)] += 1
        self._sum += seconds

    def counted(self) -> Counted:
        return Counted(counts=tuple(self._counts), sum=self._sum)
