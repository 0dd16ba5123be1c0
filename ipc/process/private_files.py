"""Files that hold prompts, answers or secrets: readable and writable by their user alone, whatever the umask."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger(__name__)
_OTHERS, _GROUP = 0o007, 0o070


def private_opener(path: str, flags: int) -> int:
    """For `open`: a new file has mode 0600 before anything is written, and an existing one from now on. Warns of one
    that belongs to somebody else, whose mode cannot be changed."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        _tighten(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def make_private(path: Path) -> None:
    """Creates the file if there is none, and makes it its user's alone. Raises OSError."""
    with open(path, "ab", opener=private_opener):
        pass


def make_existing_private(paths: Iterable[Path]) -> None:
    """As `make_private` does, for those of the files that exist and can be opened."""
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            _tighten(str(path), descriptor)
        finally:
            os.close(descriptor)


def _tighten(path: str, descriptor: int) -> None:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or stat.S_IMODE(status.st_mode) == 0o600:
        return
    try:
        os.fchmod(descriptor, 0o600)
    except OSError:
        if status.st_mode & (_OTHERS | _GROUP):
            logger.warning("%s: others may read it (mode %o), and it is not yours to change", path, _mode(status))


def warn_of_open_folder(name: str, folder: Path) -> None:
    """Warns of a folder that others may enter. name: of the option that named it."""
    status = folder.stat()
    if status.st_mode & (_OTHERS | _GROUP):
        how = "change" if status.st_mode & 0o022 else "enter"
        logger.warning("%s=%s: others may %s this folder (mode %o): chmod 700 it", name, folder, how, _mode(status))


def warn_of_open_secret(name: str, path: str | None) -> None:
    """Warns of a file with secrets that others may read, or that a group may unless it is root's, as Debian's group
    ssl-cert reads keys; and of one that is another user's. name: of the option that named it. A file that cannot be
    read is reported by who reads it."""
    try:
        status = None if path is None else os.stat(path)
    except OSError:
        return
    if status is None or not stat.S_ISREG(status.st_mode):
        return
    if status.st_mode & _OTHERS or (status.st_mode & _GROUP and status.st_uid != 0) or status.st_mode & 0o020:
        # With mode 600 another user's file, as containers get their secrets, could not be read here.
        is_ours = os.geteuid() in (0, status.st_uid)
        mended = "chmod 600 it" if is_ours else "let a group of its readers have it, with mode 640"
        logger.warning("%s=%s: others may read this secret (mode %o): %s", name, path, _mode(status), mended)
    elif status.st_uid not in (0, os.geteuid()):
        logger.warning("%s=%s: this secret belongs to user %d, who may read and change it", name, path, status.st_uid)


def _mode(status: os.stat_result) -> int:
    return stat.S_IMODE(status.st_mode)
