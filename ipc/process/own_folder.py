"""Temporary folders removed when their process ends; those of killed processes when the next of the kind is made."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from headrace.ipc.process.trusted_files import why_untrusted

_LEAST_AGE_S = 60.0
"""A folder without a lock may be just created, by a process that is about to lock it."""

SYSTEMS_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


def temporary_folders() -> Iterator[Path]:
    """The folders for temporary files that can be written: TMPDIR, TEMP or TMP, then the system's.

    The current folder is none of them, as it is for Python's tempfile where nothing else can be written.
    """
    named = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")]
    seen = set()
    for folder in (*named, *SYSTEMS_FOLDERS):
        if folder and os.path.isabs(folder) and folder not in seen and os.access(folder, os.W_OK | os.X_OK):
            seen.add(folder)
            yield Path(folder)


def temporary_folder() -> Path:
    """The first of `temporary_folders` in which other users cannot replace what this one makes; without such a one the
    first. Raises OSError, which says what to do, if there is none."""
    folders = list(temporary_folders())
    for folder in [each for each in folders if not why_untrusted(each / "anything")] or folders:
        return folder
    raise FileNotFoundError("there is no folder for temporary files that can be written: set TMPDIR to one")


class OwnFolder:
    """A folder in the system's temporary folder that only this user can enter; removed when closed or unreferenced."""

    def __init__(self, kind: str) -> None:
        """kind: its purpose, which the folder's name contains. Raises OSError if it cannot be created."""
        prefix = f"headrace-{kind}-"
        _remove_abandoned(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=temporary_folder()))
        held = _hold(self.path)
        self.close = weakref.finalize(self, _remove, self.path, held)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@functools.cache
def private_folder(kind: str) -> OwnFolder:
    """This process's own folder of a kind, for what cannot be kept in a cache."""
    return OwnFolder(kind)


def _hold(folder: Path) -> int | None:
    """A descriptor whose lock marks the folder as in use until it is closed or the process ends; None if another
    process has the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # also on a file system without locks: there no folder counts as abandoned
        os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned(prefix: str) -> None:
    for folder in temporary_folder().glob(f"{prefix}*"):
        try:
            status = folder.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _LEAST_AGE_S:
                continue
            held = _hold(folder)
        except OSError:  # already removed, or not a folder
            continue
        if held is not None:
            _remove(folder, held)


def _remove(folder: Path, held: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if held is not None:
        os.close(held)
