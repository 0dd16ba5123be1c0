"""The folder of the files that Headrace keeps for a user between runs: demo model, tokenizers, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """HEADRACE_CACHE, or ~/.cache/headrace by default. It may not exist yet.

    kernels/cpu/build.py imports nothing of Headrace and repeats this rule.
    """
    return Path(os.environ.get("HEADRACE_CACHE") or "~/.cache/headrace").expanduser()
