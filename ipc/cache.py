"""The folder of the files that Headrace keeps for a user between runs: demo model, tokenizers, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.ipc.process.runtime_directory import runtime_directory


def cache_folder() -> Path:
    """HEADRACE_CACHE, or ~/.cache/headrace by default. It may not exist yet.

    A user without a home (no HOME, and no entry in /etc/passwd, as in containers) has it in the runtime directory.
    """
    named = os.environ.get("HEADRACE_CACHE") or "~/.cache/headrace"
    try:
        return Path(named).expanduser()
    except RuntimeError:  # there is no home
        return runtime_directory() / "cache"
