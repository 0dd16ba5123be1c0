"""Requests whose answers have to have a form: masks of the tokens that may come next, and ends by the form's end.

A request's matcher has accepted exactly its known output tokens, whatever row the request is in, so a preempted one
goes on as it was. The next mask depends on the last token, so such a row is in no plan before that token is known.
What a grammar forces (the names of a schema's properties, the rest of a choice) comes as drafts, several tokens a step.
Other drafts are cut where the grammar would refuse them, and each place after a draft has a mask of its own:

    tokens        {"na   me":   3      (two drafts)
    places              0    1    2
    masks               m0   m1   m2   m1 supposes that the first draft is right, m2 that both are
"""

from __future__ import annotations

import numpy as np

from headrace.core.schedule.requests import RowTable
from headrace.core.structured_output.backend import Backend, Matcher
from headrace.ipc.step import StepPlan, TokenMasks


class GrammarMasks:
    """Of the rows whose request has a matcher. Borrows the row table in each call."""

    def __init__(self, backend: Backend, vocab_size: int) -> None:
        self._backend = backend
        self._num_words = -(-vocab_size // 32)

    # --- planning -----------------------------------------------------------------------------------------------

    @staticmethod
    def waits(table: RowTable, rows: np.ndarray) -> np.ndarray:
        """[num_rows] bool: rows that cannot be planned before a step in flight tells their last token."""
        waits: np.ndarray = table.has_matcher[rows] & (table.num_known_tokens[rows] < table.num_tokens[rows])
        return waits

    @staticmethod
    def due(table: RowTable, rows: np.ndarray) -> np.ndarray:
        """Indices of the rows that get tokens as drafts now if their grammar forces any."""
        return (table.has_matcher[rows] & (table.num_known_tokens[rows] == table.num_tokens[rows])).nonzero()[0]

    @staticmethod
    def forced(table: RowTable, row: int, limit: int) -> np.ndarray:
        """Tokens that must come next, [num_tokens] int32, at most `limit`. A model that writes their text in other
        tokens than the tokenizer does rejects them."""
        tokens = _matcher(table, row).forced_tokens()[:limit] if limit > 0 and table.has_matcher[row] else []
        return np.array(tokens, np.int32)

    @staticmethod
    def cut(table: RowTable, row: int, draft: np.ndarray) -> np.ndarray:
        """The beginning of a draft that the row's grammar allows."""
        matcher = _matcher(table, row) if table.has_matcher[row] else None
        return draft if matcher is None or not len(draft) else draft[: matcher.num_valid(draft.tolist())]

    def masks(self, plan: StepPlan, table: RowTable) -> TokenMasks | None:
        """What the plan is to carry; None where no sampled row has a grammar."""
        sampled = plan.rows[plan.sampled]
        masked = np.flatnonzero(table.has_matcher[sampled])
        if not masked.size:
            return None
        num_places = np.ones(len(sampled), np.int32)
        if plan.drafts is not None:
            num_places += plan.drafts.counts[plan.sampled]
        places = np.flatnonzero(np.repeat(table.has_matcher[sampled], num_places)).astype(np.int32)
        bits = np.full((len(places), self._num_words), -1, np.int32)
        drafts, work, at = _drafts_by_row(plan), [], 0
        for index in masked.tolist():
            row = int(sampled[index])
            matcher = _matcher(table, row)
            if not matcher.problem:
                work.append((matcher, at, drafts.get(row, [])))
            at += int(num_places[index])
        self._backend.fill(work, bits)
        return TokenMasks(places=places, bits=bits.reshape(-1))

    # --- results ------------------------------------------------------------------------------------------------

    @staticmethod
    def take(
        table: RowTable, row_of: np.ndarray, token_ids: np.ndarray, ends: np.ndarray
    ) -> tuple[np.ndarray, dict[int, str]]:
        """Follows new tokens, [num_tokens] each, a row's adjacent and in order, up to the first that `ends` its row.

        Which tokens complete their row's form, [num_tokens] bool, and why rows cannot go on, by the index of the token.
        """
        completes, problems = np.zeros(len(token_ids), bool), dict[int, str]()
        over = -1  # the row whose end has been met
        for index in np.flatnonzero(table.has_matcher[row_of]).tolist():
            row = int(row_of[index])
            if row == over:
                continue
            matcher, token_id = _matcher(table, row), int(token_ids[index])
            if not matcher.accept(token_id):
                problems[index] = (
                    matcher.problem or f"token {token_id} came, which the form of the answer does not allow"
                )
            completes[index] = matcher.is_complete
            if ends[index] or completes[index] or index in problems:
                over = row
        return completes, problems


def _matcher(table: RowTable, row: int) -> Matcher:
    request = table.requests[row]
    assert request is not None, f"row {row} has no request"
    assert request.matcher is not None, f"row {row} has no matcher"
    return request.matcher


def _drafts_by_row(plan: StepPlan) -> dict[int, list[int]]:
    if plan.drafts is None:
        return {}
    ends = np.cumsum(plan.drafts.counts)
    token_ids = plan.drafts.token_ids
    return {
        int(plan.rows[index]): token_ids[ends[index] - plan.drafts.counts[index] : ends[index]].tolist()
        for index in np.flatnonzero(plan.drafts.counts).tolist()
    }
