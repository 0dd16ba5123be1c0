"""The runner of a rank on the CPU: turns a StepPlan into a step of the model, and its tokens into a StepResult."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.executor.cpu.repeated_decode import ContinuedDecode, RepeatingModel
from headrace.executor.parallel.rank_place import Collectives
from headrace.executor.pooling.pooler import Pooler
from headrace.executor.sampling.columns import Needs
from headrace.executor.sampling.draws import Chosen, Draws
from headrace.executor.sampling.sampler import Sampled, find_problems, sample
from headrace.executor.step.batch import BatchState, StepArrays
from headrace.executor.step.inputs import Model, StepLogits
from headrace.executor.step.pipeline import publish
from headrace.executor.step.prompt_logprobs import PromptReport
from headrace.executor.step.result import AddedTokens, assemble, empty_result
from headrace.executor.step.verification import SampledPositions
from headrace.ipc.step import Drafts, StepPlan, StepResult, TokenMasks

CHANGED_OR_REPORTED = int(~(Needs.RANDOM | Needs.TRUNCATION))
"""Needs that a model's own choice of tokens does not meet."""
IN_THE_MODEL = frozenset((TokenMasks,))
"""Attachments that change logits, and that a model's own choice of tokens heeds."""


class ModelRunner:
    """Owns the batch state; uses the model and its cache without owning them. Used from one thread."""

    def __init__(
        self,
        model: Model,
        kv_cache: Any,
        batch: BatchState,
        *,
        vocab_size: int,
        may_repeat: bool = True,
        link: Collectives | None = None,
        pooler: Pooler | None = None,
    ) -> None:
        """may_repeat: False: steps are never repeated, even by a model that could. link: to the other stages of a
        pipeline, whose last stage this is; they get the tokens of each step. pooler: one of the batch's columns, of
        rows that pool; None: none do."""
        self._kv_cache, self._batch, self._may_repeat, self._link = kv_cache, batch, may_repeat, link
        self._pooler = pooler
        self._vocab_size = vocab_size
        self.use(model)

    def use(self, model: Model) -> None:
        """Replaces the model from the next step on. The rows stay as they are."""
        self._model = model
        self._repeats = model if isinstance(model, RepeatingModel) and self._may_repeat else None
        self._repeating: ContinuedDecode | None = None  # set after a decode whose tokens the model chose

    def step(self, plan: StepPlan) -> StepResult:
        """Runs one step. Plans must come in the core's order, as each step builds on the state of the previous ones.

        A row whose logits are not finite becomes a RowFailure; any exception ends the engine.
        """
        if self._repeating is not None and self._repeating.goes_on(plan):
            return self._repeat(plan, self._repeating)
        self._repeating = None
        self._batch.apply(plan)
        if not len(plan.rows):
            return empty_result(plan)
        needs, positions, are_changed = self._batch.sampling.all_needs(plan.rows), None, False
        if plan.attachments:
            drafts = plan.get(Drafts)
            positions = None if drafts is None else SampledPositions(plan, drafts)
            are_changed = self._batch.handlers.change_logits(plan, besides=IN_THE_MODEL)
        if needs & CHANGED_OR_REPORTED or are_changed:
            return self._reported(plan, positions, reports_prompts=bool(needs & Needs.PROMPT_LOGPROBS))
        if positions is not None:
            return self._drafted(plan, needs, positions)
        return self._plain(plan, needs)

    def _repeat(self, plan: StepPlan, repeating: ContinuedDecode) -> StepResult:
        batch = self._batch
        if plan.block_tables.size:
            batch.append_blocks(plan.block_tables, plan.block_ids)
        begun = repeating.begun_blocks(plan, batch.block_tables)
        began_s = time.monotonic()
        chosen = repeating.model.repeat(begun, plan.get(TokenMasks))
        times_s = began_s, time.monotonic()
        batch.append_repeated(plan.rows, chosen.token_ids)
        return assemble(plan, AddedTokens.one_each(plan.rows, _sampled(chosen)), times_s)

    def _plain(self, plan: StepPlan, needs: int) -> StepResult:
        """A step that samples one token for each row, which the model may choose."""
        batch, rows, masks = self._batch, plan.rows[plan.sampled], plan.get(TokenMasks)
        draws = None
        if needs or masks is not None:
            draws = batch.sampling.draws(rows, batch.num_tokens[rows], masks)
        arrays = batch.arrays(plan, reads_logits=draws is not None)
        computed, times_s = self._compute(plan, arrays, draws)
        if computed.chosen is None:
            return self._finish(plan, AddedTokens.one_each(rows, self._sample(computed.sampled, rows, plan)), times_s)
        if self._repeats is not None and plan.total_tokens == len(rows) == len(plan.rows):
            self._repeating = ContinuedDecode(self._repeats, plan, batch.block_size)
        return self._finish(plan, AddedTokens.one_each(rows, _sampled(computed.chosen)), times_s)

    def _drafted(self, plan: StepPlan, needs: int, positions: SampledPositions) -> StepResult:
        """A step with drafts, in which the model may choose the tokens."""
        batch, rows, masks = self._batch, positions.row_of, plan.get(TokenMasks)
        num_tokens, draws = batch.num_tokens[rows] + positions.nth, None
        if needs or masks is not None:
            draws = batch.sampling.draws(rows, num_tokens, masks)
        arrays = batch.arrays(plan, positions, reads_logits=draws is not None)
        computed, times_s = self._compute(plan, arrays, draws)
        if computed.chosen is None:
            sampled = self._sample(computed.sampled, rows, plan, num_tokens)
        else:
            sampled = _sampled(computed.chosen)
        return self._finish(plan, AddedTokens.verified(positions, sampled), times_s)

    def _reported(self, plan: StepPlan, positions: SampledPositions | None, *, reports_prompts: bool) -> StepResult:
        """A step whose logits are changed before tokens are sampled, or of which log-probabilities are reported."""
        batch, prompts = self._batch, None
        arrays = batch.arrays(plan, positions)
        computed, times_s = self._compute(plan, arrays, None)
        logits = computed.sampled
        if reports_prompts:
            logits = logits.clone()
            prompts = self._report_prompts(plan, arrays, computed)
        if positions is None:
            rows = plan.rows[plan.sampled]
            new = AddedTokens.one_each(rows, self._sample(logits, rows, plan))
        else:
            num_tokens = batch.num_tokens[positions.row_of] + positions.nth
            new = AddedTokens.verified(positions, self._sample(logits, positions.row_of, plan, num_tokens))
        return self._finish(plan, new, times_s, prompts)

    def _compute(
        self, plan: StepPlan, arrays: StepArrays, draws: Draws | None
    ) -> tuple[StepLogits, tuple[float, float]]:
        """The step's logits, and when it began and ended. Pools the rows that ask for it."""
        wanted = None if self._pooler is None else self._pooler.wanted(plan, arrays.query_start)
        if self._pooler is not None and wanted is not None:
            arrays.pooled_indices = wanted.indices
            arrays.token_types = self._pooler.token_types(plan, arrays.query_start, arrays.positions)
            arrays.key_lens = self._pooler.key_lens(plan, arrays.seq_lens)
        began_s = time.monotonic()
        computed = self._model.step(arrays, self._kv_cache, draws)
        times_s = began_s, time.monotonic()
        if self._pooler is not None and wanted is not None and computed.pooled is not None:
            self._pooler.take(wanted, computed.pooled)
        return computed, times_s

    @torch.inference_mode()
    def _sample(
        self, logits: Tensor, rows: np.ndarray, plan: StepPlan, num_tokens: np.ndarray | None = None
    ) -> Sampled:
        if not len(rows):
            return _NOTHING
        return sample(logits, self._batch, rows, num_tokens, self._batch.handlers.change_of(plan))

    @torch.inference_mode()
    def _report_prompts(self, plan: StepPlan, arrays: StepArrays, computed: StepLogits) -> PromptReport:
        return PromptReport.begin(self._batch, plan, arrays.query_start, self._vocab_size, computed.at)

    def _finish(
        self, plan: StepPlan, new: AddedTokens, times_s: tuple[float, float], prompts: PromptReport | None = None
    ) -> StepResult:
        self._batch.append_sampled(new.rows, new.token_ids, new.counts)
        if self._link is not None and len(new.rows):
            publish(self._link, plan.step, new)
        result = assemble(plan, new, times_s, prompts)
        if self._pooler is not None:
            result = self._pooler.added_to(result)
        return self._batch.ended(plan, result)


_NOTHING = Sampled(np.zeros(0, np.int32), {})


def _sampled(chosen: Chosen) -> Sampled:
    return Sampled(chosen.token_ids, find_problems(chosen.best))
