"""Draft tokens by prompt lookup: where a row's last tokens stand earlier in it, what followed them there comes next.

(Saxena, "Prompt Lookup Decoding", 2023.) Text that is copied, edited or summarised is full of such runs; elsewhere a
draft is a loss, so each row learns how much is worth guessing:

    all of its drafts were right     it may guess twice as many next time, up to num_speculative_tokens
    the first n were                 n + 1
    none was                         1, and only after a rest of 2, 4, 8 ... 64 tokens

Nothing is kept of the tokens themselves: a search reads a row once (a few microseconds per thousand tokens), and rows
that rest are not searched.
"""

from __future__ import annotations

import msgspec
import numpy as np

from headrace.core.options.speculation import Speculation
from headrace.core.schedule.requests import RowTable
from headrace.ipc.step import StepPlan

LONGEST_REST = 64
LONGEST_PAUSE = 3
"""Tokens between two searches of a row in which nothing is found, so that a repetition is noticed soon."""
_NOTHING = np.empty(0, np.int32)


class DraftCounts(msgspec.Struct):
    """Since the engine's start."""

    num_drafts: int = 0
    """Rows' drafts of at least one token."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = []


class NgramDrafter:
    """What it has learnt of each row. Borrows the row table in each call."""

    def __init__(self, speculation: Speculation, num_rows: int) -> None:
        self.speculation = speculation
        self.counts = DraftCounts(accepted_per_position=[0] * speculation.num_speculative_tokens)
        most = speculation.disable_by_batch_size
        self._most_running = min(
            speculation.most_step_tokens - 1, speculation.most_step_tokens if most is None else most
        )
        self._limit = np.zeros(num_rows, np.int32)  # most tokens of the next draft
        self._due_at = np.zeros(num_rows, np.int32)  # number of tokens from which on the row gets one again
        self._num_failed = np.zeros(num_rows, np.int32)  # drafts in a row of which no token was right
        self._num_missed = np.zeros(num_rows, np.int32)  # searches in a row in which nothing was found
        self._distance = np.zeros(num_rows, np.int32)  # how far back the last draft was found
        self._in_flight = np.zeros(num_rows, np.int32)  # draft tokens whose step has no result yet

    # --- planning -----------------------------------------------------------------------------------------------

    def waits(self, table: RowTable, rows: np.ndarray) -> np.ndarray:
        """[num_rows] bool: rows that cannot be planned before a step in flight tells their last token: it decides how
        many of their drafts were right, or what their next draft is."""
        is_pending = table.num_known_tokens[rows] < table.num_tokens[rows]
        return is_pending & ((self._in_flight[rows] > 0) | self._is_due(table, rows))

    def due(self, table: RowTable, rows: np.ndarray) -> np.ndarray:
        """Indices of the rows that get a draft now if one is found."""
        return (self._is_due(table, rows) & (table.num_known_tokens[rows] == table.num_tokens[rows])).nonzero()[0]

    def _is_due(self, table: RowTable, rows: np.ndarray) -> np.ndarray:
        if np.count_nonzero(table.active) > self._most_running:
            return np.zeros(len(rows), bool)
        return table.num_tokens[rows] >= self._due_at[rows]

    def propose(self, row: int, token_ids: np.ndarray, limit: int) -> np.ndarray:
        """What may follow token_ids, [num_tokens] int32: at most `limit` tokens, or none."""
        limit = min(limit, int(self._limit[row]))
        if limit <= 0:
            return _NOTHING
        speculation = self.speculation
        distance = self._find(
            token_ids, int(self._distance[row]), speculation.prompt_lookup_min, speculation.prompt_lookup_max
        )
        if not distance:
            self._num_missed[row] += 1
            self._due_at[row] = len(token_ids) + min(int(self._num_missed[row]), LONGEST_PAUSE)
            return _NOTHING
        self._num_missed[row], self._distance[row] = 0, distance
        # A match that reaches into its own continuation goes on in circles.
        return token_ids[len(token_ids) - distance + np.arange(limit) % distance]

    @staticmethod
    def _find(token_ids: np.ndarray, last_distance: int, fewest: int, most: int) -> int:
        """How far back the longest earlier run stands that ends as token_ids do; 0 for none of `fewest` tokens.

        Of equally long ones that at the last distance counts, so that a copy goes on where it is; else the latest.
        """
        num_tokens = len(token_ids)
        # Numbers of tokens that end in the last token, as all of them do.
        ends = np.flatnonzero(token_ids[: num_tokens - 1] == token_ids[-1]) + 1
        length = 1
        while len(ends) and length < most:
            longer = ends[ends > length]
            longer = longer[token_ids[longer - length - 1] == token_ids[num_tokens - length - 1]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        if not len(ends) or length < fewest:
            return 0
        if last_distance and num_tokens - last_distance in ends:
            return last_distance
        return num_tokens - int(ends[-1])

    def seal(self, plan: StepPlan, table: RowTable) -> int | None:
        """Notes a plan. How many plans may follow, each a token of each of its rows, before one of them is due; None:
        any number."""
        for new in plan.new_rows:
            self._limit[new.row] = self.speculation.num_speculative_tokens
            for column in (self._due_at, self._num_failed, self._num_missed, self._distance, self._in_flight):
                column[new.row] = 0
        drafts = plan.drafts
        if drafts is not None:
            self._in_flight[plan.rows] = drafts.counts
            return 0
        if np.count_nonzero(table.active) > self._most_running:
            return None
        return max(0, int((self._due_at[plan.rows] - table.num_tokens[plan.rows]).min()))

    # --- results ------------------------------------------------------------------------------------------------

    def take(self, table: RowTable, rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Learns from a step with drafts, of which each of rows brought counts [num_rows] tokens; [num_rows] bool,
        which rows had drafts. The table knows their tokens."""
        num_drafts = self._in_flight[rows]
        drafted = num_drafts > 0
        self._in_flight[rows] = 0
        for row, drafts, count in zip(*(each[drafted].tolist() for each in (rows, num_drafts, counts)), strict=True):
            right = count - 1
            self._count(drafts, right)
            if right:
                self._num_failed[row] = 0
                most = 2 * drafts if right == drafts else right + 1
                self._limit[row] = min(most, self.speculation.num_speculative_tokens)
            else:
                self._num_failed[row] += 1
                self._limit[row] = 1
                rest = min(LONGEST_REST, 2 ** int(self._num_failed[row]))
                self._due_at[row] = table.num_known_tokens[row] + rest
        return drafted

    def _count(self, drafts: int, right: int) -> None:
        counts = self.counts
        counts.num_drafts += 1
        counts.num_draft_tokens += drafts
        counts.num_accepted_tokens += right
        for position in range(right):
            counts.accepted_per_position[position] += 1
