"""Collects the tokens, rows and blocks that the scheduler's stages grant, and makes the `StepPlan` from them."""

from __future__ import annotations

import numpy as np

from headrace.core.schedule.block_tables import BlockTables
from headrace.core.schedule.requests import RowTable
from headrace.ipc.step import NewRow, StepPlan

_NO_ROWS = np.empty(0, np.int32)


class PlanBuilder:
    """One step's plan while it is built. Decodes are in arrays, since there may be a thousand; the few prefills are in
    dicts."""

    def __init__(self, budget_tokens: int) -> None:
        self.budget = budget_tokens
        """The rest of the step's token budget."""
        self.total_tokens = 0
        self.decodes: np.ndarray = _NO_ROWS
        self._lengthened: dict[int, int] = {}  # index in `decodes` -> its tokens beyond the first
        self._block_tables: list[int] = []
        self._block_ids: list[int] = []
        self.granted: dict[int, int] = {}
        """By row, the tokens of its prefill, in the order in which they were added."""
        self.admitted: dict[int, None] = {}
        """The rows that requests entered in this step: the plan contains them in full, including their blocks."""

    @property
    def is_empty(self) -> bool:
        return len(self.decodes) == 0 and not self.granted

    def add_decodes(self, rows: np.ndarray, tables: np.ndarray, blocks: np.ndarray) -> None:
        """Adds one token for each of `rows`, [num_decodes]. Block table tables[i] grew by blocks[i]."""
        self.decodes = rows
        self._block_tables += tables.tolist()
        self._block_ids += blocks.tolist()
        self.budget -= len(rows)
        self.total_tokens += len(rows)

    def lengthen(self, index: int, count: int, tables: list[int], blocks: list[int]) -> None:
        """Adds `count` tokens that are not known to be right to the decode at `index`. Its row's block table tables[i]
        grew by blocks[i]."""
        self._lengthened[index] = self._lengthened.get(index, 0) + count
        self.budget -= count
        self.total_tokens += count
        self._block_tables += tables
        self._block_ids += blocks

    @property
    def lengthened(self) -> np.ndarray:
        """[num_lengthened] int32: the rows of decodes that `lengthen` made longer"""
        return self.decodes[list(self._lengthened)].astype(np.int32) if self._lengthened else _NO_ROWS

    def extend(self, row: int, count: int, tables: list[int], blocks: list[int], extra_budget: int = 0) -> None:
        """Adds `count` tokens of a prefill. The row's block table tables[i] grew by blocks[i]. extra_budget: tokens of
        the budget that they cost in addition to `count`."""
        self.granted[row] = self.granted.get(row, 0) + count
        self.budget -= count + extra_budget
        self.total_tokens += count
        if row not in self.admitted:
            self._block_tables += tables
            self._block_ids += blocks

    def seal(self, step: int, table: RowTable, tables: BlockTables, released: list[int]) -> StepPlan:
        prefills = np.fromiter(self.granted, np.int32, len(self.granted))
        counts = np.fromiter(self.granted.values(), np.int32, len(self.granted))
        rows = np.concatenate([self.decodes.astype(np.int32), prefills])
        decoded = np.ones(len(self.decodes), np.int32)
        for index, count in self._lengthened.items():
            decoded[index] += count
        num_tokens = np.concatenate([decoded, counts])
        num_computed_tokens = table.num_computed_tokens[rows]
        return StepPlan(
            step=step,
            released_rows=np.array(released, np.int32),
            new_rows=tuple(self._new_row(row, table, tables) for row in self.admitted),
            block_tables=np.array(self._block_tables, np.int32),
            block_ids=np.array(self._block_ids, np.int32),
            rows=rows,
            num_tokens=num_tokens,
            num_computed_tokens=num_computed_tokens,
            sampled=table.generates[rows] & (num_computed_tokens + num_tokens >= table.num_tokens[rows]),
            total_tokens=self.total_tokens,
        )

    def _new_row(self, row: int, table: RowTable, tables: BlockTables) -> NewRow:
        request = table.requests[row]
        assert request is not None
        state_pages, state_source = tables.state_pages(row)
        num_computed = int(table.num_computed_tokens[row])
        return NewRow(
            row=row,
            token_ids=table.token_ids[row, : table.num_tokens[row]].copy(),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=num_computed,
            block_ids=tables.table[:, row, : tables.num_blocks[row]].flatten(),
            task=request.task,
            seed=request.seed,
            state_pages=state_pages,
            state_source=state_source,
            inputs=tuple(each for each in request.prefix_key.inputs if each.end > num_computed),
            adapters=request.adapters,
        )
