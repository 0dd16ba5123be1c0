"""How programs of ours are started, and where they look for a user's own modules.

A program imports from the interpreter's own folders and from PYTHONPATH, as its parent does, and never from the current
folder: a `random.py` that happens to lie there would otherwise run in it. A module that the user names in an option, or
whose file is the user's script, is also looked for where the program that the user started looks for it: those folders
are passed on in an environment variable, and appended to the path, behind everything else, when such a module is asked
for (`follow_user_path`).
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Sequence

SEARCHED = ("PYTHONPATH", "PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
"""Variables that list folders in which modules, programs, libraries and headers are looked for. An empty entry, as
`PYTHONPATH=$PYTHONPATH:/mine` leaves it where the variable was not set, means the current folder."""
FOR_PROGRAMS: dict[str, str] = {}
"""Environment variables for the programs that this process starts, beside its own, which is its user's."""
USER_PATH = "HEADRACE_USER_PATH"
"""JSON list of the folders from which the program that the user started imports."""


def python_command(*arguments: str) -> list[str]:
    """The command line of this interpreter with these arguments (`-m`, a module, ...), as isolated as this process is.

    -P keeps the current folder, or a script's, off the path; -I, -E and -s are passed on from the parent.
    """
    flags = ["-P"]
    if sys.flags.isolated:
        flags.append("-I")
    else:
        flags += ["-E"] if sys.flags.ignore_environment else []
        flags += ["-s"] if sys.flags.no_user_site else []
    return [sys.executable, *flags, *arguments]


def occupy_standard_descriptors() -> None:
    """Opens the null device at those of the descriptors 0, 1 and 2 that are closed, as a daemon's may be.

    Otherwise a socket or memory of ours gets such a number, and a child that inherits it has its standard stream there.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


def starting_folder() -> str | None:
    """The `cwd` for a program of ours: None, that is this process's own, or / where that folder has been deleted."""
    try:
        os.getcwd()
    except OSError:
        return "/"
    return None


def child_environment(**changed: str) -> dict[str, str]:
    """This process's environment, with FOR_PROGRAMS, the folders that it imports from for `follow_user_path`, and
    `changed`."""
    passed_on = os.environ.get(USER_PATH)
    if passed_on is None:
        passed_on = json.dumps(_folders(sys.path))
    return {**own_environment(), **FOR_PROGRAMS, USER_PATH: passed_on, **changed}


def own_environment() -> dict[str, str]:
    """This process's environment, for a program of ours, without the empty entries of SEARCHED."""
    environment = dict(os.environ)
    for name in SEARCHED:
        if path := environment.get(name):
            environment[name] = os.pathsep.join(filter(None, path.split(os.pathsep)))
    return environment


def follow_user_path() -> list[str]:
    """Appends the folders that the user's program imports from to this process's path.

    Returns those that it leaves out, since everybody may write there. Does nothing in the user's program itself.
    """
    left_out = []
    for folder in json.loads(os.environ.get(USER_PATH) or "[]"):
        if folder in sys.path:
            continue
        if _is_open_to_all(folder):
            left_out.append(folder)
        else:
            sys.path.append(folder)
    return left_out


def _folders(path: Sequence[str]) -> list[str]:
    """Absolute, without what every interpreter has by itself. An empty entry stands for the current folder."""
    own = {os.path.abspath(each) for each in (sys.prefix, sys.base_prefix)}
    try:
        found = [os.path.abspath(each) for each in path]
    except OSError:  # the current folder has been deleted
        found = [each for each in path if os.path.isabs(each)]
    inside = tuple(os.path.join(each, "lib") for each in own)
    return [each for each in found if os.path.isdir(each) and not each.startswith(inside)]


def _is_open_to_all(folder: str) -> bool:
    try:
        return bool(os.stat(folder).st_mode & stat.S_IWOTH)
    except OSError:
        return True
