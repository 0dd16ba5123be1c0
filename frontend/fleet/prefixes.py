"""Which engines cache which prompt prefixes (ipc/prefix_names.py): a bounded index that may be out of date."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

MOST_PREFIXES = 1 << 17
_SWEPT_PER_ENGINE = 1024
"""Number of prefixes that may be scanned per engine that left."""


class PrefixIndex:
    """Maps a prefix's name to the engines that probably cache it, as a mask with one bit per engine.

    Two generations bound its size: a prefix not looked up during the time that the younger one takes to fill is
    forgotten.
    """

    def __init__(self, most_prefixes: int = MOST_PREFIXES) -> None:
        self._most = max(1, most_prefixes // 2)
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._retired = 0
        """Bits of removed engines that masks may still contain. Lookups ignore them, as they are not in `alive`."""

    def __len__(self) -> int:
        return len(self._young) + sum(key not in self._young for key in self._old)

    def holders(self, keys: Iterable[int], alive: int) -> list[int]:
        """For each prefix, shortest first, the mask of engines that cache it and all before it; ends before the first
        that none of the `alive` engines caches."""
        young, old, masks = self._young, self._old, list[int]()
        for key in keys:
            mask = young.get(key)
            if mask is None:
                mask = old.get(key)
                if mask is None:
                    break
                self._put(key, mask)
            alive &= mask
            if not alive:
                break
            masks.append(alive)
        return masks

    def add(self, keys: Iterable[int], engine: int) -> None:
        """The engine with this bit caches these prefixes."""
        for key in keys:
            known = self._find(key)
            self._put(key, known | engine if known else engine)  # shares one int object among all its own prefixes

    def discard(self, keys: Iterable[int], engine: int) -> None:
        """The engine with this bit no longer caches these prefixes."""
        for key in keys:
            left = self._find(key) & ~engine
            if left:
                self._put(key, left)
            else:
                self._young.pop(key, None)
                self._old.pop(key, None)

    def retire(self, engine: int) -> list[int]:
        """Removes an engine for good. Returns the bits that may be reused: those of engines that were cleared from all
        masks. If the index is large, this is done for many engines at once."""
        self._retired |= engine
        if self._retired.bit_count() * _SWEPT_PER_ENGINE < len(self._young) + len(self._old):
            return []
        retired, self._retired = self._retired, 0
        self.forget(retired)
        return [1 << number for number in range(retired.bit_length()) if retired >> number & 1]

    def forget(self, engines: int) -> None:
        """These engines cache nothing any more."""
        for generation in (self._young, self._old):
            for key in [key for key, mask in generation.items() if mask & engines]:
                generation[key] &= ~engines
                if not generation[key]:
                    del generation[key]

    def _find(self, key: int) -> int:
        mask = self._young.get(key)
        return self._old.get(key, 0) if mask is None else mask

    def _put(self, key: int, mask: int) -> None:
        self._young[key] = mask
        if len(self._young) > self._most:
            self._old, self._young = self._young, {}


class EngineBits:
    """Assigns the members' bits in masks. Bits of members that left are reused, so that masks do not keep growing."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._next = 0

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._next += 1
        return self._next - 1

    def give_back(self, bit: int) -> None:
        heapq.heappush(self._free, bit.bit_length() - 1)
