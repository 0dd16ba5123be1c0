"""Draft tokens by prompt lookup: if a row's last tokens also occur earlier in it, the tokens after them are the draft.

(Saxena, "Prompt Lookup Decoding", 2023.) Text that is copied, edited or summarised has many such repetitions; elsewhere
drafts only cost time. So the length of a row's next draft depends on its last one:

    all draft tokens accepted        twice as many, up to num_speculative_tokens
    the first n accepted             n + 1
    none accepted                    1, after a rest of 2, 4, 8 ... 64 tokens

There is no index of tokens: a search reads a row once (a few microseconds per thousand tokens), and resting rows are
not searched. A step searches MOST_SEARCHED tokens at most: of a longer row the last ones, and of several rows those
that have waited longest.
"""

from __future__ import annotations

import msgspec
import numpy as np

from headrace.core.options.speculation import Speculation
from headrace.core.schedule.requests import RowTable
from headrace.ipc.step import StepPlan

LONGEST_REST = 64
"""Most tokens before the next draft of a row whose drafts were rejected."""
LONGEST_PAUSE = 3
"""Most tokens before the next search of a row in which none was found: few, so that a repetition is noticed soon."""
MOST_SEARCHED = 1 << 17
"""Most tokens that are searched for one step, all rows together: half a millisecond's work."""
_NOTHING = np.empty(0, np.int32)


class DraftCounts(msgspec.Struct):
    """Counts since the engine's start."""

    num_drafts: int = 0
    """Drafts of at least one token: one per row and step."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_position: list[int] = []


class NgramDrafter:
    """Finds drafts, and keeps for each row how long and when its next draft may be. Borrows the row table in each
    call."""

    def __init__(self, speculation: Speculation, num_rows: int) -> None:
        self.speculation = speculation
        self.counts = DraftCounts(accepted_per_position=[0] * speculation.num_speculative_tokens)
        most = speculation.disable_by_batch_size
        self._most_running = min(
            speculation.most_step_tokens - 1, speculation.most_step_tokens if most is None else most
        )
        self._limit = np.zeros(num_rows, np.int32)  # most tokens of the next draft
        self._due_at = np.zeros(num_rows, np.int32)  # num_tokens from which on the row may get a draft again
        self._num_failed = np.zeros(num_rows, np.int32)  # consecutive drafts of which no token was accepted
        self._num_missed = np.zeros(num_rows, np.int32)  # consecutive searches that found nothing
        self._distance = np.zeros(num_rows, np.int32)  # how many tokens back the last draft was found
        self._in_flight = np.zeros(num_rows, np.int32)  # draft tokens whose step has no result yet
        self._searched_at = np.zeros(num_rows, np.int64)  # when the row was last searched, counted in searches
        self._num_searches = 0
        self._columns: tuple[np.ndarray, ...] = (
            self._due_at, self._num_failed, self._num_missed, self._distance, self._in_flight, self._searched_at
        )  # fmt: skip
        """What begins at 0 for a row's next request."""

    # --- planning -----------------------------------------------------------------------------------------------

    def waits(self, table: RowTable, rows: np.ndarray) -> np.ndarray:
        """[num_rows] bool: rows that cannot be planned before the result of a step in flight, since it decides how many
        of their draft tokens are accepted, or what their next draft is."""
        is_pending = table.num_known_tokens[rows] < table.num_tokens[rows]
        return is_pending & ((self._in_flight[rows] > 0) | self._is_due(table, rows))

    def due(self, table: RowTable, rows: np.ndarray) -> np.ndarray:
        """Indices of the rows that get a draft in this step if one is found, ascending."""
        due = (self._is_due(table, rows) & (table.num_known_tokens[rows] == table.num_tokens[rows])).nonzero()[0]
        num_tokens = np.minimum(table.num_tokens[rows[due]], MOST_SEARCHED)
        if num_tokens.sum() <= MOST_SEARCHED:
            return due
        in_turn = np.argsort(self._searched_at[rows[due]], kind="stable")
        return np.sort(due[in_turn[np.cumsum(num_tokens[in_turn]) <= MOST_SEARCHED]])

    def _is_due(self, table: RowTable, rows: np.ndarray) -> np.ndarray:
        if np.count_nonzero(table.active) > self._most_running:
            return np.zeros(len(rows), bool)
        return table.num_tokens[rows] >= self._due_at[rows]

    def propose(self, row: int, token_ids: np.ndarray, limit: int) -> np.ndarray:
        """A draft of the tokens after token_ids, [num_tokens] int32: at most `limit` tokens, possibly none."""
        limit = min(limit, int(self._limit[row]))
        if limit <= 0:
            return _NOTHING
        speculation = self.speculation
        self._num_searches += 1
        self._searched_at[row] = self._num_searches
        distance = self._find(
            token_ids[-MOST_SEARCHED:],
            int(self._distance[row]),
            speculation.prompt_lookup_min,
            speculation.prompt_lookup_max,
        )
        if not distance:
            self._num_missed[row] += 1
            self._due_at[row] = len(token_ids) + min(int(self._num_missed[row]), LONGEST_PAUSE)
            return _NOTHING
        self._num_missed[row], self._distance[row] = 0, distance
        # If the match overlaps its continuation, the continuation is periodic.
        return token_ids[len(token_ids) - distance + np.arange(limit) % distance]

    @staticmethod
    def _find(token_ids: np.ndarray, last_distance: int, fewest: int, most: int) -> int:
        """How many tokens back the longest earlier match of the last tokens ends; 0 if none has at least `fewest`.

        A match is at most `most` tokens long. Among equally long ones, the match at last_distance wins, so that a copy
        continues at its place; else the latest.
        """
        num_tokens = len(token_ids)
        # Ends of matches: lengths of the prefixes whose last token equals the last of all.
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
        """Notes a plan. Returns how many plans, each with one more token of each row, may follow before a row may get a
        draft. None: any number."""
        for new in plan.new_rows:
            self._limit[new.row] = self.speculation.num_speculative_tokens
            for column in self._columns:
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
        """Adapts the rows' draft lengths to a step with drafts. counts: [num_rows], new tokens of each of `rows`; they
        are already in the table. Returns [num_rows] bool: which rows had drafts."""
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
