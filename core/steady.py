"""A batch that only decodes: its next plan is the one before, every request one token on.

Most steps of an engine are such steps. What they have in common is worked out once, and what they change is written to
the table once (`settle`); the scheduler's stages run again as soon as somebody comes, leaves, or may want a block.
"""

from __future__ import annotations

import numpy as np

from headrace.core.requests import RowTable
from headrace.ipc.step import StepPlan

_NO_ROWS = np.empty(0, np.int32)


class SteadyBatch:
    """As a plan left it that computed one token of each running request, with nobody waiting."""

    def __init__(self, plan: StepPlan, table: RowTable, eos_token_ids: frozenset[int]) -> None:
        """After the plan's tokens have been counted in the table."""
        self.rows = plan.rows
        self._plan, self._table = plan, table
        self._num_planned = 0  # steps that the table does not count yet
        self._taken: list[np.ndarray] = []  # one step's tokens each, not in the table yet
        to_block_end = -table.num_computed_tokens[plan.rows] % table.block_size
        to_limit = table.max_tokens_total[plan.rows] - table.num_tokens[plan.rows]
        # The step that fills a block is a full one, which names it; so is the one that begins another.
        self.steps_left = int(np.minimum(to_block_end - 1, to_limit).min())
        """How many more plans are like this; in these, no request reaches its limit or the end of its block."""
        self._ending_token_ids = eos_token_ids
        if self.steps_left > 0 and table.has_stop_token_ids[plan.rows].any():
            requests = [table.requests[row] for row in plan.rows.tolist()]
            self._ending_token_ids = eos_token_ids.union(*(each.stop_token_ids for each in requests if each))

    def next_plan(self, step: int) -> StepPlan:
        self.steps_left -= 1
        self._num_planned += 1
        before = self._plan
        self._plan = StepPlan(
            step=step,
            released_rows=_NO_ROWS,
            new_rows=(),
            block_rows=_NO_ROWS,
            block_ids=_NO_ROWS,
            rows=self.rows,
            num_tokens=before.num_tokens,
            num_computed_tokens=before.num_computed_tokens + 1,
            sampled=before.sampled,
            repeats=True,
        )
        return self._plan

    def take(self, token_ids: np.ndarray) -> None:
        """A step's tokens, [num_rows] int32."""
        self._taken.append(token_ids)

    def settle(self) -> None:
        """Writes to the table what was planned and taken since it was made, or settled last."""
        table, rows, num_taken = self._table, self.rows, len(self._taken)
        if self._num_planned:
            table.planned[:, rows] += self._num_planned
            self._num_planned = 0
        if num_taken:
            known = table.num_known_tokens[rows]
            table.token_ids[rows[:, None], known[:, None] + np.arange(num_taken)] = np.stack(self._taken, 1)
            table.num_known_tokens[rows] = known + num_taken
            self._taken.clear()

    def may_end(self, token_ids: np.ndarray) -> bool:
        """Whether any of these tokens, one of each request, might end it."""
        return self.steps_left <= 0 or not self._ending_token_ids.isdisjoint(token_ids.tolist())
