"""Runners of pipeline stages on GPUs; the algorithm is that of `executor/cpu/stages.py`.

A stage that is not the last runs the same steps, graphs and captures as the last one, in the same order, so that sends
and receives match; it chooses no tokens. The last stage sends the tokens that are computed next through the hosts, and
they are written to the device's state with the step's other changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.executor.gpu.device_state import Device
from headrace.executor.gpu.graphs import Capturer
from headrace.executor.gpu.runner import PENDING, GpuRunner, RunnerLimits
from headrace.executor.gpu.sampler import Choice
from headrace.executor.gpu.steps import DeviceSteps, StepInFlight
from headrace.executor.parallel.rank_place import Collectives, RankPlace
from headrace.executor.step.awaited_tokens import AwaitedTokens, by_row
from headrace.executor.step.inputs import HiddenStateModel, StepInputs
from headrace.executor.step.verification import SampledPositions, verify
from headrace.ipc.step import Drafts, StepPlan, StepResult

NOTHING = np.zeros(0, np.int32)


class StageModel:
    """Adapts a stage's model to the runner: its "logits" are the hidden states, which go to the next stage."""

    def __init__(self, model: HiddenStateModel) -> None:
        self._model = model

    def forward(self, inputs: StepInputs, kv_cache: Any) -> Tensor:
        return self._model.forward(inputs, kv_cache)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


class StageSteps(DeviceSteps):
    """Steps that end with hidden states, whichever `Choice` the last stage's steps end with."""

    def use(self, model: HiddenStateModel) -> None:
        super().use(StageModel(model))

    def decode(self, size: int, choice: Choice, num_blocks: int | None = None) -> Tensor | None:
        return super().decode(size, Choice.LOGITS, num_blocks)

    def take(self, logits: Tensor, rows: Tensor, positions: Tensor, choice: Choice) -> Tensor:
        return torch.zeros(len(rows), dtype=torch.int32, device=rows.device)


@dataclass(eq=False)
class _Unknown:
    """A step that was started here and whose tokens have not arrived yet."""

    step: int
    rows: np.ndarray  # [num_sampled] int32
    columns: np.ndarray  # [num_sampled]: the column of each token in its row
    generations: np.ndarray  # [num_sampled]: which of a row's successive requests it is for
    is_drafted: bool = False
    """The number of tokens of each row is unknown, too."""


class GpuStageRunner(GpuRunner):
    """Runs a stage that is not the last. Its results are empty."""

    chooses = False
    link: Collectives
    """Must be set before the first plan."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._awaited = AwaitedTokens[_Unknown](self._put_tokens)

    def _make_steps(self, model: HiddenStateModel, kv_cache: Any) -> DeviceSteps:
        return StageSteps(StageModel(model), kv_cache, self.state, self._limits.block_size)

    def collect(self) -> StepResult:
        step = self._in_flight[0]
        with self.times.phase("wait"):
            step.done.synchronize()
        self._in_flight.popleft()
        result = StepResult(step=step.plan.step, rows=NOTHING, token_ids=NOTHING)
        self.times.collected(result)
        return result

    def _apply(self, plan: StepPlan) -> None:
        super()._apply(plan)
        self._take_tokens(plan)

    def _start(self, plan: StepPlan, step: StepInFlight) -> None:
        self._compute(plan, step, self.batch.sampling.all_needs(plan.rows))
        self.batch.append_sampled(step.rows, np.full(len(step.rows), PENDING, np.int32))
        if len(step.rows):
            self._awaited.steps.append(_Unknown(plan.step, step.rows, step.columns, step.generations))

    def _start_drafted(self, plan: StepPlan, places: SampledPositions, step: StepInFlight) -> None:
        self._mixed(plan, step, 0, places)
        unknown = _Unknown(plan.step, step.rows, step.columns, step.generations, is_drafted=True)
        self._awaited.steps.append(unknown)

    def _report_prompts(self, hidden: Tensor, plan: StepPlan, query_start: np.ndarray, step: StepInFlight) -> None:
        """Does nothing: the last stage reports them."""

    def _take_tokens(self, plan: StepPlan) -> None:
        """Takes the tokens that have arrived, and waits for those that the plan computes."""
        batch, last = self.batch, plan.num_computed_tokens + plan.num_tokens - 1
        if (drafts := plan.get(Drafts)) is not None:
            last = last - drafts.counts

        def is_needed() -> bool:
            is_known = (last < batch.num_tokens[plan.rows]) & (batch.tokens[plan.rows, last] != PENDING)
            return not is_known.all()

        self._awaited.take(self.link, is_needed)

    def _put_tokens(self, unknown: _Unknown, rows: np.ndarray, token_ids: np.ndarray) -> None:
        counts = np.ones(len(unknown.rows), np.int32)
        if unknown.is_drafted and len(rows):
            rows, counts = by_row(rows)
        if rows.tolist() != unknown.rows.tolist():
            raise RuntimeError(f"step {unknown.step} sampled rows {unknown.rows.tolist()}, and {rows.tolist()} came")
        kept = self._generation[rows] == unknown.generations
        if unknown.is_drafted:
            token_ids = token_ids[np.repeat(kept, counts)]
            rows, counts = rows[kept], counts[kept]
            self.batch.append_sampled(rows, token_ids, counts)
            self.deltas.set("last_token", rows, token_ids[np.cumsum(counts) - 1])
            return
        kept &= unknown.columns < self.batch.tokens.shape[1]
        rows, columns, token_ids = rows[kept], unknown.columns[kept], token_ids[kept]
        self.batch.tokens[rows, columns] = token_ids
        self.deltas.set("last_token", rows, token_ids)


class LastGpuRunner(GpuRunner):
    """Runs the last of several stages on its first rank, and publishes the tokens of each step that samples."""

    link: Collectives

    def collect(self) -> StepResult:
        step = self._in_flight[0]
        result = super().collect()
        if len(step.rows):
            assert step.sampled is not None, "it has been collected"
            rows, token_ids = step.rows, step.sampled.token_ids
            if step.places is not None:
                verified = verify(step.places, step.sampled, {})
                rows, token_ids = np.repeat(rows, verified.num_appended), verified.appended
            self.link.publish(step.plan.step, rows, token_ids)
        return result


def runner_kind(place: RankPlace) -> type[GpuRunner]:
    """The class of the runner for this place."""
    if not place.is_last_stage:
        return GpuStageRunner
    return LastGpuRunner if place.pp_size > 1 and place.tp_rank == 0 else GpuRunner


def make_runner(
    place: RankPlace,
    model: HiddenStateModel,
    kv_cache: Any,
    device: Device,
    limits: RunnerLimits,
    capturer: Capturer | None = None,
) -> GpuRunner:
    """The runner for this place, connected to the other stages."""
    runner = runner_kind(place)(model, kv_cache, device, limits, capturer)
    if isinstance(runner, (GpuStageRunner, LastGpuRunner)):
        runner.link = place.link
    return runner
