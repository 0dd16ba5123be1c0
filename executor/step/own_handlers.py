"""What a rank does with Headrace's own kinds of attachments. Imports torch only to change logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headrace.executor.step.handlers import Handler
from headrace.ipc.step import Drafts, StateSnapshots, StepPlan, TokenMasks, nth_of_each

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.executor.step.batch import BatchState


class PuttingDrafts(Handler[Drafts]):
    """Which tokens a step samples after drafts, and how many it keeps, is `verification.SampledPositions`."""

    kind = Drafts

    def __init__(self, batch: BatchState) -> None:
        self._batch = batch

    def begin(self, attached: Drafts, plan: StepPlan) -> None:
        """Writes drafts after each row's known tokens, which may themselves not have arrived yet."""
        first = plan.num_computed_tokens + plan.num_tokens - attached.counts
        columns = np.repeat(first, attached.counts) + nth_of_each(attached.counts)
        self._batch.tokens[np.repeat(plan.rows, attached.counts), columns] = attached.token_ids


class KeepingSnapshots(Handler[StateSnapshots]):
    kind = StateSnapshots

    def __init__(self, batch: BatchState) -> None:
        self._batch = batch

    def begin(self, attached: StateSnapshots, plan: StepPlan) -> None:
        """Adds to the step's inputs which states its layers store besides the rows' own."""
        states = self._batch.states_of_step
        if states is not None:
            self._batch.states_of_step = states.with_snapshots(attached, plan)


class Masking(Handler[TokenMasks]):
    """Where a device chooses tokens itself, it forbids them too: the CPU program (`Draws.masks`), and the GPU's
    `token_selection.TokenSelection`."""

    kind = TokenMasks

    def change(self, attached: TokenMasks, logits: Tensor, rows: np.ndarray, num_tokens: np.ndarray) -> None:
        """Forbids the tokens that masks do not allow."""
        import torch

        allowed = torch.from_numpy(attached.allowed(logits.shape[1])).to(logits.device)
        for place, mask in zip(attached.positions.tolist(), allowed, strict=True):
            logits[place].masked_fill_(~mask, -torch.inf)
