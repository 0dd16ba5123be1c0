"""Choosing tokens where logits are changed or reported of, without waiting for the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.executor.batch import BatchState, Needs
from headrace.executor.device_state import Device, DeviceState, Staging
from headrace.executor.gpu_results import LogprobsInFlight, StepInFlight
from headrace.executor.gpu_sampler import Choice, PenaltyCounts, choice_for
from headrace.executor.gpu_steps import RAW_BEST, DeviceSteps
from headrace.executor.logprobs import limited
from headrace.ipc.step import StepPlan

PROMPT_LOGITS_BYTES = 1 << 27
"""Logits of prompt positions are made for about this many bytes at a time."""


class Choosing:
    """The part of a runner that follows a step's logits. Borrows all that it is given."""

    def __init__(
        self,
        device: Device,
        staging: Staging,
        batch: BatchState,
        state: DeviceState,
        penalties: PenaltyCounts,
        steps: DeviceSteps,
    ) -> None:
        self._device, self._staging, self._batch = device, staging, batch
        self._state, self._penalties, self._steps = state, penalties, steps

    def sample(self, logits: Tensor, step: StepInFlight, needs: int) -> None:
        """As `sampler.sample`, without waiting. logits [num_sampled, vocab_size] may be overwritten."""
        steps, count = self._steps, len(step.rows)
        (sent_rows,) = self._staging.send(step.rows)
        rows = sent_rows.long()
        row_needs = self._batch.sampling.needs[step.rows]
        reporting = np.flatnonzero((row_needs & Needs.LOGPROBS) != 0)
        raw = logits[self._indices(reporting)] if reporting.size else None
        if needs & (Needs.PENALTIES | Needs.MIN_TOKENS):
            step.changed = True
            steps.results[:count, RAW_BEST] = logits.amax(1).view(torch.int32)
            self._forbid_endings(logits, step)
            if needs & Needs.PENALTIES:
                self._penalties.penalise(logits, self._state, rows)
        choice = Choice(min(choice_for(needs & (Needs.RANDOM | Needs.TRUNCATION)), Choice.TRUNCATE))
        token_ids = steps.take(logits, rows, self._state.num_computed[rows].long(), choice)
        if needs & Needs.PENALTIES:
            self._penalties.add(rows, token_ids.long())
        if raw is not None:
            counts = limited(self._batch.sampling.num_logprobs[step.rows[reporting]], logits.shape[1])
            own_ids = token_ids[self._indices(reporting)].long()
            step.reporting = reporting.astype(np.int32)
            step.logprobs = LogprobsInFlight(self._device, raw, own_ids, counts, self._indices(counts))

    def _forbid_endings(self, logits: Tensor, step: StepInFlight) -> None:
        columns, vocab_size = self._batch.sampling, logits.shape[1]
        num_output = step.columns - self._batch.num_prompt_tokens[step.rows]
        places = [np.zeros(0, np.int64)]
        for index in np.flatnonzero(num_output < columns.min_tokens[step.rows]):
            ending = columns.ending_token_ids[step.rows[index]]
            places.append(ending[ending < vocab_size] + index * vocab_size)
        flat = np.concatenate(places)
        if flat.size:
            logits.view(-1).index_fill_(0, self._indices(flat), -torch.inf)

    def report_prompts(self, hidden: Tensor, plan: StepPlan, query_start: np.ndarray, step: StepInFlight) -> None:
        """A position's logits tell of the token after it."""
        batch = self._batch
        at_once = max(1, PROMPT_LOGITS_BYTES // (4 * self._penalties.counts.shape[1]))
        for index in np.flatnonzero((batch.sampling.needs[plan.rows] & Needs.PROMPT_LOGPROBS) != 0):
            row, begin = int(plan.rows[index]), int(plan.num_computed_tokens[index])
            end = min(begin + int(plan.num_tokens[index]), int(batch.num_prompt_tokens[row]) - 1)
            offset = int(query_start[index]) - begin
            for first in range(begin, end, at_once):
                last = min(first + at_once, end)
                logits = self._steps.prompt_logits(hidden, offset + first, offset + last)
                asked = np.full(last - first, batch.sampling.num_prompt_logprobs[row])
                counts = limited(asked, logits.shape[1])
                tokens = self._indices(batch.tokens[row, first + 1 : last + 1])
                told = LogprobsInFlight(self._device, logits, tokens, counts, self._indices(counts))
                step.prompt_runs.append((row, first + 1, told))

    def _indices(self, values: np.ndarray) -> Tensor:
        """[n] int64 on the device."""
        (sent,) = self._staging.send(values.astype(np.int64))
        return sent.view(torch.int64)
