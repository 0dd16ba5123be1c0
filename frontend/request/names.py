"""Names of requests to which their caller gives none: never one that a caller's own request has."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator


def free_numbers(is_taken: Callable[[str], bool]) -> Iterator[str]:
    """Numbers from 0 on, as vLLM's `LLM` counts requests, without those that are taken when they are drawn."""
    return itertools.filterfalse(is_taken, map(str, itertools.count()))  # thread-safe, unlike a generator


def random_names() -> Iterator[str]:
    """Names that no caller comes to by counting. An abort of a caller's own request that has ended hits no other."""
    common = secrets.token_hex(8)
    return map(f"{common}-{{}}".format, itertools.count())
