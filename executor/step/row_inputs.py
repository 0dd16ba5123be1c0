"""Row inputs (ipc/row_inputs.py) by row: which of them a step computes. Imports no torch."""

from __future__ import annotations

import logging
from typing import NamedTuple

import numpy as np

from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.ipc.codec import Tensor
from headrace.ipc.failure import InconsistentError
from headrace.ipc.row_inputs import RowInput, values_of
from headrace.ipc.step import NewRow, StepPlan, StepResult

logger = logging.getLogger(__name__)


class PlacedInput(NamedTuple):
    """The part of an input that a step computes."""

    at: int
    """The first of the step's tokens whose embeddings it replaces."""
    source: RowInput
    first: int
    """[first, last): positions of the input."""
    last: int
    row: int
    step: int
    columns: InputColumns

    def values(self) -> Tensor:
        """[last - first, embedding width] of a float type"""
        return self.columns.values(self)


class InputColumns:
    """The inputs of each row that has any, until its request leaves. An input whose kind fails ends its request."""

    def __init__(self) -> None:
        self._by_row: dict[int, tuple[RowInput, ...]] = {}
        self._width, self._dtype, self._place = 0, "float32", RankCoordinates()
        self._failed: dict[int, dict[int, str]] = {}  # step -> row -> why its request cannot go on
        self._told: set[str] = set()

    def bind(self, width: int, dtype: str, place: RankCoordinates) -> None:
        """width, dtype: of the model's embeddings."""
        self._width, self._dtype, self._place = width, dtype, place

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
            end, row = begin + int(plan.num_tokens[index]), int(plan.rows[index])
            for each in self._by_row[row]:
                first, last = max(begin, each.start), min(end, each.end)
                if first < last:
                    at = first_token + first - begin
                    found.append(PlacedInput(at, each, first - each.start, last - each.start, row, plan.step, self))
        return tuple(found)

    def values(self, placed: PlacedInput) -> Tensor:
        """[placed.last - placed.first, width] of a float type. Where the input's kind fails, the rank that replies
        computes the step with zeros and says so in its result (`failing`). On another rank the row becomes not finite,
        which that rank's result tells, too."""
        try:
            return values_of(placed.source, placed.first, placed.last, self._width, self._dtype)
        except InconsistentError as error:
            if placed.source.kind not in self._told:
                self._told.add(placed.source.kind)
                logger.exception("an input cannot be computed; its request ends")
            if self._place.is_last_stage:
                self._failed.setdefault(placed.step, {}).setdefault(placed.row, str(error))
            instead = np.float32(0.0 if self._place.replies else np.nan)
            return Tensor.from_numpy(np.full((placed.last - placed.first, self._width), instead))

    def failing(self, result: StepResult) -> StepResult:
        """The result of a step with failures in the place of rows whose inputs could not be computed."""
        failed = self._failed.pop(result.step, None) if self._failed else None
        return result if failed is None else result.failing(failed, "RowInputError")
