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

from typing import NamedTuple, cast

import numpy as np

from headrace.core.schedule.requests import RowTable
from headrace.core.structured_output.backend import Backend, Matcher
from headrace.ipc.step import LaterWords, StepPlan, TokenMasks


class Followed(NamedTuple):
    """What grammars say of new tokens."""

    completes: np.ndarray  # [num_tokens] bool: which complete their row's form
    problems: dict[int, str]  # why a row cannot go on, by the index of its token


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
        bits = np.zeros((len(places), self._num_words), np.int32)
        drafts, work, at = _drafts_by_row(plan), [], 0
        for index in masked.tolist():
            row, end = int(sampled[index]), at + int(num_places[index])
            matcher = _matcher(table, row)
            if matcher.problem:
                bits[at:end] = -1  # its next token ends it
            else:
                work.append((matcher, at, drafts.get(row, [])))
            at = end
        return _masks(self._backend, work, places, bits)

    def repeated(self, table: RowTable, rows: np.ndarray, *, may_force: bool) -> RepeatedMasks | None:
        """Of the plans that compute a token of each of `rows` again and again; None where no row has a grammar.

        may_force: there is room in a step for what a grammar forces.
        """
        places = np.flatnonzero(table.has_matcher[rows]).astype(np.int32)
        if not places.size:
            return None
        matchers = [_matcher(table, row) for row in rows[places].tolist()]
        return RepeatedMasks(self._backend, places, matchers, self._num_words, may_force=may_force)

    # --- results ------------------------------------------------------------------------------------------------

    @staticmethod
    def take(table: RowTable, row_of: np.ndarray, token_ids: np.ndarray, ends: np.ndarray) -> Followed:
        """Follows new tokens, [num_tokens] each, a row's adjacent and in order, up to the first that `ends` its row."""
        completes, problems = np.zeros(len(token_ids), bool), dict[int, str]()
        over = -1  # the row whose end has been met
        for index in np.flatnonzero(table.has_matcher[row_of]).tolist():
            row = int(row_of[index])
            if row == over:
                continue
            matcher, token_id = _matcher(table, row), int(token_ids[index])
            if problem := _problem_after(matcher, token_id):
                problems[index] = problem
            completes[index] = matcher.is_complete
            if ends[index] or completes[index] or index in problems:
                over = row
        return Followed(completes, problems)


class RepeatedMasks:
    """Of a batch that only decodes, with the same rows in every step and none in flight while one is planned."""

    def __init__(
        self, backend: Backend, places: np.ndarray, matchers: list[Matcher], num_words: int, *, may_force: bool
    ) -> None:
        """places: [num_masks] int32, those of the rows that the matchers belong to."""
        self._backend, self._places, self._matchers, self._may_force = backend, places, matchers, may_force
        self._work: list[tuple[Matcher, int, list[int]]] = [(each, nth, []) for nth, each in enumerate(matchers)]
        self._indices = places.tolist()
        self._bits = np.zeros((len(matchers), num_words), np.int32)

    def masks(self) -> TokenMasks | None:
        """Of the next step. None where it is to have drafts: a grammar forces tokens."""
        if self._may_force and any(each.forced_tokens() for each in self._matchers):
            return None
        return _masks(self._backend, self._work, self._places, self._bits)

    def take(self, token_ids: np.ndarray) -> Followed | None:
        """Follows a token of each row, [num_rows]. None where none of them completes a form or has a problem."""
        completes, problems = list[int](), dict[int, str]()
        for index, matcher in zip(self._indices, self._matchers, strict=True):
            if problem := _problem_after(matcher, int(token_ids[index])):
                problems[index] = problem
            if matcher.is_complete:
                completes.append(index)
        if not completes and not problems:
            return None
        return Followed(np.isin(np.arange(len(token_ids)), completes), problems)


def _masks(
    backend: Backend, work: list[tuple[Matcher, int, list[int]]], places: np.ndarray, bits: np.ndarray
) -> TokenMasks:
    """That are made when the rank asks for them. No matcher of theirs moves before: their rows wait for the step."""

    def make() -> np.ndarray:
        backend.fill(work, bits)
        return bits.reshape(-1)

    return TokenMasks(places=places, words=cast(np.ndarray, LaterWords(make)))


def _problem_after(matcher: Matcher, token_id: int) -> str:
    """Why it cannot take the token, which it does; "" where it can."""
    if matcher.accept(token_id):
        return ""
    return matcher.problem or f"token {token_id} came, which the form of the answer does not allow"


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
