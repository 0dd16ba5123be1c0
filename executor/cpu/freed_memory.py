"""Returns memory that packing weights has freed to the system while a model loads. The C library keeps freed pieces of
up to 32 MB for reuse, and those between pieces in use can add up to a third of the packed weights.
"""

from __future__ import annotations

from headrace.ipc.process.resources import give_back_freed_memory

EVERY_BYTES = 16 << 20
"""Bytes of packed weights after which freed memory is returned."""


class FreedMemory:
    def __init__(self) -> None:
        self._packed_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Call after num_bytes of weights were packed and their unpacked originals freed."""
        self._packed_bytes += num_bytes
        if self._packed_bytes >= EVERY_BYTES:
            give_back_freed_memory()
            self._packed_bytes = 0
