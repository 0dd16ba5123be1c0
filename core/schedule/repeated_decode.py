"""The fast path for a batch that only decodes: the next plan is the previous one, with each row one token further.

Most of an engine's steps are like this. What these steps share is computed once, and their changes are written to the
row table only when it is read (`settle`). When a request arrives or ends, the scheduler's stages run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headrace.core.schedule.block_tables import BlockTables
from headrace.core.schedule.features.feature import NOTHING_NOW, Followed, Repeated, together
from headrace.core.schedule.requests import RowTable
from headrace.ipc.step import Attachment, StepPlan

_NO_ROWS = np.empty(0, np.int32)


class RepeatedDecode:
    """Makes plans that repeat one plan, which computed one token of each running request while none waited."""

    def __init__(
        self,
        plan: StepPlan,
        table: RowTable,
        tables: BlockTables,
        eos_token_ids: Sequence[int],
        publish: Callable[[np.ndarray], None],
        repeated: Sequence[Repeated] = (),
    ) -> None:
        """The table already counts the plan's tokens. publish: called with all rows when some have filled a block.

        repeated: what features add to each plan."""
        self.rows = plan.rows
        self.followed: Followed | None = None
        """A feature's answer to the tokens that `take` refused last, if it has seen them."""
        self._repeated = repeated
        self._plan, self._table, self._tables, self._publish = plan, table, tables, publish
        self._num_planned = 0  # steps that the table does not count yet
        self._taken: list[np.ndarray] = []  # the tokens of each taken step that is not in the table yet
        self.steps_left = int((table.max_tokens_total[plan.rows] - table.num_tokens[plan.rows]).min())
        """How many more plans there can be before a request reaches its token limit."""
        self._room = self._steps_to_full_block()
        self._ending_token_ids = frozenset(eos_token_ids)
        if self.steps_left > 0 and table.has_stop_token_ids[plan.rows].any():
            requests = [table.requests[row] for row in plan.rows.tolist()]
            self._ending_token_ids = self._ending_token_ids.union(*(each.stop_token_ids for each in requests if each))

    def limit(self, num_steps: int | None) -> None:
        """Allows at most num_steps more plans; None: no further limit."""
        if num_steps is not None:
            self.steps_left = min(self.steps_left, num_steps)

    def next_plan(self, step: int, num_in_flight: int) -> StepPlan | None:
        """The next repeated plan. None if the stages have to plan: a request is about to end, there are too few blocks,
        or a feature has something to do."""
        if self.steps_left <= 0:
            return None
        attachments = tuple[Attachment, ...]()
        for each in self._repeated:
            attachment = each.attachment(num_in_flight)
            if attachment is None:
                return None
            if attachment is not NOTHING_NOW:
                attachments += (attachment,)
        block_tables, block_ids = _NO_ROWS, _NO_ROWS
        if not self._room:
            self.settle()
            full = self._rows_without_room()
            self._tables.give_back(full, self._table)
            if len(full) > self._tables.num_free_to_grow():
                return None
            block_tables, block_ids = self._tables.extend_each(full)
            self._room = self._steps_to_full_block()
        self.steps_left -= 1
        self._num_planned += 1
        self._room -= 1
        if not self._room:
            self.settle()
            self._publish(self.rows)
        before = self._plan
        self._plan = StepPlan(
            step=step,
            released_rows=_NO_ROWS,
            new_rows=(),
            block_tables=block_tables,
            block_ids=block_ids,
            rows=self.rows,
            num_tokens=before.num_tokens,
            num_computed_tokens=before.num_computed_tokens + 1,
            sampled=before.sampled,
            total_tokens=len(self.rows),
            attachments=attachments,
        )
        return self._plan

    def _steps_to_full_block(self) -> int:
        """How many steps until the first row fills a block or uses up its blocks. A row may hold several unused blocks,
        which it got for rejected drafts."""
        tables, computed = self._tables, self._table.num_computed_tokens[self.rows]
        held_tokens, size = tables.num_blocks[self.rows] * tables.block_size, tables.block_size
        return int(np.minimum(held_tokens - computed, size - computed % size).min())

    def _rows_without_room(self) -> np.ndarray:
        held_tokens = self._tables.num_blocks[self.rows] * self._tables.block_size
        return self.rows[self._table.num_computed_tokens[self.rows] >= held_tokens]

    def take(self, token_ids: np.ndarray) -> bool:
        """Takes a step's tokens, [num_rows] int32. Returns False, without taking them, if they may end a request."""
        self.followed = None
        if self.steps_left <= 0 or not self._ending_token_ids.isdisjoint(token_ids.tolist()):
            return False
        if self._repeated:
            self.followed = together(each.take(token_ids) for each in self._repeated)
            if self.followed is not None:
                return False
        self._taken.append(token_ids)
        return True

    def settle(self) -> None:
        """Writes the plans made and the tokens taken since the last call to the row table."""
        table, rows, num_taken = self._table, self.rows, len(self._taken)
        if self._num_planned:
            table.planned[:, rows] += self._num_planned
            self._num_planned = 0
        if num_taken:
            known = table.num_known_tokens[rows]
            table.token_ids[rows[:, None], known[:, None] + np.arange(num_taken)] = np.stack(self._taken, 1)
            table.num_known_tokens[rows] = known + num_taken
            self._taken.clear()
