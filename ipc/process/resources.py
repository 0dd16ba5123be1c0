"""What this process has of the system: its limit of open files, memory that it has freed, and pages of files."""

from __future__ import annotations

import contextlib
import ctypes
import re
import resource
from pathlib import Path

_MADV_DONTNEED = 4
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_READ_ONLY_FILE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r-.. \S+ \S+ [1-9]\d* .*\n((?:[A-Z]\w+:.*\n)+)", re.MULTILINE)
"""A mapping in /proc/self/smaps, with its figures."""
_CHANGED = re.compile(r"^(?:Anonymous|Swap): +[1-9]", re.MULTILINE)


def file_limit() -> int:
    """How many files, sockets among them, this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_file_limit() -> None:
    """Raises the limit of open files to the highest the system allows: each connection takes a file descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def give_back_freed_memory() -> None:
    """Calls malloc_trim: glibc keeps freed memory between blocks in use, tens of megabytes after a burst of messages.

    Takes about 0.1 ms per megabyte returned. Does nothing if the C library has no malloc_trim.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class _Mallinfo2(ctypes.Structure):
    """The figures of glibc's malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def allocated_bytes() -> int:
    """Memory that this process has allocated from the C library and not freed, in its main arena and in blocks of their
    own. 0 if the C library has no mallinfo2 (glibc has it from 2.33 on)."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo2.restype = _Mallinfo2
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)


def release_pages(first: int, last: int) -> None:
    """Takes pages of a mapped file, from one address up to another, out of this process's memory. What it reads there
    later comes from the page cache or the file again; changes of a private mapping are lost."""
    _madvise(first, last - first, _MADV_DONTNEED)


def release_unchanged_files() -> None:
    """Releases the pages of libraries and other files that this process may not write and has not changed: at a start,
    much code runs once. Takes some 10 ms."""
    with contextlib.suppress(OSError):
        for first, last, figures in _READ_ONLY_FILE.findall(Path("/proc/self/smaps").read_text(errors="replace")):
            if not _CHANGED.search(figures):  # by the loader, before it took the right to write away
                release_pages(int(first, 16), int(last, 16))
