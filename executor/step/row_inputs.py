"""Row inputs (ipc/row_inputs.py) by row: which of them a step computes. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headrace.ipc.codec import Tensor
from headrace.ipc.row_inputs import RowInput, values_of
from headrace.ipc.step import NewRow, StepPlan


class PlacedInput(NamedTuple):
    """The part of an input that a step computes."""

    at: int
    """The first of the step's tokens whose embeddings it replaces."""
    source: RowInput
    first: int
    """[first, last): positions of the input."""
    last: int

    def values(self) -> Tensor:
        """[last - first, embedding width] of a float type"""
        return values_of(self.source, self.first, self.last)


class InputColumns:
    """The inputs of each row that has any, until its request leaves."""

    def __init__(self) -> None:
        self._by_row: dict[int, tuple[RowInput, ...]] = {}

    def enter(self, new: NewRow) -> None:
        if new.inputs:
            self._by_row[new.row] = new.inputs

    def leave(self, rows: np.ndarray) -> None:
        for row in self._by_row.keys() & set(rows.tolist()) if self._by_row else ():
            del self._by_row[row]

    def placed(self, plan: StepPlan) -> tuple[PlacedInput, ...]:
        """The parts of inputs that the step computes, in the order of its tokens."""
        if not self._by_row:
            return ()
        found = []
        for index in np.flatnonzero(np.isin(plan.rows, list(self._by_row))).tolist():
            begin, first_token = int(plan.num_computed_tokens[index]), int(plan.num_tokens[:index].sum())
            end = begin + int(plan.num_tokens[index])
            for each in self._by_row[int(plan.rows[index])]:
                first, last = max(begin, each.start), min(end, each.end)
                if first < last:
                    at = first_token + first - begin
                    found.append(PlacedInput(at, each, first - each.start, last - each.start))
        return tuple(found)
