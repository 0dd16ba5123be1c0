"""Pages of files that a process gives back: those that it has changed stay."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

from headrace.ipc.process.resources import release_unchanged_files

NUM_PAGES = 64
CONTENT = bytes(range(256)) * (NUM_PAGES * mmap.PAGESIZE // 256)


def resident_bytes(path: Path) -> int:
    """Of this process's mapping of the file."""
    (found,) = re.findall(rf" {re.escape(str(path))}\n(?:.+\n)*?Rss: +(\d+) kB", Path("/proc/self/smaps").read_text())
    return int(found) * 1024


def test_pages_that_were_only_read_leave_the_process_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "read"
    path.write_bytes(CONTENT)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        assert mapping[:] == CONTENT
        assert resident_bytes(path) == len(CONTENT)
        release_unchanged_files()
        assert resident_bytes(path) == 0
        assert mapping[:] == CONTENT


def test_a_page_that_was_changed_before_it_became_read_only_keeps_its_change(tmp_path: Path) -> None:
    """As the loader does with a library's table of addresses."""
    path = tmp_path / "changed"
    path.write_bytes(CONTENT)
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
        mapping[5 * mmap.PAGESIZE] = 77
        assert protect(ctypes.addressof(ctypes.c_char.from_buffer(mapping)), len(CONTENT), mmap.PROT_READ) == 0
        release_unchanged_files()
        changed = bytearray(CONTENT)
        changed[5 * mmap.PAGESIZE] = 77
        assert mapping[:] == changed
