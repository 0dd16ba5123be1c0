"""Finds markers in text that arrives in pieces, and incomplete markers at its end."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence


@functools.lru_cache(maxsize=64)
def make_markers(texts: tuple[str, ...]) -> Markers:
    """Cached: a tokenizer may have hundreds of special tokens, which are the same for every answer."""
    return Markers(texts)


class Markers:
    """Finds the first occurrence of any of several texts."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = tuple(filter(None, markers))
        longest_first = sorted(self._markers, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        first_characters = sorted({re.escape(each[0]) for each in self._markers})
        self._first = re.compile("|".join(first_characters) or r"(?!)")
        self.may_begin_in: Callable[[str], object] = self._first.search
        """A fast test whether a text contains a marker's first character."""
        self.may_begin_or_end_in_space = self._or_also(r"[ \t\r\n]\Z")
        """The same, or whether the text ends in white space."""
        self.may_begin_or_is_escaped = self._or_also(r'[\x00-\x1f"\\]')
        """The same, or whether the text has characters that a JSON string must escape."""
        self._most_held = max(map(len, self._markers), default=1) - 1
        longer = {each: tuple(o for o in self._markers if o != each and o.startswith(each)) for each in self._markers}
        self._longer = {each: others for each, others in longer.items() if others}

    def _or_also(self, pattern: str) -> Callable[[str], object]:
        return re.compile(f"{self._first.pattern}|{pattern}").search

    def find(self, text: str, start: int = 0, *, is_over: bool) -> re.Match[str] | None:
        """The first marker from `start` on. is_over: no more text follows; else a marker at the text's end that may
        become a longer one is not found yet."""
        found = self._pattern.search(text, start)
        if found is None or is_over or not self._longer:
            return found
        rest = text[found.start() :]
        return None if any(o.startswith(rest) for o in self._longer.get(found.group(), ())) else found

    def held(self, text: str) -> int:
        """Length of the longest suffix of `text` that begins a marker."""
        for first in self._first.finditer(text, max(0, len(text) - self._most_held)):
            end = text[first.start() :]
            if any(marker.startswith(end) for marker in self._markers):
                return len(end)
        return 0
