"""Releases pages of memory-mapped checkpoint files after they were read (madvise), so that a process never holds both
the packed weights and the whole files that they were packed from. The page cache keeps the pages.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
from pathlib import Path

from headrace.ipc.failure import ModelError
from headrace.ipc.process.resources import release_pages

logger = logging.getLogger(__name__)
WINDOW_BYTES = 8 << 20
"""Bytes that may be read before pages are released: more than most tensors have, so that no tensor is read twice."""
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) .{4} \S+ \S+ \S+\s+(/.*)")


class MappedFile:
    """Tells whether a mapped file was written over: beyond a new end, reading would end this process (SIGBUS), and
    before it, weights of two checkpoints would mix. Another file in its place does no harm, as the first stays mapped.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._path, self._known = path, os.stat(path)

    def require_whole(self) -> None:
        """Call before reading. Raises ModelError if the file has become shorter; logs a change that leaves it as long,
        since some file systems change the times of files that nobody has written."""
        try:
            now = os.stat(self._path)
        except OSError:
            return
        known = self._known
        if not os.path.samestat(now, known):
            return
        if now.st_size < known.st_size:
            raise ModelError(
                f"{self._path} was written over while it was read: {known.st_size} bytes became {now.st_size}",
                hint="write a checkpoint under another name, and rename it when it is complete",
            )
        if now.st_mtime_ns != known.st_mtime_ns:
            self._known = now
            logger.warning("%s was changed while it was read: its weights may be of two checkpoints", self._path)


class MappedPages:
    """One mapping, from address `first` up to `last`. It must not be written, since releasing pages loses changes.

    A released page that is accessed again is read again, mostly from the page cache.
    """

    def __init__(self, first: int, last: int, file: MappedFile | None = None) -> None:
        self._first, self._last, self._file = first // mmap.PAGESIZE * mmap.PAGESIZE, last, file
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
        have been read since the last release. Ignores addresses outside the mapping. Raises ModelError if the file has
        become shorter."""
        if num_bytes == 0 or not self._first <= address < self._last:
            return
        if self._file is not None:
            self._file.require_whole()
        if self._read_bytes + num_bytes > WINDOW_BYTES:
            self._let_go()
        self._read_bytes += num_bytes

    def _let_go(self) -> None:
        """Releases the whole mapping, not only the pages that were read: the kernel also maps their neighbours in the
        page cache, up to a huge page."""
        release_pages(self._first, self._last)
        self._read_bytes = 0
