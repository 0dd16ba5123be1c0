"""The user's own folder for the sockets of engines, and for what is kept between runs where there is no home folder."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from headrace.ipc.failure import HeadraceError
from headrace.ipc.process.own_folder import temporary_folders
from headrace.ipc.process.trusted_files import warn_of, why_untrusted

UNIX_PATH_BYTES = 107
_LONGEST_NAME = "/coordinator-4194304-00000000000000.sock"


class AddressError(HeadraceError, ValueError):
    """An address that cannot be used; the message names the accepted forms."""


def runtime_directory() -> Path:
    """The user's 0700 directory for sockets: HEADRACE_RUNTIME_DIR, or else the first of these that can be one and whose
    path leaves room for a socket's name: `headrace` in XDG_RUNTIME_DIR, `headrace-UID` in a temporary folder.

    Where other users have taken all these names, or can replace what is made there, one with a random suffix is made,
    and found again by its prefix.
    Raises AddressError if there is none, or if the named one belongs to someone else or others may enter it.
    """
    named = os.environ.get("HEADRACE_RUNTIME_DIR")
    if named:
        return _warned(_private_directory(Path(named)))
    problems = []
    for path in _default_directories():
        if len(os.fsencode(path)) > UNIX_PATH_BYTES - len(_LONGEST_NAME):
            continue
        if reason := why_untrusted(path):
            problems.append(reason)
            continue
        try:
            return _private_directory(path)
        except AddressError as error:
            problems.append(str(error))
    for folder in temporary_folders():
        if len(os.fsencode(folder)) > UNIX_PATH_BYTES - len(f"/headrace-{os.getuid()}-xxxxxxxx{_LONGEST_NAME}"):
            continue
        prefix = f"headrace-{os.getuid()}-"
        for path in sorted(folder.glob(f"{prefix}*")):
            with contextlib.suppress(AddressError):
                return _warned(_private_directory(path))
        with contextlib.suppress(OSError):
            return _warned(Path(tempfile.mkdtemp(prefix=prefix, dir=folder)))
    raise AddressError(
        "there is no folder for sockets: set HEADRACE_RUNTIME_DIR to one of yours that only you can enter (mode 0700), "
        "or TMPDIR to one that can be written" + "".join(f"; {problem}" for problem in problems)
    )


def _default_directories() -> Iterator[Path]:
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.access(base, os.W_OK):
        yield Path(base).absolute() / "headrace"
    for folder in temporary_folders():
        yield folder / f"headrace-{os.getuid()}"


def _warned(path: Path) -> Path:
    if reason := why_untrusted(path):
        warn_of(
            reason, f"Other users can put their own in the place of {path}, where engines' sockets and records are."
        )
    return path


def _private_directory(path: Path) -> Path:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise AddressError(f"{path} cannot be made a directory for sockets: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise AddressError(
            f"{path} must be a directory of yours that only you can enter (mode 0700); set HEADRACE_RUNTIME_DIR to one"
        )
    return path
