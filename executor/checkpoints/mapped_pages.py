"""Pages of mapped checkpoint files that have been read: taken out of this process's memory again, so that packed
weights and the files that they were packed from are never there both as a whole. The page cache keeps them.
"""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

WINDOW_BYTES = 8 << 20
"""What may stay: more than a tensor usually has, so that it is not read twice."""
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) .{4} \S+ \S+ \S+\s+(/.*)")
_MADV_DONTNEED = 4
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class MappedPages:
    """Of one mapping, from `first` up to `last` (addresses). What is mapped must be left unchanged.

    A page that is still in use comes back by itself: it is read once more, mostly from the page cache.
    """

    def __init__(self, first: int, last: int) -> None:
        self._first, self._last = first // mmap.PAGESIZE * mmap.PAGESIZE, last
        self._read_bytes = 0

    @classmethod
    def of(cls, path: Path, address: int) -> MappedPages:
        """Of the mapping of this file that the address lies in; of none where there is no such mapping, or where this
        system has no table of them."""
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
        """So much is about to be read; what was read WINDOW_BYTES before it is let go. Memory elsewhere is passed
        over."""
        if num_bytes == 0 or not self._first <= address < self._last:
            return
        if self._read_bytes + num_bytes > WINDOW_BYTES:
            self._let_go()
        self._read_bytes += num_bytes

    def _let_go(self) -> None:
        """All of the mapping, as the kernel maps more than is read: neighbours that are in the page cache, up to a huge
        page of them."""
        _madvise(self._first, self._last - self._first, _MADV_DONTNEED)
        self._read_bytes = 0
