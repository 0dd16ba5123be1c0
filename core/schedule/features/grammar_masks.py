"""Structured outputs: masks of the tokens that the grammar allows next, and the end of an answer that is complete.

A request's matcher has accepted exactly its known output tokens, whatever row the request is in, so that a preempted
request resumes where it was. The next mask depends on the last token, so a row with a matcher is in no plan before that
token is known. Tokens that a grammar forces (the names of a schema's properties, the rest of a choice) become drafts,
several per step. Other drafts are cut where the grammar does not allow them. Each sampled position, one more than the
drafts, has its own mask:

    tokens        {"na   me":   3      (two drafts)
    positions           0    1    2
    masks               m0   m1   m2   m1 assumes that the first draft is accepted, m2 that both are
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec
import numpy as np

from headrace.core.schedule.drafters.drafter import NOTHING, Drafter
from headrace.core.schedule.features.feature import Context, Followed, Repeated, StepFeature
from headrace.core.schedule.requests import Request, RowTable
from headrace.core.structured_output.backend import Matcher
from headrace.core.structured_output.backends import Backends
from headrace.ipc.failure import InconsistentError
from headrace.ipc.step import Attachment, Drafts, LazyArray, StepPlan, TokenMasks


class ForcedTokens(Drafter):
    """Drafts the tokens that a grammar forces. They are rejected if the model writes the same text in other tokens than
    the tokenizer does."""

    def wants(self, rows: np.ndarray) -> np.ndarray:
        wants: np.ndarray = self.table.has_matcher[rows]
        return wants

    def propose(self, row: int, limit: int, least_likely: float = 0.0) -> np.ndarray:
        tokens = _matcher(self.table, row).forced_tokens()[:limit]
        return np.array(tokens, np.int32) if tokens else NOTHING


class GrammarMasks(StepFeature):
    """Makes masks for the rows whose request has a matcher."""

    attaches = (TokenMasks,)

    def __init__(self, backend: Backends, vocab_size: int, *, most_step_tokens: int) -> None:
        """most_step_tokens: a step with fewer rows has room for tokens that a grammar forces."""
        self._backend, self._most_step_tokens = backend, most_step_tokens
        self._num_words = -(-vocab_size // 32)
        self.drafter = self._forced = ForcedTokens()

    def bind(self, context: Context) -> None:
        super().bind(context)
        self._forced.bind(context.rows)

    def needed_by(self, request: Request) -> bool:
        return request.matcher is not None

    # --- planning -----------------------------------------------------------------------------------------------

    def waits(self, rows: np.ndarray) -> np.ndarray | None:
        table = self.context.rows
        waits: np.ndarray = table.has_matcher[rows] & (table.num_known_tokens[rows] < table.num_tokens[rows])
        return waits

    def cut(self, rows: Sequence[int], drafts: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        table, kept = self.context.rows, list(drafts)
        of = [nth for nth, row in enumerate(rows) if table.has_matcher[row]]
        tried = [(_matcher(table, rows[nth]), drafts[nth].tolist()) for nth in of]
        for nth, num in zip(of, self._backend.num_valid(tried), strict=True):
            kept[nth] = drafts[nth][:num]
        return kept

    def seal(self, plan: StepPlan) -> StepPlan:
        """Adds the masks of the plan's sampled positions, if a sampled row has a grammar."""
        table, sampled = self.context.rows, plan.rows[plan.sampled]
        masked = np.flatnonzero(table.has_matcher[sampled])
        if not masked.size:
            return plan
        num_positions = np.ones(len(sampled), np.int32)
        drafts = plan.get(Drafts)
        if drafts is not None:
            num_positions += drafts.counts[plan.sampled]
        positions = np.flatnonzero(np.repeat(table.has_matcher[sampled], num_positions)).astype(np.int32)
        bits = np.zeros((len(positions), self._num_words), np.int32)
        by_row, work, at = {} if drafts is None else _by_row(plan, drafts), [], 0
        for index in masked.tolist():
            row, end = int(sampled[index]), at + int(num_positions[index])
            matcher = _matcher(table, row)
            if matcher.problem:
                bits[at:end] = -1  # allows all tokens, since the next one ends the request
            else:
                work.append((matcher, at, by_row.get(row, [])))
            at = end
        masks = _later_masks(self._backend, work, positions, bits)
        return msgspec.structs.replace(plan, attachments=(*plan.attachments, masks))

    def repeated(self, plan: StepPlan) -> Repeated | None:
        table, rows = self.context.rows, plan.rows
        positions = np.flatnonzero(table.has_matcher[rows]).astype(np.int32)
        if not positions.size:
            return None
        matchers = [_matcher(table, row) for row in rows[positions].tolist()]
        may_force = len(rows) < self._most_step_tokens
        return RepeatedMasks(self._backend, positions, matchers, self._num_words, may_force=may_force)

    # --- results ------------------------------------------------------------------------------------------------

    def follow(self, row_of: np.ndarray, token_ids: np.ndarray, ends: np.ndarray) -> Followed | None:
        """Passes each row's new tokens to its matcher, up to the first token that `ends` the row."""
        table = self.context.rows
        followed = np.flatnonzero(table.has_matcher[row_of])
        if not followed.size:
            return None
        completes, problems = np.zeros(len(token_ids), bool), dict[int, str]()
        self._pass_on(row_of, token_ids, ends, followed)
        over = -1  # the row that has ended
        for index in followed.tolist():
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

    def _pass_on(self, row_of: np.ndarray, token_ids: np.ndarray, ends: np.ndarray, followed: np.ndarray) -> None:
        passed: dict[int, list[int]] = {}
        for index in followed.tolist():
            passed.setdefault(int(row_of[index]), []).append(index)
        of = list[tuple[Matcher, list[int]]]()
        for row, indices in passed.items():
            num = next((nth + 1 for nth, index in enumerate(indices) if ends[index]), len(indices))
            of.append((_matcher(self.context.rows, row), token_ids[indices[:num]].tolist()))
        self._backend.advance(of)


class RepeatedMasks(Repeated):
    """Masks of a batch that only decodes: each step has the same rows, and none is in flight while one is planned."""

    def __init__(
        self, backend: Backends, positions: np.ndarray, matchers: list[Matcher], num_words: int, *, may_force: bool
    ) -> None:
        """positions: [num_masks] int32, the sampled positions of the matchers' rows."""
        self._backend, self._positions, self._matchers, self._may_force = backend, positions, matchers, may_force
        self._work: list[tuple[Matcher, int, list[int]]] = [(each, nth, []) for nth, each in enumerate(matchers)]
        self._indices = positions.tolist()
        self._bits = np.zeros((len(matchers), num_words), np.int32)

    def attachment(self, num_in_flight: int) -> Attachment | None:
        """The next step's masks. None if they depend on a step in flight, or if a grammar forces tokens, which become
        drafts."""
        if num_in_flight or (self._may_force and any(each.forced_tokens() for each in self._matchers)):
            return None
        return _later_masks(self._backend, self._work, self._positions, self._bits)

    def take(self, token_ids: np.ndarray) -> Followed | None:
        """Passes the tokens to the matchers."""
        completes, problems = list[int](), dict[int, str]()
        pairs = zip(self._indices, self._matchers, strict=True)
        self._backend.advance([(matcher, [int(token_ids[index])]) for index, matcher in pairs])
        for index, matcher in zip(self._indices, self._matchers, strict=True):
            if problem := _problem_after(matcher, int(token_ids[index])):
                problems[index] = problem
            if matcher.is_complete:
                completes.append(index)
        if not completes and not problems:
            return None
        return Followed(np.isin(np.arange(len(token_ids)), completes), problems)


def _later_masks(
    backend: Backends, work: list[tuple[Matcher, int, list[int]]], positions: np.ndarray, bits: np.ndarray
) -> TokenMasks:
    """Masks that are made while the step begins, and waited for when the rank reads them. Until then no matcher
    advances: its row waits for the step."""
    write = backend.begin(work)

    def make() -> np.ndarray:
        write(bits)
        return bits.reshape(-1)

    return TokenMasks(positions=positions, words=cast(np.ndarray, LazyArray(make)))


def _problem_after(matcher: Matcher, token_id: int) -> str:
    """Passes the token to the matcher. Returns why the grammar does not allow it, or ""."""
    if matcher.accept(token_id):
        return ""
    return matcher.problem or f"token {token_id} came, which the form of the answer does not allow"


def _matcher(table: RowTable, row: int) -> Matcher:
    request = table.requests[row]
    if request is None:
        raise InconsistentError(f"row {row} has no request")
    if request.matcher is None:
        raise InconsistentError(f"row {row} has no matcher")
    return request.matcher


def _by_row(plan: StepPlan, drafts: Drafts) -> dict[int, list[int]]:
    ends = np.cumsum(drafts.counts)
    return {
        int(plan.rows[index]): drafts.token_ids[ends[index] - drafts.counts[index] : ends[index]].tolist()
        for index in np.flatnonzero(drafts.counts).tolist()
    }
