"""Resource limits of a process."""

from __future__ import annotations

import contextlib
import resource


def file_limit() -> int:
    """How many files, sockets among them, this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_file_limit() -> None:
    """Raises the limit of open files to the highest the system allows: each connection takes a file descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
