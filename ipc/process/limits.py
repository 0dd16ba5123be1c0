"""Resource limits of a process."""

from __future__ import annotations

import contextlib
import resource


def raise_file_limit() -> None:
    """Raises the limit of open files to the highest the system allows: each connection takes a file descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
