"""Releases pages of memory-mapped checkpoint files after they were read (madvise), so that a process never holds both
the packed weights and the whole files that they were packed from. The page cache keeps the pages.
"""

from __future__ import annotations

import mmap
import re
from pathlib import Path

from headrace.ipc.process.resources import release_pages

WINDOW_BYTES = 8 << 20
"""Bytes that may be read before pages are released: more than most tensors have, so that no tensor is read twice."""
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) .{4} \S+ \S+ \S+\s+(/.*)")


class MappedPages:
    """One mapping, from address `first` up to `last`. It must not be written, since releasing pages loses changes.

    A released page that is accessed again is read again, mostly from the page cache.
    """

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first // mmap.PAGESIZE * mmap.PAGESIZE, last
        self._read_bytes = 0

    @classmethod
    def of(cls, path: Path, address: int) -> MappedPages:
        """The file's mapping that contains the address; an empty one if there is none, or on systems without
        /proc/self/maps."""
        table = Path("/proc/self/maps")
        lines = table.read_text(encoding="utf-8", errors="replace").splitlines() if table.exists() else []
        for line in lines:
            found = _MAPPING.fullmatch(line)
            if found is not None and found[3] == str(path.resolve()):
                first, last = int(found[1], 16), int(found[2], 16)
                if first <= address < last:
                    return cls(first, last)
        return cls(0, 0)

    def read(self, address: int, num_bytes: int) -> None:
        """Call before reading num_bytes at an address. Releases the mapping's pages if more than WINDOW_BYTES would
        have been read since the last release. Ignores addresses outside the mapping."""
        if num_bytes == 0 or not self._first <= address < self._last:
            return
        if self._read_bytes + num_bytes > WINDOW_BYTES:
            self._let_go()
        self._read_bytes += num_bytes

    def _let_go(self) -> None:
        """Releases the whole mapping, not only the pages that were read: the kernel also maps their neighbours in the
        page cache, up to a huge page."""
        release_pages(self._first, self._last)
        self._read_bytes = 0
