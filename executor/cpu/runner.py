"""The model runner: turns a StepPlan into tensors, runs the forward pass, samples tokens and returns a StepResult."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch

from headrace.executor.cpu.repeated_decode import RepeatedDecode, RepeatingModel
from headrace.executor.sampling.columns import Needs
from headrace.executor.sampling.draws import Draws
from headrace.executor.sampling.logprobs import logprob_rows, no_prompt_logprobs
from headrace.executor.sampling.sampler import Sampled, find_problems, row_failure, sample
from headrace.executor.step.batch import BatchState, StepArrays
from headrace.executor.step.inputs import StepLogits
from headrace.executor.step.verification import SampledPositions, verify
from headrace.ipc.step import Drafts, PromptLogprobRun, StepPlan, StepResult, TokenMasks

PROMPT_LOGITS_BYTES = 1 << 27
"""Logits of prompt positions are computed in pieces of about this size: a whole chunk's could dwarf the model."""


class Model(Protocol):
    """What the runner needs from a model; implemented by `models.decoder.Decoder` and `cpu.decoder.CpuDecoder`."""

    def step(self, arrays: StepArrays, kv_cache: Any, draws: Draws | None) -> StepLogits:
        """Writes the tokens' keys and values into the cache and returns the logits of `arrays.logits_indices`.

        It may also choose their tokens, by `draws` (None: greedily); the runner decides whether to use them.
        """


class ModelRunner:
    """Owns the batch state; uses the model and its cache without owning them. Used from one thread."""

    def __init__(
        self, model: Model, kv_cache: Any, batch: BatchState, *, vocab_size: int, may_repeat: bool = True
    ) -> None:
        """may_repeat: False: steps are never repeated, even by a model that could."""
        self._kv_cache, self._batch, self._may_repeat = kv_cache, batch, may_repeat
        self.use(model)
        self._prompt_rows_at_once = max(1, PROMPT_LOGITS_BYTES // (4 * vocab_size))
        self._began_s = self._ended_s = 0.0  # of the current forward pass

    def use(self, model: Model) -> None:
        """Replaces the model from the next step on. The rows stay as they are."""
        self._model = model
        self._repeats = model if isinstance(model, RepeatingModel) and self._may_repeat else None
        self._repeating: RepeatedDecode | None = None  # set after a decode whose tokens the model chose

    def step(self, plan: StepPlan) -> StepResult:
        """Runs one step. Plans must come in the core's order, as each step builds on the state of the previous ones.

        A row whose logits are not finite becomes a RowFailure; any exception ends the engine.
        """
        if self._repeating is not None and self._repeating.goes_on(plan):
            return self._repeat(plan, self._repeating)
        batch, self._repeating = self._batch, None
        batch.apply(plan)
        if not len(plan.rows):
            return StepResult(step=plan.step, rows=np.zeros(0, np.int32), token_ids=np.zeros(0, np.int32))
        needs = batch.sampling.all_needs(plan.rows)
        drafts, masks = plan.get(Drafts), plan.get(TokenMasks)
        places = None if drafts is None else SampledPositions(plan, drafts)
        arrays = batch.arrays(plan, places, reads_logits=needs != 0 or masks is not None)
        rows = plan.rows[plan.sampled] if places is None else places.row_of
        draws = None
        if needs & Needs.RANDOM or masks is not None:
            num_tokens = batch.num_tokens[rows] if places is None else batch.num_tokens[rows] + places.nth
            draws = batch.sampling.draws(rows, num_tokens)
        changes_or_reports = needs & ~(Needs.RANDOM | Needs.TRUNCATION)
        if draws is not None and masks is not None and not changes_or_reports:
            draws = replace(draws, masks=masks)
        self._began_s = time.monotonic()
        computed = self._model.step(arrays, self._kv_cache, draws)
        self._ended_s = time.monotonic()
        if computed.chosen is None or changes_or_reports:
            return self._sample(plan, arrays, rows, computed, places)
        sampled = Sampled(computed.chosen.token_ids, find_problems(computed.chosen.best))
        if places is not None:
            return self._verified(plan, places, sampled)
        # Failed rows get a token too: a plan made before the failure was known may still compute them.
        batch.append_sampled(rows, sampled.token_ids)
        if self._repeats is not None and plan.total_tokens == len(rows) == len(plan.rows):
            self._repeating = RepeatedDecode(self._repeats, plan, batch.block_size)
        return self._result(plan, rows, sampled, (), _by_row(rows, sampled.problems))

    def _repeat(self, plan: StepPlan, repeating: RepeatedDecode) -> StepResult:
        batch = self._batch
        if plan.block_tables.size:
            batch.append_blocks(plan.block_tables, plan.block_ids)
        begun = repeating.begun_blocks(plan, batch.block_tables)
        self._began_s = time.monotonic()
        chosen = repeating.model.repeat(begun, plan.get(TokenMasks))
        self._ended_s = time.monotonic()
        sampled = Sampled(chosen.token_ids, find_problems(chosen.best))
        batch.append_repeated(plan.rows, sampled.token_ids)
        return self._result(plan, plan.rows, sampled, (), _by_row(plan.rows, sampled.problems))

    @torch.inference_mode()
    def _sample(
        self,
        plan: StepPlan,
        arrays: StepArrays,
        rows: np.ndarray,
        computed: StepLogits,
        places: SampledPositions | None,
    ) -> StepResult:
        """Samples for `rows` from their logits, and appends the tokens to the batch."""
        batch, logits, masks = self._batch, computed.sampled, plan.get(TokenMasks)
        problems: dict[int, str] = {}  # row -> why it failed
        prompt_logprobs: tuple[PromptLogprobRun, ...] = ()
        if batch.sampling.all_needs(plan.rows) & Needs.PROMPT_LOGPROBS:
            logits = logits.clone()
            prompt_logprobs = self._prompt_logprobs(plan, arrays, computed, problems)
            if problems and places is None:
                unharmed = ~np.isin(rows, list(problems))
                rows, logits = rows[unharmed], logits[torch.from_numpy(unharmed).to(logits.device)]
                masks = masks and masks.select(unharmed)
        sampled = Sampled(np.zeros(0, np.int32), {})
        if places is not None:
            sampled = sample(logits, batch, rows, batch.num_tokens[rows] + places.nth, masks)
            return self._verified(plan, places, sampled, prompt_logprobs, problems)
        if len(rows):
            sampled = sample(logits, batch, rows, masks=masks)
            batch.append_sampled(rows, sampled.token_ids)
        return self._result(plan, rows, sampled, prompt_logprobs, problems | _by_row(rows, sampled.problems))

    def _verified(
        self,
        plan: StepPlan,
        places: SampledPositions,
        sampled: Sampled,
        prompt_logprobs: tuple[PromptLogprobRun, ...] = (),
        problems: Mapping[int, str] = MappingProxyType({}),
    ) -> StepResult:
        """The result of a step with drafts: the tokens up to the first rejected draft, which are also appended to the
        batch.

        problems: rows that fail whatever was sampled for them, with the reason.
        """
        verified = verify(places, sampled, problems)
        self._batch.append_sampled(places.rows, verified.appended, verified.num_appended)
        return StepResult(
            step=plan.step,
            rows=verified.rows,
            token_ids=verified.token_ids,
            counts=verified.counts,
            logprob_indices=verified.logprob_indices,
            logprobs=verified.logprobs,
            prompt_logprobs=prompt_logprobs,
            failures=tuple(row_failure(row, why) for row, why in verified.problems.items()),
            began_s=self._began_s,
            ended_s=self._ended_s,
        )

    def _prompt_logprobs(
        self, plan: StepPlan, arrays: StepArrays, computed: StepLogits, problems: dict[int, str]
    ) -> tuple[PromptLogprobRun, ...]:
        """Logprobs of the prompt tokens that this step predicts: a position's logits predict the token after it."""
        batch, runs = self._batch, []
        for index in np.flatnonzero((batch.sampling.needs[plan.rows] & Needs.PROMPT_LOGPROBS) != 0):
            row, begin = int(plan.rows[index]), int(plan.num_computed_tokens[index])
            end = min(begin + int(plan.num_tokens[index]), int(batch.num_prompt_tokens[row]) - 1)
            offset = int(arrays.query_start[index]) - begin
            for first in range(batch.first_reported(row, begin), end, self._prompt_rows_at_once):
                last = min(first + self._prompt_rows_at_once, end)
                logits = computed.at(offset + first, offset + last)
                if not logits.amax(1).isfinite().all():
                    problems[row] = "the model's logits for the prompt are not finite: its computation overflowed"
                    break
                counts = np.full(last - first, batch.sampling.num_prompt_logprobs[row])
                tokens = batch.tokens[row, first + 1 : last + 1]
                try:
                    reported = logprob_rows(logits, tokens, counts)
                except Exception as error:  # caused by this row's tokens, so only this row fails
                    problems[row] = no_prompt_logprobs(error)
                    break
                runs.append(PromptLogprobRun(row=row, start=first + 1, rows=reported))
        return tuple(runs)

    def _result(
        self,
        plan: StepPlan,
        rows: np.ndarray,
        sampled: Sampled,
        prompt_logprobs: tuple[PromptLogprobRun, ...],
        problems: dict[int, str],
    ) -> StepResult:
        logprob_indices = sampled.logprob_indices
        token_ids = sampled.token_ids
        if sampled.problems:
            good = sampled.good
            rows, token_ids = rows[good], token_ids[good]
            if logprob_indices is not None:
                # Logprobs exist for good rows only, so indices drop by the number of failed rows before them.
                logprob_indices = (np.cumsum(good, dtype=np.int32) - 1)[logprob_indices].astype(np.int32)
        return StepResult(
            step=plan.step,
            rows=rows,
            token_ids=token_ids,
            logprob_indices=logprob_indices,
            logprobs=sampled.logprobs,
            prompt_logprobs=prompt_logprobs,
            failures=tuple(row_failure(row, why) for row, why in problems.items()),
            began_s=self._began_s,
            ended_s=self._ended_s,
        )


def _by_row(rows: np.ndarray, problems: dict[int, str]) -> dict[int, str]:
    return {int(rows[index]): why for index, why in problems.items()}
