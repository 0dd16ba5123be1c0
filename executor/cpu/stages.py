"""Runners of pipeline stages: the last stage sends the tokens that its steps sampled to the others.

A stage may be a few steps ahead of the last. Before a step it takes the tokens that have arrived, and waits only for
those that the step computes. A token of a row that has been released since is dropped, since the row may now belong to
another request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace.executor.cpu.runner import Model, ModelRunner
from headrace.executor.parallel.rank_place import Collectives, RankPlace
from headrace.executor.sampling.columns import SamplingColumns
from headrace.executor.step.awaited_tokens import AwaitedTokens, by_row
from headrace.executor.step.batch import BatchState
from headrace.ipc.step import Drafts, StepPlan, StepResult


@dataclass
class _Unknown:
    step: int
    given_up: set[int] = field(default_factory=set)
    """Rows released since the step; their tokens are dropped."""


class StageRunner:
    """Runs a stage that is not the last. Its results are empty."""

    def __init__(self, model: Model, kv_cache: Any, batch: BatchState, link: Collectives) -> None:
        self._model, self._kv_cache, self._batch, self._link = model, kv_cache, batch, link
        self._awaited = AwaitedTokens[_Unknown](self._put_tokens)

    def use(self, model: Model) -> None:
        """Replaces the model from the next step on."""
        self._model = model

    def step(self, plan: StepPlan) -> StepResult:
        """Runs this stage's part of a step. Plans must come in the core's order."""
        for unknown in self._awaited.steps:
            unknown.given_up.update(plan.released_rows.tolist())
        self._batch.apply(plan)
        self._take_tokens(plan)
        if len(plan.rows):
            self._model.step(self._batch.arrays(plan), self._kv_cache, None)
        if plan.sampled.any():
            self._awaited.steps.append(_Unknown(plan.step))
        nothing = np.zeros(0, np.int32)
        return StepResult(step=plan.step, rows=nothing, token_ids=nothing)

    def _take_tokens(self, plan: StepPlan) -> None:
        batch, end = self._batch, plan.num_computed_tokens + plan.num_tokens
        if (drafts := plan.get(Drafts)) is not None:
            end = end - drafts.counts
        self._awaited.take(self._link, lambda: bool((end > batch.num_tokens[plan.rows]).any()))

    def _put_tokens(self, unknown: _Unknown, rows: np.ndarray, token_ids: np.ndarray) -> None:
        if unknown.given_up:
            kept = ~np.isin(rows, list(unknown.given_up))
            rows, token_ids = rows[kept], token_ids[kept]
        if len(rows):
            rows, counts = by_row(rows)
            self._batch.append_sampled(rows, token_ids, counts)


class NotedBatch(BatchState):
    """Records the tokens appended in a step, and the row of each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.appended: list[tuple[np.ndarray, np.ndarray]] = []

    def append_sampled(self, rows: np.ndarray, token_ids: np.ndarray, counts: np.ndarray | None = None) -> None:
        self.appended.append((rows if counts is None else np.repeat(rows, counts), token_ids))
        super().append_sampled(rows, token_ids, counts)


class LastStageRunner:
    """Runs the last of several stages on its first rank, and publishes the tokens of each step that samples."""

    def __init__(self, runner: ModelRunner, batch: NotedBatch, link: Collectives) -> None:
        self._runner, self._batch, self._link = runner, batch, link

    def use(self, model: Model) -> None:
        """Replaces the model from the next step on."""
        self._runner.use(model)

    def step(self, plan: StepPlan) -> StepResult:
        appended = self._batch.appended
        appended.clear()
        result = self._runner.step(plan)
        if plan.sampled.any():
            rows, token_ids = [np.concatenate(each) for each in zip(*appended, strict=True)] or [_NONE, _NONE]
            self._link.publish(plan.step, rows, token_ids)
        return result


_NONE = np.zeros(0, np.int32)


def make_runner(
    model: Model,
    kv_cache: Any,
    batch_args: tuple[Any, ...],
    place: RankPlace,
    vocab_size: int,
    set_up: Callable[[SamplingColumns], None],
) -> ModelRunner | StageRunner | LastStageRunner:
    """The runner for this place. batch_args: arguments of `BatchState`; set_up: configures its sampling columns."""
    if not place.is_last_stage:
        return StageRunner(model, kv_cache, BatchState(*batch_args), place.link)
    is_first_rank = place.pp_size > 1 and place.tp_rank == 0
    batch = NotedBatch(*batch_args) if is_first_rank else BatchState(*batch_args)
    set_up(batch.sampling)
    # A repeated step would receive nothing from the previous stage.
    runner = ModelRunner(model, kv_cache, batch, vocab_size=vocab_size, may_repeat=place.pp_size == 1)
    return LastStageRunner(runner, batch, place.link) if isinstance(batch, NotedBatch) else runner
