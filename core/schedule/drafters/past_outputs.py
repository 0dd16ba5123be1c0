"""A ring of past outputs, and an index of what followed in them: for drafts from the answers of earlier requests.

The ring holds the last tokens of each prompt, so that a repeated question finds the beginning of its answer, and then
the output; -1 ends each text. Texts of different cache salts never meet. The oldest texts are overwritten:

    text 5 .  text 6 ..........  text 7 ...  (free)  text 3 ....  text 4 .....  (too little room for text 5)
                                             ^ head
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headrace.core.schedule.drafters.token_index import MOST_ADDED, TokenIndex

RING_TOKENS = 1 << 18
"""Tokens of past outputs that are kept: some hundred answers, in about 30 MB with their index."""
_END = -1


class _Text(NamedTuple):
    begin: int
    """Its first place in the ring; its end mark is at `begin + size`."""
    size: int
    salt: str
    owner: int
    """The number of its salt."""


class PastOutputs:
    """Owns the ring. Used from one thread."""

    def __init__(self, lengths: Sequence[int], most_texts: int, ring_tokens: int = RING_TOKENS) -> None:
        """lengths: of the runs that can be found, ascending. most_texts: with more texts the oldest is forgotten."""
        self._ring = np.full(ring_tokens, _END, np.int32)
        self._owner = np.zeros(ring_tokens, np.int64)  # whose text a token belongs to
        self.index = TokenIndex(self._ring, lengths, 2 << (ring_tokens * len(lengths) - 1).bit_length(), counts=True)
        self._most_texts = most_texts
        self._texts: deque[_Text] = deque()  # the oldest first
        self._unindexed: deque[tuple[_Text, int]] = deque()  # texts, and how many of their tokens are in the index
        self._salts: dict[str, list[int]] = {}  # salt -> its number, and how many of the texts have it
        self._next_owner = 1
        self._head = 0

    def owner(self, salt: str) -> int:
        """The number of the salt's texts; 0 if there are none."""
        return self._salts[salt][0] if salt in self._salts else 0

    def add(self, tokens: np.ndarray, salt: str) -> None:
        """Adds a text, [num_tokens] int32: the end of a prompt, and its output."""
        tokens = tokens[-(len(self._ring) // 4) :]  # no text takes more than a quarter
        size = len(tokens)
        if size <= self.index.lengths[0] or not self._most_texts:
            return
        begin = self._head
        if begin + size + 1 > len(self._ring):
            begin = 0
            while self._texts and self._texts[0].begin >= self._head:
                self._forget_oldest()
        while self._texts and self._texts[0].begin <= begin + size and self._texts[0].begin >= begin:
            self._forget_oldest()
        while len(self._texts) >= self._most_texts:
            self._forget_oldest()
        known = self._salts.setdefault(salt, [self._next_owner, 0])
        self._next_owner += known[1] == 0
        known[1] += 1
        text = _Text(begin, size, salt, known[0])
        self._ring[begin : begin + size], self._ring[begin + size] = tokens, _END
        self._owner[begin : begin + size + 1] = text.owner
        self._texts.append(text)
        self._unindexed.append((text, self.index.lengths[0]))
        self._head = begin + size + 1

    def _forget_oldest(self) -> None:
        text = self._texts.popleft()
        if self._unindexed and self._unindexed[0][0] is text:
            self._unindexed.popleft()
        self._ring[text.begin : text.begin + text.size] = _END
        self._salts[text.salt][1] -= 1
        if not self._salts[text.salt][1]:
            del self._salts[text.salt]

    def update(self) -> None:
        """Indexes the next MOST_ADDED tokens of the texts that were added."""
        room = MOST_ADDED
        while self._unindexed and room > 0:
            text, done = self._unindexed.popleft()
            end = min(text.size, done + room)
            inside = np.arange(done, end)
            self.index.add(text.begin + inside, inside, np.full(len(inside), text.owner, np.uint64))
            room -= end - done
            if end < text.size:
                self._unindexed.appendleft((text, end))

    def find(self, runs: np.ndarray, room: np.ndarray, owners: np.ndarray, length: int) -> np.ndarray:
        """[n] int64: the places after the latest occurrence of the last `length` tokens of each of `runs`; 0 where none
        is known. Arguments as in `TokenIndex.find`."""
        places = self.index.find(runs, room, owners, length)
        before = self.index.runs(places)[:, -length:]
        is_right = (places >= length) & (self._owner[places] == owners.astype(np.int64))
        is_right &= (before == runs[:, -length:]).all(axis=1) & (self._ring[places] != _END)
        return np.where(is_right, places, 0)

    def after(self, place: int, limit: int) -> np.ndarray:
        """At most `limit` tokens that follow the place in its text, [num_tokens] int32."""
        tokens = self._ring[place : place + limit]
        ends = np.flatnonzero(tokens == _END)
        return tokens[: ends[0]].copy() if len(ends) else tokens.copy()

    def before(self, place: int, most: int) -> np.ndarray:
        """At most `most` tokens before the place; they may belong to the text before."""
        return self._ring[max(0, place - most) : place]
