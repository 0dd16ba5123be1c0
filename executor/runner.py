"""The model runner: a StepPlan becomes tensors, a forward pass, sampled tokens, and a StepResult."""

from __future__ import annotations

import os
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.executor.batch import BatchState, Needs, StepArrays
from headrace.executor.inputs import StepLogits
from headrace.executor.logprobs import logprob_rows
from headrace.executor.sampler import Sampled, sample
from headrace.ipc.failure import Failure
from headrace.ipc.step import PromptLogprobRun, RowFailure, StepPlan, StepResult

PROMPT_LOGITS_BYTES = 1 << 27
"""Logits of prompt positions are made for about this many bytes at a time: a whole chunk's could dwarf the model."""


class Model(Protocol):
    """What the runner asks of a model; `executor.decoder.Decoder` is one, `executor.cpu_decoder.CpuDecoder` another."""

    def step(self, arrays: StepArrays, kv_cache: Any) -> StepLogits:
        """Writes the tokens' keys and values into the cache, and gives the logits of `arrays.logits_indices`."""


class ModelRunner:
    """Owns the batch state; borrows the model and its cache. Used from one thread."""

    def __init__(self, model: Model, kv_cache: Any, batch: BatchState, *, vocab_size: int) -> None:
        self._model, self._kv_cache, self._batch = model, kv_cache, batch
        self._prompt_rows_at_once = max(1, PROMPT_LOGITS_BYTES // (4 * vocab_size))

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Runs one step. Plans must come in the core's order, as each changes the state the next builds on.

        A row whose logits are not finite becomes a RowFailure; any exception ends the engine.
        """
        batch = self._batch
        batch.apply(plan)
        if not len(plan.rows):
            return StepResult(step=plan.step, rows=np.zeros(0, np.int32), token_ids=np.zeros(0, np.int32))
        arrays = batch.arrays(plan)
        computed = self._model.step(arrays, self._kv_cache)
        rows, logits = plan.rows[plan.sampled], computed.sampled

        problems: dict[int, str] = {}  # row -> why it failed
        prompt_logprobs: tuple[PromptLogprobRun, ...] = ()
        if (batch.sampling.needs[plan.rows] & Needs.PROMPT_LOGPROBS).any():
            logits = logits.clone()
            prompt_logprobs = self._prompt_logprobs(plan, arrays, computed, problems)
            if problems:
                unharmed = ~np.isin(rows, list(problems))
                rows, logits = rows[unharmed], logits[torch.from_numpy(unharmed).to(logits.device)]
        sampled = self._sample(rows, logits)
        problems.update((int(rows[index]), why) for index, why in sampled.problems.items())
        return self._result(plan, rows, sampled, prompt_logprobs, problems)

    def _prompt_logprobs(
        self, plan: StepPlan, arrays: StepArrays, computed: StepLogits, problems: dict[int, str]
    ) -> tuple[PromptLogprobRun, ...]:
        """Runs for the prompt tokens that this step predicts: a position's logits tell of the token after it."""
        batch, runs = self._batch, []
        for index in np.flatnonzero((batch.sampling.needs[plan.rows] & Needs.PROMPT_LOGPROBS) != 0):
            row, begin = int(plan.rows[index]), int(plan.num_computed_tokens[index])
            end = min(begin + int(plan.num_tokens[index]), int(batch.num_prompt_tokens[row]) - 1)
            offset = int(arrays.query_start[index]) - begin
            for first in range(begin, end, self._prompt_rows_at_once):
                last = min(first + self._prompt_rows_at_once, end)
                logits = computed.at(offset + first, offset + last)
                if not logits.amax(1).isfinite().all():
                    problems[row] = "the model's logits for the prompt are not finite: its computation overflowed"
                    break
                counts = np.full(last - first, batch.sampling.num_prompt_logprobs[row])
                tokens = batch.tokens[row, first + 1 : last + 1]
                runs.append(PromptLogprobRun(row=row, start=first + 1, rows=logprob_rows(logits, tokens, counts)))
        return tuple(runs)

    def _sample(self, rows: np.ndarray, logits: Tensor) -> Sampled:
        """Samples for `rows` from their logits, and appends the tokens to the batch."""
        if not len(rows):
            return Sampled(np.zeros(0, np.int32), {})
        sampled = sample(logits, self._batch, rows)
        # Failed rows get some token too: a plan made before the failure was known may still compute them.
        self._batch.append_sampled(rows, sampled.token_ids)
        return sampled

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
                # The rows of logprobs are of good ones only; they move up past the failed ones before them.
                logprob_indices = (np.cumsum(good, dtype=np.int32) - 1)[logprob_indices].astype(np.int32)
        return StepResult(
            step=plan.step,
            rows=rows,
            token_ids=token_ids,
            logprob_indices=logprob_indices,
            logprobs=sampled.logprobs,
            prompt_logprobs=prompt_logprobs,
            failures=tuple(_failure(row, why) for row, why in problems.items()),
        )


def _failure(row: int, why: str) -> RowFailure:
    failure = Failure(message=f"the request cannot go on: {why}", type="SamplingError", pid=os.getpid(), phase="step")
    return RowFailure(row=row, failure=failure)
