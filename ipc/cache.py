"""Where this user's files are kept from one run to the next: the demo model, tokenizers, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """HEADRACE_CACHE, else ~/.cache/headrace. May not exist yet. (kernels/cpu/build.py, which imports none of ours,
    has the same rule.)
    """
    return Path(os.environ.get("HEADRACE_CACHE") or "~/.cache/headrace").expanduser()
