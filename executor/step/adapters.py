"""Adapters (ipc/adapters.py) by row: which of them apply to each token of a step. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headrace.ipc.adapters import RowAdapter
from headrace.ipc.step import NewRow


@dataclass(frozen=True, eq=False)
class TokenAdapters:
    """The adapters of each token, in the order of its request."""

    slots: np.ndarray  # [most_used, num_tokens] int32; -1: none
    scales: np.ndarray  # [most_used, num_tokens] float32

    def of(self, indices: slice | np.ndarray) -> TokenAdapters:
        """Those of these tokens."""
        return TokenAdapters(self.slots[:, indices], self.scales[:, indices])

    def groups(self) -> Iterator[tuple[int, float, np.ndarray]]:
        """Tokens with the same slot and scale: (slot, scale, indices), in the order of their requests."""
        for slots, scales in zip(self.slots, self.scales, strict=True):
            for slot, scale in sorted(
                {pair for pair in zip(slots.tolist(), scales.tolist(), strict=True) if pair[0] >= 0}
            ):
                yield slot, scale, np.flatnonzero((slots == slot) & (scales == np.float32(scale)))


class AdapterColumns:
    """The adapters of each row that has any, until its request leaves."""

    def __init__(self) -> None:
        self._by_row: dict[int, tuple[RowAdapter, ...]] = {}

    def enter(self, new: NewRow) -> None:
        if new.adapters and (adapters := tuple(each for each in new.adapters if each.scale != 0.0)):
            self._by_row[new.row] = adapters

    def leave(self, rows: np.ndarray) -> None:
        for row in self._by_row.keys() & set(rows.tolist()) if self._by_row else ():
            del self._by_row[row]

    def of_row(self, row: int) -> tuple[RowAdapter, ...]:
        """In the order of its request, without those that change nothing."""
        return self._by_row.get(row, ())

    def most_of(self, rows: np.ndarray) -> int:
        """Most adapters that any of these rows has."""
        if not self._by_row:
            return 0
        return max((len(self._by_row.get(row, ())) for row in rows.tolist()), default=0)

    def of_tokens(self, rows: np.ndarray, query_start: np.ndarray, positions: np.ndarray) -> TokenAdapters | None:
        """None for a step in which no token has an adapter. rows: of the step, [num_seqs]; positions: of its tokens."""
        if not self._by_row:
            return None
        own = [(index, self._by_row[row]) for index, row in enumerate(rows.tolist()) if row in self._by_row]
        if not own:
            return None
        most = max(len(adapters) for _, adapters in own)
        slots = np.full((most, len(positions)), -1, np.int32)
        scales = np.zeros((most, len(positions)), np.float32)
        starts = query_start.tolist()
        for index, adapters in own:
            tokens = slice(starts[index], starts[index + 1])
            for use, each in enumerate(adapters):
                slots[use, tokens] = np.where(positions[tokens] >= each.from_position, each.slot, -1)
                scales[use, tokens] = each.scale
        return TokenAdapters(slots, scales) if (slots >= 0).any() else None
