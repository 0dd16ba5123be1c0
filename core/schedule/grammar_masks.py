"""Structured outputs: masks of the tokens that the grammar allows next, and the end of an answer that is complete.

A request's matcher has accepted exactly its known output tokens, whatever row the request is in, so that a preempted
request resumes where it was. The next mask depends on the last token, so a row with a matcher is in no plan before that
token is known. Tokens that a grammar forces (the names of a schema's properties, the rest of a choice) become drafts,
several per step. Other drafts are cut where the grammar does not allow them. Each sampled place, one more than the
drafts, has its own mask:

    tokens        {"na   me":   3      (two drafts)
    places              0    1    2
    masks               m0   m1   m2   m1 assumes that the first draft is accepted, m2 that both are
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np

from headrace.core.schedule.requests import RowTable
from headrace.core.structured_output.backend import Backend, Matcher
from headrace.ipc.step import LaterWords, StepPlan, TokenMasks


class Followed(NamedTuple):
    """The matchers' answers after accepting new tokens."""

    completes: np.ndarray  # [num_tokens] bool: tokens that complete their row's structured output
    problems: dict[int, str]  # index of a token after which its row cannot continue -> reason


class GrammarMasks:
    """Makes masks for the rows whose request has a matcher. Borrows the row table in each call."""

    def __init__(self, backend: Backend, vocab_size: int) -> None:
        self._backend = backend
        self._num_words = -(-vocab_size // 32)

    # --- planning -----------------------------------------------------------------------------------------------

    @staticmethod
    def waits(table: RowTable, rows: np.ndarray) -> np.ndarray:
        """[num_rows] bool: rows that cannot be planned before a step in flight returns their last token."""
        waits: np.ndarray = table.has_matcher[rows] & (table.num_known_tokens[rows] < table.num_tokens[rows])
        return waits

    @staticmethod
    def due(table: RowTable, rows: np.ndarray) -> np.ndarray:
        """Indices of the rows that get drafts in this step if their grammar forces tokens."""
        return (table.has_matcher[rows] & (table.num_known_tokens[rows] == table.num_tokens[rows])).nonzero()[0]

    @staticmethod
    def forced(table: RowTable, row: int, limit: int) -> np.ndarray:
        """Tokens that the grammar forces next, [num_tokens] int32, at most `limit`. They are rejected if the model
        writes the same text in other tokens than the tokenizer does."""
        tokens = _matcher(table, row).forced_tokens()[:limit] if limit > 0 and table.has_matcher[row] else []
        return np.array(tokens, np.int32)

    @staticmethod
    def cut(table: RowTable, row: int, draft: np.ndarray) -> np.ndarray:
        """The longest prefix of a draft that the row's grammar allows."""
        matcher = _matcher(table, row) if table.has_matcher[row] else None
        return draft if matcher is None or not len(draft) else draft[: matcher.num_valid(draft.tolist())]

    def masks(self, plan: StepPlan, table: RowTable) -> TokenMasks | None:
        """The masks of a plan's sampled places. None if no sampled row has a grammar."""
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
                bits[at:end] = -1  # allows all tokens, since the next one ends the request
            else:
                work.append((matcher, at, drafts.get(row, [])))
            at = end
        return _masks(self._backend, work, places, bits)

    def repeated(self, table: RowTable, rows: np.ndarray, *, may_force: bool) -> RepeatedMasks | None:
        """Masks of repeated plans, which compute one token of each of `rows`. None if no row has a grammar.

        may_force: a step has room for tokens that a grammar forces.
        """
        places = np.flatnonzero(table.has_matcher[rows]).astype(np.int32)
        if not places.size:
            return None
        matchers = [_matcher(table, row) for row in rows[places].tolist()]
        return RepeatedMasks(self._backend, places, matchers, self._num_words, may_force=may_force)

    # --- results ------------------------------------------------------------------------------------------------

    @staticmethod
    def take(table: RowTable, row_of: np.ndarray, token_ids: np.ndarray, ends: np.ndarray) -> Followed:
        """Passes each row's new tokens to its matcher, up to the first token that `ends` the row. row_of, token_ids and
        ends are [num_tokens]; tokens of a row are adjacent and in order."""
        completes, problems = np.zeros(len(token_ids), bool), dict[int, str]()
        over = -1  # the row that has ended
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
    """Masks of a batch that only decodes: each step has the same rows, and none is in flight while one is planned."""

    def __init__(
        self, backend: Backend, places: np.ndarray, matchers: list[Matcher], num_words: int, *, may_force: bool
    ) -> None:
        """places: [num_masks] int32, the sampled places of the matchers' rows."""
        self._backend, self._places, self._matchers, self._may_force = backend, places, matchers, may_force
        self._work: list[tuple[Matcher, int, list[int]]] = [(each, nth, []) for nth, each in enumerate(matchers)]
        self._indices = places.tolist()
        self._bits = np.zeros((len(matchers), num_words), np.int32)

    def masks(self) -> TokenMasks | None:
        """The next step's masks. None if a grammar forces tokens, which the scheduler then adds as drafts."""
        if self._may_force and any(each.forced_tokens() for each in self._matchers):
            return None
        return _masks(self._backend, self._work, self._places, self._bits)

    def take(self, token_ids: np.ndarray) -> Followed | None:
        """Passes one token of each row, [num_rows], to the matchers. None if no row is complete or has a problem."""
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
    """Masks that are computed when the rank reads them. Until then no matcher advances: its row waits for the step."""

    def make() -> np.ndarray:
        backend.fill(work, bits)
        return bits.reshape(-1)

    return TokenMasks(places=places, words=cast(np.ndarray, LaterWords(make)))


def _problem_after(matcher: Matcher, token_id: int) -> str:
    """Passes the token to the matcher. Returns why the grammar does not allow it, or ""."""
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
