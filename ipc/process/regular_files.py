"""Opening what should be a file: a named pipe that nobody writes to, a terminal or a device would be waited for."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class NoFileError(OSError):
    """The path is something else than a file, or a file that is too large; the message says what."""


def require_file(path: str | os.PathLike[str]) -> None:
    """Raises NoFileError for what is no file, and OSError where there is nothing. Opens nothing."""
    kind = stat.S_IFMT(os.stat(path).st_mode)
    if kind != stat.S_IFREG:
        raise NoFileError(f"{os.fspath(path)} is {_KINDS.get(kind, 'something else')}, and a file is expected")


def is_there(path: str | os.PathLike[str]) -> bool:
    """Whether something has this name, be it no file or a link to nothing: reading it then tells what it is, where an
    optional file would be left out in silence."""
    return os.path.lexists(path)


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file for reading, or this process's own pipe, as a shell passes it: `<(command)`, /dev/stdin.

    Raises NoFileError for any other thing, and OSError.
    """
    if not _is_own_pipe(path):
        require_file(path)
    return open(path, "rb")


def read_file(path: str | os.PathLike[str], most_bytes: int | None = None) -> bytes:
    """The content of `open_file`. Raises NoFileError for more than most_bytes, before any is read."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if most_bytes is not None and size > most_bytes:
            raise NoFileError(f"{os.fspath(path)} has {size} bytes, and at most {most_bytes} are read")
        return file.read()


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of `open_file` in UTF-8, with any kind of line break as a line feed, and without the mark that some
    editors put before it. Raises UnicodeDecodeError."""
    return read_file(path).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def _is_own_pipe(path: str | os.PathLike[str]) -> bool:
    """Whether the path is a descriptor of this process at which there is a pipe: its writer has it open already."""
    try:
        status = os.stat(path)
        where = Path(os.path.realpath(path))
    except OSError:
        return False
    return stat.S_ISFIFO(status.st_mode) and where.parts[:2] == ("/", "proc") and where.name.startswith("pipe:[")
