"""From sampled tokens to a step's result, on every device."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
import numpy as np

from headrace.executor.sampling.sampler import Sampled, row_failure
from headrace.executor.step.prompt_logprobs import PromptReport
from headrace.executor.step.verification import SampledPositions
from headrace.ipc.messages import LogprobRows
from headrace.ipc.step import PromptLogprobRun, StepPlan, StepResult, select_logprobs


class AddedTokens(msgspec.Struct, frozen=True):
    """The tokens that a step adds to its sampled rows. A failed row gets one too, whatever it is: a plan made before
    the failure was known may still compute it."""

    rows: np.ndarray  # [num_sampled] int32, in the plan's order
    token_ids: np.ndarray  # [num_new_tokens] int32, row after row
    counts: np.ndarray | None  # [num_sampled] int32, all >= 1; None: one each
    problems: dict[int, str]
    """Row -> why it failed."""
    logprob_indices: np.ndarray | None = None  # [num_logprob_rows] int32, ascending: indices into token_ids
    logprobs: LogprobRows | None = None

    @classmethod
    def one_each(cls, rows: np.ndarray, sampled: Sampled) -> AddedTokens:
        problems = sampled.problems and {int(rows[index]): why for index, why in sampled.problems.items()}
        return cls(rows, sampled.token_ids, None, problems, sampled.logprob_indices, sampled.logprobs)

    @classmethod
    def verified(cls, positions: SampledPositions, sampled: Sampled) -> AddedTokens:
        """Of a step with drafts: the tokens up to each row's first rejected draft. A row keeps the tokens before its
        first position with a problem; it has failed if that is its first position."""
        counts = positions.counts(sampled.token_ids, ~sampled.good if sampled.problems else None)
        num_new = np.maximum(counts, np.int32(1))
        kept = positions.kept(num_new)
        indices, logprobs = select_logprobs(sampled.logprob_indices, sampled.logprobs, kept)
        problems = {
            int(positions.rows[index]): sampled.problems[int(positions.starts[index])]
            for index in np.flatnonzero(counts == 0)
        }
        return cls(positions.rows, sampled.token_ids[kept], num_new, problems, indices, logprobs)

    def without(self, rows: Collection[int]) -> AddedTokens:
        """Without the tokens and logprobs of these rows."""
        stays = ~np.isin(self.rows, list(rows))
        kept = stays if self.counts is None else np.repeat(stays, self.counts)
        indices, logprobs = select_logprobs(self.logprob_indices, self.logprobs, kept)
        return AddedTokens(
            rows=self.rows[stays],
            token_ids=self.token_ids[kept],
            counts=None if self.counts is None else self.counts[stays],
            problems=self.problems,
            logprob_indices=indices,
            logprobs=logprobs,
        )


def assemble(
    plan: StepPlan, new: AddedTokens, times_s: tuple[float, float], prompts: PromptReport | None = None
) -> StepResult:
    """times_s: when the forward pass began and ended. A row that failed, or whose prompt's logprobs did, becomes a
    RowFailure."""
    runs: tuple[PromptLogprobRun, ...] = ()
    problems = new.problems
    if prompts is not None:
        runs = prompts.finish()
        problems = problems | prompts.problems
    if problems:
        new = new.without(problems)
    return StepResult(
        step=plan.step,
        rows=new.rows,
        token_ids=new.token_ids,
        counts=new.counts,
        logprob_indices=new.logprob_indices,
        logprobs=new.logprobs,
        prompt_logprobs=runs,
        failures=tuple(row_failure(row, why) for row, why in problems.items()),
        began_s=times_s[0],
        ended_s=times_s[1],
    )


NOTHING = np.zeros(0, np.int32)


def empty_result(plan: StepPlan) -> StepResult:
    """The result of a step that samples nothing, or of a stage that is not the last."""
    return StepResult(step=plan.step, rows=NOTHING, token_ids=NOTHING)
