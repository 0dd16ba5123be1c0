"""Draft tokens by suffix decoding: what followed the row's last tokens before, in the row itself or in past outputs.

(Oliaro et al., "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", 2024; here with hash tables
in place of suffix trees.) The longest of LENGTHS runs that is known counts. A draft is at most max_spec_factor times as
long as its match, and ends where the tokens so far are right with a probability below min_token_prob, estimated from
how often their runs went on that way. Of a row's own text and the past outputs, the one with more tokens expected to be
right wins. Past outputs are those of requests with the same cache salt.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headrace.core.options.speculation import SuffixSpeculation
from headrace.core.schedule.drafters.drafter import NOTHING
from headrace.core.schedule.drafters.past_outputs import PastOutputs
from headrace.core.schedule.drafters.row_texts import continued
from headrace.core.schedule.drafters.text_drafter import TextDrafter
from headrace.core.schedule.drafters.token_index import TokenIndex
from headrace.core.schedule.requests import RowTable

LENGTHS = (3, 5, 8, 16)
"""Lengths of the runs of last tokens that are searched for."""


class _Match(NamedTuple):
    length: int
    """How many of the row's last tokens were found."""
    distance: int
    """How many tokens back in the row; 0: not there."""
    place: int
    """The place in the ring of past outputs after them; 0: not there."""


class SuffixDrafter(TextDrafter):
    def __init__(self, speculation: SuffixSpeculation) -> None:
        self.speculation = speculation

    def bind(self, rows: RowTable) -> None:
        super().bind(rows)
        depth = self.speculation.max_tree_depth
        lengths = [each for each in LENGTHS if each <= depth] or [depth]
        most = self.speculation.num_speculative_tokens
        self.search(rows, lengths, most, counts=True, num_kinds=len(lengths))
        self._past = PastOutputs(lengths, self.speculation.max_cached_requests)
        self._matches: dict[int, _Match] = {}  # by row looked up

    def look_up(self, rows: np.ndarray) -> None:
        self._texts.update(rows)
        self._past.update()
        self._matches.clear()
        owners = np.array([self._past.owner(self._salt(row)) for row in rows.tolist()], np.uint64)
        runs, ends = self._texts.runs(rows), self.table.num_known_tokens[rows]
        for length in reversed(self._texts.index.lengths):
            if not len(rows):
                break
            distances, places = self._texts.find(rows, runs, length), np.zeros(len(rows), np.int64)
            if owners.any():
                places = self._past.find(runs, ends, owners, length)
            found = (distances > 0) | (places > 0)
            for row, *where in zip(*(each[found].tolist() for each in (rows, distances, places)), strict=True):
                self._matches[row] = _Match(length, *where)
            rows, runs, ends, owners = rows[~found], runs[~found], ends[~found], owners[~found]
        for row, num_tokens in zip(rows.tolist(), ends.tolist(), strict=True):
            self.pacing.missed(row, num_tokens)

    def _salt(self, row: int) -> str:
        request = self.table.requests[row]
        return "" if request is None else request.prefix_key.cache_salt

    def propose(self, row: int, limit: int, least_likely: float = 0.0) -> np.ndarray:
        match = self._matches.get(row)
        if match is None:
            return NOTHING
        text, best, most_right = self._texts.text(row), NOTHING, 0.0
        kind = self._texts.index.lengths.index(match.length)
        limit = min(limit, self.confidence.most_tokens(kind, least_likely))
        if match.distance:
            size = self._size(text, text[: len(text) - match.distance], match.length)
            draft = continued(text, match.distance, min(limit, size))
            best, most_right = self._trusted(self._texts.index, text, draft, match.length, row)
        if match.place:
            past = self._past
            size = self._size(text, past.before(match.place, self.speculation.max_tree_depth), match.length)
            draft = past.after(match.place, min(limit, size))
            draft, right = self._trusted(past.index, text, draft, match.length, past.owner(self._salt(row)))
            if right > most_right:
                best = draft
        return self.tried(row, kind, best)

    def _size(self, text: np.ndarray, before: np.ndarray, length: int) -> int:
        """The most tokens of a draft after a match of at least `length` tokens, which `before` ends with."""
        most = min(self.speculation.max_tree_depth, len(text), len(before))
        differ = np.flatnonzero(text[len(text) - most :][::-1] != before[len(before) - most :][::-1])
        matched = max(length, int(differ[0]) if len(differ) else most)
        size = matched * self.speculation.max_spec_factor + 1e-6  # infinite with a very large factor
        return int(min(size, self.speculation.num_speculative_tokens))

    def _trusted(
        self, index: TokenIndex, text: np.ndarray, draft: np.ndarray, length: int, owner: int
    ) -> tuple[np.ndarray, float]:
        """The part of a draft that is likely enough, and how many of its tokens may be expected to be right."""
        if not len(draft):
            return draft, 0.0
        likely = np.cumprod(index.trust(np.concatenate([text[-length:], draft]), length, owner))
        size = int(np.count_nonzero(likely >= self.speculation.min_token_prob))  # it only falls
        return draft[:size], float(likely[:size].sum())

    def leave(self, row: int) -> None:
        begin = max(0, int(self.table.num_prompt_tokens[row]) - LENGTHS[-1])
        self._past.add(self._texts.text(row)[begin:], self._salt(row))
