"""Temporary folders that go with their process; what a killed one left goes when the next of its kind is made."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self

_LEAST_AGE_S = 60.0
"""A folder that nobody holds may have been made in this moment, by a process that is about to hold it."""


class OwnFolder:
    """A folder under the system's temporary one that only this user can enter, until it is closed or not in use."""

    def __init__(self, kind: str) -> None:
        """kind: what it is for; the folder is named after it. Raises OSError where none can be made."""
        prefix = f"headrace-{kind}-"
        _remove_abandoned(prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        held = _hold(self.path)
        self.close = weakref.finalize(self, _remove, self.path, held)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _hold(folder: Path) -> int | None:
    """The descriptor whose lock tells that somebody uses the folder, for as long as that process lives; None where
    another has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # also of a file system without locks, where nothing is ever held to be abandoned
        os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned(prefix: str) -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        try:
            status = folder.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _LEAST_AGE_S:
                continue
            held = _hold(folder)
        except OSError:  # gone by now, or no folder
            continue
        if held is not None:
            _remove(folder, held)


def _remove(folder: Path, held: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if held is not None:
        os.close(held)
