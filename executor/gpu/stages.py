"""Runners of pipeline stages on GPUs; `executor/step/pipeline.py` has what stages on every device share.

A stage that is not the last runs the same steps, graphs and captures as the last one, in the same order, so that sends
and receives match; it chooses no tokens. The last stage sends the tokens that are computed next through the hosts, and
they are written to the device's state with the step's other changes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.executor.gpu.device_state import Device
from headrace.executor.gpu.graphs import Capturer
from headrace.executor.gpu.runner import GpuRunner, RunnerLimits
from headrace.executor.gpu.sampler import StepEnding
from headrace.executor.gpu.steps import DeviceSteps, StepInFlight
from headrace.executor.parallel.rank_place import Collectives, RankCoordinates
from headrace.executor.step.inputs import HiddenStateModel, StepInputs
from headrace.executor.step.pipeline import AwaitedTokens, publish
from headrace.executor.step.result import empty_result
from headrace.executor.step.verification import SampledPositions
from headrace.ipc.step import StepPlan, StepResult


class StageModel:
    """Adapts a stage's model to the runner: its "logits" are the hidden states, which go to the next stage."""

    def __init__(self, model: HiddenStateModel) -> None:
        self._model = model

    def forward(self, inputs: StepInputs, kv_cache: Any) -> Tensor:
        return self._model.forward(inputs, kv_cache)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


class StageSteps(DeviceSteps):
    """Steps that end with hidden states, whichever `StepEnding` the last stage's steps end with."""

    def use(self, model: HiddenStateModel) -> None:
        super().use(StageModel(model))

    def decode(
        self, size: int, ending: StepEnding, num_blocks: int | None = None, most_adapters: int = 0
    ) -> Tensor | None:
        return super().decode(size, StepEnding.LOGITS, num_blocks, most_adapters)

    def take(self, logits: Tensor, rows: Tensor, positions: Tensor, ending: StepEnding) -> Tensor:
        return torch.zeros(len(rows), dtype=torch.int32, device=rows.device)


class GpuStageRunner(GpuRunner):
    """Runs a stage that is not the last. Its results are empty."""

    chooses = False
    _awaited: AwaitedTokens

    def connect(self, link: Collectives) -> None:
        def on_last_tokens(rows: np.ndarray, token_ids: np.ndarray) -> None:
            self.deltas.set("last_token", rows, token_ids)

        self._awaited = AwaitedTokens(self.batch, link, on_last_tokens)

    def _make_steps(self, model: HiddenStateModel, kv_cache: Any) -> DeviceSteps:
        return StageSteps(StageModel(model), kv_cache, self.state, self._limits.block_size)

    def collect(self) -> StepResult:
        step = self._in_flight[0]
        with self.times.phase("wait"):
            step.done.synchronize()
        self._in_flight.popleft()
        result = empty_result(step.plan)
        self.times.collected(result)
        return result

    def _apply(self, plan: StepPlan) -> None:
        super()._apply(plan)
        self._awaited.take(plan)

    def _start(self, plan: StepPlan, step: StepInFlight) -> None:
        self._compute(plan, step, self.batch.sampling.all_needs(plan.rows))
        self._awaited.expect(step.sampled_rows)

    def _start_drafted(self, plan: StepPlan, positions: SampledPositions, step: StepInFlight) -> None:
        self._mixed(plan, step, 0, positions)
        self._awaited.expect(step.sampled_rows)


class LastGpuRunner(GpuRunner):
    """Runs the last of several stages on its first rank, and publishes the tokens of each step that samples."""

    _link: Collectives

    def connect(self, link: Collectives) -> None:
        self._link = link

    def collect(self) -> StepResult:
        step = self._in_flight[0]
        result = super().collect()
        if len(step.rows):
            publish(self._link, step.plan.step, step.settle())
        return result


def runner_kind(place: RankCoordinates) -> type[GpuRunner]:
    """The class of the runner for this place."""
    if not place.is_last_stage:
        return GpuStageRunner
    return LastGpuRunner if place.pp_size > 1 and place.tp_rank == 0 else GpuRunner


def make_runner(
    place: RankCoordinates,
    model: HiddenStateModel,
    kv_cache: Any,
    device: Device,
    limits: RunnerLimits,
    capturer: Capturer | None = None,
) -> GpuRunner:
    """The runner for this place, connected to the other stages."""
    runner = runner_kind(place)(model, kv_cache, device, limits, capturer)
    if isinstance(runner, (GpuStageRunner, LastGpuRunner)):
        runner.connect(place.link)
    return runner
