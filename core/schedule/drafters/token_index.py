"""Where runs of tokens occurred before: a hash table of bounded size over an array of tokens.

For several lengths n, the table maps the hash of n adjacent tokens to the place after their latest occurrence. A token
costs the same whatever came before it, and a search reads one entry per length, so both are O(1); the hash is that of
Karp and Rabin ("Efficient randomized pattern-matching algorithms", 1987), computed for many places at once:

    tokens      5  8  3  9  4  8  3  ?        last two tokens: 8 3
    places      0  1  2  3  4  5  6  7        "8 3" -> 3: what follows may be 9 4

Entries are only hints. Whoever uses one compares the tokens, since the array may have changed since, and entries of
different runs may overwrite each other.

Each entry may also count how often its run came again (`seen`), and how often it then went on as the time before
(`agreed`), which is an estimate of how far a copy can be trusted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, from the golden ratio: spreads token ids over 64 bits
_WORD = 1 << 64
MOST_ADDED = 1 << 11
"""Most tokens that are added to an index for one step: one or two milliseconds' work."""


class TokenIndex:
    """Borrows the array of tokens; one entry per slot. Not thread-safe."""

    def __init__(self, tokens: np.ndarray, lengths: Sequence[int], num_slots: int, *, counts: bool) -> None:
        """tokens: [num_places] int32, changed by its owner. lengths: ascending. num_slots: a power of two. counts:
        count for `trust`, which makes adding half as fast."""
        self._tokens, self.lengths, self._counts = tokens, tuple(lengths), counts
        self._shift = np.uint64(64 - (num_slots.bit_length() - 1))
        self._place = np.zeros(num_slots, np.int64)  # after the latest occurrence; 0: the slot is empty
        self._tag = np.zeros(num_slots, np.uint32)  # tells the runs of a slot apart
        self._seen = np.zeros(num_slots if counts else 0, np.uint32)
        self._agreed = np.zeros_like(self._seen)
        for column in (self._place, self._tag, self._seen, self._agreed):
            column.fill(0)  # else the first step that adds runs waits for all of this memory
        longest = self.lengths[-1]
        powers = [pow(_MULTIPLIER, longest - nth, _WORD) for nth in range(longest)]
        self._powers = np.array(powers, np.uint64)  # of the tokens of a run, the last one's at the end

    @property
    def longest(self) -> int:
        return self.lengths[-1]

    def add(self, places: np.ndarray, room: np.ndarray, owners: np.ndarray) -> None:
        """Adds the runs that end before `places`, [n] int64 ascending within a text, each followed by a known token.

        room: [n] how many tokens of its text come before each place, so that no run begins before its text. owners:
        [n] uint64; a search finds runs of the same owner.
        """
        if not len(places):
            return
        runs, following = self.runs(places), self._tokens[places]
        for length in self.lengths:
            fits = room >= length
            if fits.all():
                self._add(self._hashes(runs, length, owners), places, following)
            elif fits.any():
                self._add(self._hashes(runs[fits], length, owners[fits]), places[fits], following[fits])

    def _add(self, hashes: np.ndarray, places: np.ndarray, following: np.ndarray) -> None:
        slots, tags = self._slots(hashes), hashes.astype(np.uint32)
        if self._counts:
            self._count(hashes, slots, tags, places, following)
        self._place[slots], self._tag[slots] = places, tags  # of equal slots the last, so the latest occurrence

    def _count(
        self, hashes: np.ndarray, slots: np.ndarray, tags: np.ndarray, places: np.ndarray, following: np.ndarray
    ) -> None:
        before = np.where(self._tag[slots] == tags, self._place[slots], 0)
        if len(slots) > 1:  # the one before may be among the new ones
            order = np.argsort(hashes, kind="stable")
            again = hashes[order[1:]] == hashes[order[:-1]]
            before[order[1:][again]] = places[order[:-1][again]]
        is_new = before == 0
        self._seen[slots[is_new]] = 0
        self._agreed[slots[is_new]] = 0
        known = ~is_new
        np.add.at(self._seen, slots[known], 1)
        np.add.at(self._agreed, slots[known], (self._tokens[before[known]] == following[known]).astype(np.uint32))

    def find(self, runs: np.ndarray, room: np.ndarray, owners: np.ndarray, length: int) -> np.ndarray:
        """[n] int64: the place after the latest occurrence of the last `length` tokens of each of `runs`, [n, longest]
        uint64; 0 where none is known. room: [n] how many tokens of each run exist. owners: as in `add`."""
        found = np.zeros(len(runs), np.int64)
        fits = room >= length
        if fits.any():
            hashes = self._hashes(runs[fits], length, owners[fits])
            slots = self._slots(hashes)
            found[fits] = np.where(self._tag[slots] == hashes.astype(np.uint32), self._place[slots], 0)
        return found

    def trust(self, tokens: np.ndarray, length: int, owner: int) -> np.ndarray:
        """[num_tokens - length] float: for each token of `tokens`, [num_tokens] int32, after the first `length`: an
        estimate of how likely it is after the run before it. Only with `counts`."""
        runs = np.lib.stride_tricks.sliding_window_view(tokens[:-1], length)
        owners = np.full(len(runs), owner, np.uint64)
        hashes = self._hashes(runs.astype(np.uint64), length, owners)
        slots = self._slots(hashes)
        is_known = self._tag[slots] == hashes.astype(np.uint32)
        share = (self._agreed[slots] + 1.0) / (self._seen[slots] + 1.0)
        trust: np.ndarray = np.where(is_known, share, 1.0)
        return trust

    def runs(self, places: np.ndarray) -> np.ndarray:
        """[n, longest] uint64: the tokens before each place, as `find` takes them."""
        at = places[:, None] - np.arange(self.longest, 0, -1)
        return self._tokens[np.maximum(at, 0)].astype(np.uint64)

    def _hashes(self, runs: np.ndarray, length: int, owners: np.ndarray) -> np.ndarray:
        """[n] uint64: hashes of the last `length` tokens of each of `runs`, [n, >= length] uint64."""
        hashes: np.ndarray = ((runs[:, -length:] + np.uint64(1)) * self._powers[-length:]).sum(axis=1, dtype=np.uint64)
        hashes += owners * np.uint64(0xD6E8FEB86659FD93) + np.uint64(length)
        hashes ^= hashes >> np.uint64(32)
        hashes *= np.uint64(0xBF58476D1CE4E5B9)
        return hashes

    def _slots(self, hashes: np.ndarray) -> np.ndarray:
        slots: np.ndarray = (hashes >> self._shift).astype(np.int64)
        return slots
