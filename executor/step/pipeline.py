"""Stages of a pipeline: the last one sends the tokens that its steps sampled to the others.

A stage may be a few steps ahead of the last. Before a step it takes the tokens that have arrived, and waits only for
those that the step computes. A token of a row that has been released since is dropped, since the row may now belong to
another request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from headrace.executor.parallel.rank_place import Collectives
from headrace.executor.step.batch import BatchState
from headrace.executor.step.inputs import Model
from headrace.executor.step.result import AddedTokens, empty_result
from headrace.ipc.step import Drafts, StepPlan, StepResult

MOST_UNKNOWN = 16
"""A stage waits when it lacks the tokens of more steps than this; far more than are ever in flight."""
PENDING = -1
"""Stands for a token that is being sampled and not yet known to this host."""


def append_pending(batch: BatchState, rows: np.ndarray) -> None:
    """Counts one token more for each of rows, which arrives later."""
    batch.append_sampled(rows, np.full(len(rows), PENDING, np.int32))


class StepRows(NamedTuple):
    """The rows for which a step samples, as they were when it began."""

    step: int
    rows: np.ndarray  # [num_sampled] int32
    columns: np.ndarray  # [num_sampled]: of the first new token in its row
    generations: np.ndarray  # [num_sampled]: `BatchState.generation`
    has_drafts: bool
    """The number of tokens of each row is unknown, too."""

    @classmethod
    def of(cls, plan: StepPlan, batch: BatchState) -> StepRows:
        rows = plan.rows[plan.sampled]
        has_drafts = plan.get(Drafts) is not None
        return cls(plan.step, rows, batch.num_tokens[rows], batch.generation[rows], has_drafts)

    def put_pending(self, batch: BatchState, token_ids: np.ndarray) -> np.ndarray:
        """Writes tokens that were pending; returns which belong to their rows still, [num_sampled] bool."""
        same: np.ndarray = batch.generation[self.rows] == self.generations
        fits = same & (self.columns < batch.tokens.shape[1])
        batch.tokens[self.rows[fits], self.columns[fits]] = token_ids[fits]
        return same


class AwaitedTokens:
    """The steps of a stage whose tokens have not arrived, oldest first."""

    def __init__(
        self,
        batch: BatchState,
        link: Collectives,
        on_last_tokens: Callable[[np.ndarray, np.ndarray], None] = lambda rows, token_ids: None,
    ) -> None:
        """on_last_tokens: called with rows [n] and the last token of each, when they have arrived."""
        self._batch, self._link, self._on_last_tokens = batch, link, on_last_tokens
        self._steps: deque[StepRows] = deque()

    def expect(self, sampled: StepRows) -> None:
        """Call it for each step once its inputs have been made."""
        if not len(sampled.rows):
            return
        self._steps.append(sampled)
        if not sampled.has_drafts:
            append_pending(self._batch, sampled.rows)

    def take(self, plan: StepPlan) -> None:
        """Takes the tokens that have arrived, and waits for those that the plan computes. Call `BatchState.apply`
        first."""
        while self._steps:
            taken = self._link.sampled(wait=self._is_needed(plan) or len(self._steps) > MOST_UNKNOWN)
            if taken is None:
                return
            step, rows, token_ids = taken
            due = self._steps.popleft()
            if step != due.step:
                raise RuntimeError(f"tokens of step {step} came where those of step {due.step} were due")
            self._put(due, rows, token_ids)

    def _is_needed(self, plan: StepPlan) -> bool:
        batch, last = self._batch, plan.num_computed_tokens + plan.num_tokens - 1
        if (drafts := plan.get(Drafts)) is not None:
            last = last - drafts.counts
        is_known = (last < batch.num_tokens[plan.rows]) & (batch.tokens[plan.rows, last] != PENDING)
        return not is_known.all()

    def _put(self, due: StepRows, row_of: np.ndarray, token_ids: np.ndarray) -> None:
        """row_of: the row of each token; the tokens of a row are adjacent."""
        starts = np.flatnonzero(np.diff(row_of, prepend=-1))
        rows, counts = row_of[starts], np.diff(starts, append=len(row_of))
        if rows.tolist() != due.rows.tolist():
            raise RuntimeError(f"step {due.step} sampled rows {due.rows.tolist()}, and {rows.tolist()} came")
        last_tokens = token_ids[starts + counts - 1]
        if due.has_drafts:
            same = self._batch.generation[rows] == due.generations
            self._batch.append_sampled(rows[same], token_ids[np.repeat(same, counts)], counts[same])
        else:
            same = due.put_pending(self._batch, token_ids)
        self._on_last_tokens(rows[same], last_tokens[same])


def publish(link: Collectives, step: int, new: AddedTokens) -> None:
    """Sends the tokens that a step of the last stage added to the other stages."""
    link.publish(step, new.rows if new.counts is None else np.repeat(new.rows, new.counts), new.token_ids)


class StageRunner:
    """Runs a stage that is not the last, on the calling thread. Its results are empty."""

    def __init__(self, model: Model, kv_cache: Any, batch: BatchState, link: Collectives) -> None:
        self._model, self._kv_cache, self._batch = model, kv_cache, batch
        self._awaited = AwaitedTokens(batch, link)

    def use(self, model: Model) -> None:
        """Replaces the model from the next step on."""
        self._model = model

    def step(self, plan: StepPlan) -> StepResult:
        """Runs this stage's part of a step. Plans must come in the core's order."""
        self._batch.apply(plan)
        self._awaited.take(plan)
        if len(plan.rows):
            self._model.step(self._batch.arrays(plan), self._kv_cache, None)
            self._awaited.expect(StepRows.of(plan, self._batch))
        return empty_result(plan)
