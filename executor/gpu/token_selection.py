"""Chooses tokens on the device where logits are changed or logprobs reported, without waiting for the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace import kernels
from headrace.executor.gpu.device_state import Device, DeviceState, Staging
from headrace.executor.gpu.sampler import Changes, StepEnding, TokenStates, ending_for
from headrace.executor.gpu.steps import RAW_BEST, DeviceSteps, LogprobsInFlight, ReportLogprobs, StepInFlight
from headrace.executor.sampling.columns import CHANGES, Needs
from headrace.executor.sampling.logprobs import asked_tokens, limited
from headrace.executor.sampling.token_rules import additions
from headrace.executor.step.batch import BatchState
from headrace.executor.step.prompt_logprobs import PromptPiece, PromptReport
from headrace.ipc.step import StepPlan, TokenMasks

REPORTED = (0, 5, 20)
"""Usual numbers of reported top logprobs."""


class TokenSelection:
    """The part of a runner that follows a step's logits. Uses its arguments without owning them."""

    def __init__(
        self,
        device: Device,
        staging: Staging,
        batch: BatchState,
        state: DeviceState,
        tokens: TokenStates,
        steps: DeviceSteps,
    ) -> None:
        self._device, self._staging, self._batch = device, staging, batch
        self._state, self._tokens, self._steps = state, tokens, steps
        self._report: ReportLogprobs = kernels.choose("token_logprobs", device=device.device, dtype=torch.float32)

    def can(self, rows: np.ndarray) -> bool:
        """Whether the device can choose for rows [num_rows]: it has the counts that frequency penalties need."""
        return not self._tokens.lacks_counts or not self._tokens.changes(self._batch, rows).counted

    def sample(self, logits: Tensor, step: StepInFlight, needs: int) -> None:
        """Chooses like `sampler.sample`, but without waiting. May overwrite logits [num_sampled, vocab_size]."""
        steps, count = self._steps, len(step.rows)
        (sent_rows,) = self._staging.send(step.rows)
        rows = sent_rows.long()
        row_needs = self._batch.sampling.needs[step.rows]
        reporting = np.flatnonzero((row_needs & Needs.LOGPROBS) != 0)
        told = raw = None
        masks = step.plan.get(TokenMasks)
        changes = bool(needs & CHANGES) or masks is not None
        if reporting.size:
            told = self._indices(reporting)
            # Choosing leaves logits unchanged, so a copy of all of them is needed only where something else changes
            # them.
            raw = logits if reporting.size == count and not changes else logits[told]
        if changes:
            step.changed = True
            steps.results[:count, RAW_BEST] = logits.amax(1).view(torch.int32)
            if masks is not None:
                self._tokens.mask(logits, masks, self._staging)
            self._change(logits, step.rows, rows)
        ending = StepEnding(min(ending_for(needs & (Needs.RANDOM | Needs.TRUNCATION)), StepEnding.TRUNCATE))
        token_ids = steps.take(logits, rows, self._state.num_computed[rows].long(), ending)
        if needs & Needs.PENALTIES:
            self._tokens.add(rows, token_ids.long())
        if raw is not None and told is not None:
            asked = asked_tokens(self._batch.sampling, step.rows[reporting])
            counts = limited(self._batch.sampling.num_logprobs[step.rows[reporting]], logits.shape[1])
            counts[[len(tokens) > 0 for tokens in asked]] = logits.shape[1]
            step.reporting = reporting.astype(np.int32)
            step.logprobs = LogprobsInFlight(self._device, raw, token_ids[told].long(), counts, self._report, asked)

    def _change(self, logits: Tensor, host_rows: np.ndarray, rows: Tensor) -> None:
        """Additions to single logits and forbidding commute, so allowed tokens are applied in the penalties' launch."""
        places, added = additions(self._batch, host_rows, logits.shape[1])
        if places.size:
            sent_places, sent_added = self._staging.send(places, added)
            logits.view(-1).index_add_(0, sent_places.view(torch.int64), sent_added.view(torch.float32))
        self._tokens.adjust(logits, self._state, rows, self._tokens.changes(self._batch, host_rows))

    def visit(self, num_rows: int) -> None:
        """Runs the largest changes and reports, so that their memory is measured and their kernels are compiled before
        any request. Needs the counts of no request, and keeps none."""
        tokens, device = self._tokens, self._device.device
        logits = torch.zeros(num_rows, tokens.vocab_size, device=device)
        raw, rows = logits.clone(), torch.zeros(num_rows, dtype=torch.int64, device=device)
        for penalised in (False, True):
            tokens.adjust(logits, self._state, rows, Changes(limited=True, penalised=penalised, counted=False))
        tokens.visit_counted(logits[:1], self._state, rows[:1])
        for width in REPORTED:
            self._report(raw, rows, min(width, tokens.vocab_size))

    def report_prompts(self, hidden: Tensor, plan: StepPlan, query_start: np.ndarray) -> PromptReport:
        """Starts reporting prompt logprobs."""

        def logits_at(first: int, last: int) -> Tensor:
            return self._steps.prompt_logits(hidden, first, last)

        def logprobs_of(logits: Tensor, piece: PromptPiece) -> LogprobsInFlight:
            counts = limited(piece.counts, logits.shape[1])
            return LogprobsInFlight(self._device, logits, self._indices(piece.token_ids), counts, self._report)

        return PromptReport.begin(self._batch, plan, query_start, self._tokens.vocab_size, logits_at, logprobs_of)

    def _indices(self, values: np.ndarray) -> Tensor:
        """[n] int64 on the device."""
        (sent,) = self._staging.send(values.astype(np.int64))
        return sent.view(torch.int64)
