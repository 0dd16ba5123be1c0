"""What this process has of the system: its limit of open files, memory that it has freed, and pages of files."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib.util
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

from headrace.ipc.failure import OptionError

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


def check_files_left() -> None:
    """Raises OptionError unless this process may open the files of a ZeroMQ context and its sockets: the library ends
    the process where it cannot."""
    opened = list[int]()
    try:
        for _ in range(_FILES_OF_SOCKETS):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise what_limits(error) or error from error
    finally:
        for each in opened:
            os.close(each)


_FILES_OF_SOCKETS = 16


def what_limits(error: BaseException) -> OptionError | None:
    """The limit of this process (`ulimit`) for which the system has refused what the error is of; None if it is of
    another kind, or no limit is set."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE:
        return OptionError(f"this process may have {file_limit()} open files, which do not suffice; raise `ulimit -n`")
    is_library = isinstance(error, ImportError) and re.search(r"failed to map segment|cannot allocate", str(error))
    if (isinstance(error, MemoryError) or number == errno.ENOMEM or is_library) and (limits := _memory_limits()):
        return OptionError(f"this process may have {_in_words(limits)}, which does not suffice: {_first_line(error)}")
    return None


def check_library_fits(name: str) -> None:
    """Raises OptionError if a limit of this process's memory is too low to import a package, which a process of its own
    tries: C++ libraries end theirs. Takes as long as the import; returns at once without a limit, or such a package."""
    limits = _memory_limits()
    if not limits or name in sys.modules or importlib.util.find_spec(name) is None:
        return
    free = {kind: most - used for kind, (_, most, used) in limits.items()}
    if subprocess.run([sys.executable, "-c", _TRIAL, name, repr(free)], capture_output=True, check=False).returncode:
        raise OptionError(
            f"this process may have {_in_words(limits)}, and {name} cannot be loaded in what is left of it"
        )


_TRIAL = """
import ast, importlib, psutil, resource, sys
own = psutil.Process().memory_info()
for kind, free in ast.literal_eval(sys.argv[2]).items():
    used = {resource.RLIMIT_AS: own.vms, resource.RLIMIT_DATA: own.data}[kind]
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (used + free if hard < 0 else min(used + free, hard), hard))
importlib.import_module(sys.argv[1])
"""


def _memory_limits() -> dict[int, tuple[str, int, int]]:
    """Which limit -> its words, and bytes that are allowed and in use."""
    import psutil

    own = psutil.Process().memory_info()
    kinds = {
        resource.RLIMIT_AS: ("of address space (`ulimit -v`)", own.vms),
        resource.RLIMIT_DATA: ("of data (`ulimit -d`)", own.data),
    }
    found = {kind: (words, resource.getrlimit(kind)[0], used) for kind, (words, used) in kinds.items()}
    return {kind: each for kind, each in found.items() if each[1] != resource.RLIM_INFINITY}


def _in_words(limits: dict[int, tuple[str, int, int]]) -> str:
    return " and ".join(f"{most >> 20:,} MiB {words}" for words, most, _ in limits.values())


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]


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
