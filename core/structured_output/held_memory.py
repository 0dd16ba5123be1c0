"""The memory that forms take in the engine, as their trials measured it: clients' forms cannot fill the machine's."""

from __future__ import annotations

import threading
from collections import deque

from headrace.ipc.failure import Failure, QueueFullError

MOST_BYTES = 1 << 30
"""Most that all forms take together: those that requests follow, and those that are kept for later ones."""


class HeldMemory:
    """Counts what is held. Thread-safe."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes, self._held_bytes = most_bytes, 0
        self._lock = threading.Lock()
        self._returned = deque[int]()  # a collection of garbage may return some while the lock is held

    def hold(self, num_bytes: int) -> Held:
        """Counts num_bytes until the result is deleted. Raises QueueFullError if there would be too much; one form
        alone is never too much."""
        with self._lock:
            while self._returned:
                self._held_bytes -= self._returned.popleft()
            if self._held_bytes and self._held_bytes + num_bytes > self._most_bytes:
                most = f"{self._most_bytes >> 20} MiB, as much as they may"
                message = f"the structured outputs of other requests take {most}; try again"
                full = Failure(message=message, type=QueueFullError.__name__, phase="grammar", retry_after_s=1.0)
                raise QueueFullError.from_failure(full)
            self._held_bytes += num_bytes
        return Held(self, num_bytes)


class Held:
    """Memory that is counted for as long as this exists."""

    __slots__ = ("_memory", "_num_bytes")

    def __init__(self, memory: HeldMemory, num_bytes: int) -> None:
        self._memory, self._num_bytes = memory, num_bytes

    def __del__(self) -> None:
        self._memory._returned.append(self._num_bytes)
