"""Which files may be loaded or believed: those that nobody but this user and root can have written.

A compiled library, a converted tokenizer or a record that another user has put into a cache or temporary folder would
otherwise run or speak as this user. A path is followed from the root: every folder and link of it, and the file at its
end, must belong to this user or root, and nobody else may write there. A folder that everybody may write, as /tmp, is
passed if it is sticky: there only the owner of an entry can replace it. What is above can then not change between the
check and the use. Caches that fail are left alone, and what they would have held is made anew, with a warning.
"""

from __future__ import annotations

import contextlib
import functools
import grp
import logging
import os
import pwd
import stat
from pathlib import Path

logger = logging.getLogger(__name__)

_MOST_LINKS = 40
"""As the kernel follows at most."""


class UntrustedFileError(OSError):
    """The path is, or leads through, something that another user can have written; the message says what."""


def trusted_path(path: str | os.PathLike[str]) -> Path:
    """The path with its links followed. Raises UntrustedFileError, and OSError where there is nothing."""
    return _follow(path, make=False)


def trusted_folder(path: str | os.PathLike[str]) -> Path:
    """The folder, with its links followed; what is missing of it is made, and nobody else may write there.

    Raises UntrustedFileError, and OSError if it cannot be made.
    """
    found = _follow(path, make=True)
    if not found.is_dir():
        raise NotADirectoryError(f"{found} is no folder")
    return found


def read_trusted(path: str | os.PathLike[str]) -> bytes:
    """The content of a regular file. Raises UntrustedFileError, and OSError."""
    found = trusted_path(path)
    with open(os.open(found, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if reason := _why_not(os.fstat(file.fileno()), is_last=True):
            raise UntrustedFileError(f"{found} {reason}")
        return file.read()


@functools.cache
def warn_of(reason: str, instead: str) -> None:
    """One warning for each reason. instead: what is done without the file or folder."""
    logger.warning("%s. %s", reason, instead)


def why_untrusted(path: str | os.PathLike[str]) -> str:
    """The reason why what is at the path, or would be made there, may not be believed; "" if it may."""
    try:
        _follow(path, make=False)
    except UntrustedFileError as error:
        return str(error)
    except OSError:
        pass  # all that is there of the path is trusted, or it cannot be used at all
    return ""


def why_untrusted_tree(folder: str | os.PathLike[str]) -> str:
    """As `why_untrusted`, of all that is in a folder too. Links in it are judged by their targets."""
    if reason := why_untrusted(folder):
        return reason
    for at, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(at, name)
            try:
                status = os.lstat(path)
            except OSError:  # just removed
                continue
            is_link = stat.S_ISLNK(status.st_mode)
            reason = why_untrusted(path) if is_link else _why_not(status, is_last=True)
            if reason:
                return reason if is_link else f"{path} {reason}"
    return ""


def _follow(path: str | os.PathLike[str], *, make: bool) -> Path:
    at = "/"
    left = list(reversed(Path(os.path.abspath(path)).parts[1:]))
    num_links = 0
    _require(at, os.lstat(at), is_last=not left)
    while left:
        name = left.pop()
        if name == "..":  # of a link's target
            at = os.path.dirname(at)
            continue
        entry = os.path.join(at, name)
        status = _status(entry, make=make)
        _require(entry, status, is_last=not left and not stat.S_ISLNK(status.st_mode))
        if not stat.S_ISLNK(status.st_mode):
            at = entry
            continue
        num_links += 1
        if num_links > _MOST_LINKS:
            raise OSError(f"{path} leads through more than {_MOST_LINKS} links")
        target = os.readlink(entry)
        at = "/" if os.path.isabs(target) else at
        left += reversed([part for part in target.split("/") if part not in ("", ".")])
    return Path(at)


def _status(entry: str, *, make: bool) -> os.stat_result:
    try:
        return os.lstat(entry)
    except FileNotFoundError:
        if not make:
            raise
    with contextlib.suppress(FileExistsError):  # another process was faster
        os.mkdir(entry, 0o755)
    return os.lstat(entry)


def _require(entry: str, status: os.stat_result, *, is_last: bool) -> None:
    if reason := _why_not(status, is_last=is_last):
        raise UntrustedFileError(f"{entry} {reason}")


def _why_not(status: os.stat_result, *, is_last: bool) -> str:
    mode = status.st_mode
    owners = {0, os.geteuid()}
    if not is_last and stat.S_ISDIR(mode):
        # In a user namespace without root's number the system's own folders are those of whoever owns the root.
        owners.add(os.stat("/").st_uid)
    if status.st_uid not in owners:
        return f"belongs to user {status.st_uid}, and only what belongs to this user or root is used"
    if stat.S_ISLNK(mode):
        return ""  # its own mode means nothing
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        return "is neither a file nor a folder"
    is_sticky_folder = stat.S_ISDIR(mode) and mode & stat.S_ISVTX and not is_last
    others = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_own_group(status.st_gid))
    if others and not is_sticky_folder:
        return f"can be written by other users (mode {stat.S_IMODE(mode):04o}), and only what they cannot is used"
    return ""


def _is_own_group(gid: int) -> bool:
    """Whether a group is a user's private one, named as the user and without other members, as many systems make it
    beside a umask of 002. Root's is none, since services are often put into it."""
    uid = os.geteuid()
    if uid == 0:
        return False
    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
