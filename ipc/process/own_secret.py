"""Secrets that the processes of one user on one host share without being given any: files in the runtime directory."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

from headrace.ipc.failure import HeadraceError
from headrace.ipc.process.runtime_directory import runtime_directory

_SECRET_BYTES = 32


class OwnSecretError(HeadraceError):
    """A secret that is not only this user's."""


def own_secret(name: str) -> str:
    """The secret of this name, in hexadecimal; made at its first use, and the same until its file is removed.

    Raises AddressError without a runtime directory, and OwnSecretError where others could have written the file.
    """
    path = runtime_directory() / name
    try:
        return _read(path)
    except FileNotFoundError:
        make_once(path, _write)
    return _read(path)


def _read(path: Path) -> str:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), encoding="ascii") as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
                text = file.read(2 * _SECRET_BYTES + 1).strip()
                if len(bytes.fromhex(text)) == _SECRET_BYTES:
                    return text
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise OwnSecretError(f"{path} cannot be read: {error}; remove it, and it is made anew") from error
    raise OwnSecretError(f"{path} is no secret of this user alone; remove it, and it is made anew")


def make_once(path: Path, write: Callable[[Path], object]) -> None:
    """Makes a file of the runtime directory unless it exists. `write` makes it beside its place: whoever finds it there
    finds all of it, and of several makers one wins. Raises OwnSecretError."""
    beside = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        write(beside)
        with contextlib.suppress(FileExistsError):
            os.link(beside, path)
    except OSError as error:
        raise OwnSecretError(f"{path} cannot be made: {error}") from error
    finally:
        beside.unlink(missing_ok=True)


def _write(path: Path) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        os.fchmod(file.fileno(), 0o600)  # whatever the umask
        file.write(secrets.token_hex(_SECRET_BYTES) + "\n")
