"""The index of the running rows' own texts, brought up to date as far as it is searched."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.core.schedule.drafters.token_index import MOST_ADDED, TokenIndex
from headrace.core.schedule.requests import RowTable

MOST_SLOTS = 1 << 21
"""Of the index, which takes up to 40 MB. Where many rows are long, the oldest runs are lost."""


class RowTexts:
    """An index over the row table's tokens. A row's place p is row * max_model_len + p of the flat array."""

    def __init__(self, table: RowTable, lengths: Sequence[int], *, counts: bool) -> None:
        """lengths, counts: of the index."""
        num_rows, self._row_size = table.token_ids.shape
        self._table, self.tokens = table, table.token_ids.reshape(-1)
        slots = min(MOST_SLOTS, 2 << (table.token_ids.size * len(lengths)).bit_length())
        self.index = TokenIndex(self.tokens, lengths, slots, counts=counts)
        self._added = np.zeros(num_rows, np.int64)  # by row: places before this one are in the index

    def begin(self, row: int) -> None:
        """A request enters the row."""
        self._added[row] = 0

    def update(self, rows: np.ndarray) -> None:
        """Adds the known tokens of `rows`, [num_rows] int, that are not in the index: first those of rows with few, and
        MOST_ADDED in all, so that a long prompt is complete after some steps."""
        ends = self._table.num_known_tokens[rows].astype(np.int64)
        begins = np.maximum(self._added[rows], self.index.lengths[0])
        counts = np.maximum(ends - begins, 0)
        order = np.argsort(counts, kind="stable")
        rows, begins, counts = rows[order], begins[order], counts[order]
        counts = np.minimum(counts, np.maximum(MOST_ADDED - (np.cumsum(counts) - counts), 0))
        self._added[rows] = np.maximum(begins + counts, self._added[rows])
        rows, begins, counts = rows[counts > 0], begins[counts > 0], counts[counts > 0]
        if len(rows):
            nth = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            inside, of_row = np.repeat(begins, counts) + nth, np.repeat(rows.astype(np.int64), counts)
            self.index.add(of_row * self._row_size + inside, inside, of_row.astype(np.uint64))

    def runs(self, rows: np.ndarray) -> np.ndarray:
        """[num_rows, longest] uint64: the last known tokens of each row."""
        return self.index.runs(rows.astype(np.int64) * self._row_size + self._table.num_known_tokens[rows])

    def find(self, rows: np.ndarray, runs: np.ndarray, length: int) -> np.ndarray:
        """[num_rows] int64: how many tokens back the latest earlier occurrence of each row's last `length` tokens ends;
        0 if none is known. runs: of `rows`."""
        ends = self._table.num_known_tokens[rows].astype(np.int64)
        found = self.index.find(runs, ends, rows.astype(np.uint64), length)
        distances = rows.astype(np.int64) * self._row_size + ends - found
        is_right = (found > 0) & (distances > 0) & (ends - distances >= length)
        is_right &= (self.index.runs(found)[:, -length:] == runs[:, -length:]).all(axis=1)
        return np.where(is_right, distances, 0)

    def text(self, row: int) -> np.ndarray:
        """The row's known tokens, [num_tokens] int32, as they are in the table."""
        return self._table.token_ids[row, : self._table.num_known_tokens[row]]


def continued(text: np.ndarray, distance: int, limit: int) -> np.ndarray:
    """`limit` tokens as they followed `distance` tokens before the text's end. If the run overlaps its continuation,
    the continuation is periodic."""
    return text[len(text) - distance + np.arange(limit) % distance]
