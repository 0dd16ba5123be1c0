"""Limits of a process."""

from __future__ import annotations

import contextlib
import resource


def raise_file_limit() -> None:
    """Each connection is a descriptor: takes as many as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
