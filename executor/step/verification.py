"""Verifies drafts: a row keeps the token sampled after its last known token, and after each accepted draft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.ipc.messages import LogprobRows
from headrace.ipc.step import Drafts, StepPlan, nth_of_each

if TYPE_CHECKING:
    from headrace.executor.sampling.sampler import Sampled


class SampledPositions:
    """The positions of a step at which tokens are sampled: one for each sampled row, and one after each of its drafts.

    `rows` [num_sampled] int32 are the plan's sampled rows. Every other array has one element per position, in order of
    rows, so `row_of` repeats a row that has drafts.
    """

    def __init__(self, plan: StepPlan, drafts: Drafts) -> None:
        self.rows = plan.rows[plan.sampled]
        self.num_places = drafts.counts[plan.sampled] + np.int32(1)  # [num_sampled] int32
        self.starts = np.cumsum(self.num_places, dtype=np.int32) - self.num_places  # [num_sampled]: each row's first
        self.row_of = np.repeat(self.rows, self.num_places)
        self.nth = nth_of_each(self.num_places).astype(np.int32)  # how many drafts come before the position
        self._drafts = drafts.token_ids

    def logits_indices(self, query_start: np.ndarray, sampled: np.ndarray) -> np.ndarray:
        """[num_places] int32: the index of the step's token that each position follows."""
        first = query_start[1:][sampled] - self.num_places
        return np.repeat(first, self.num_places) + self.nth

    def counts(self, token_ids: np.ndarray, unusable: np.ndarray | None = None) -> np.ndarray:
        """How many of each row's sampled tokens are kept, [num_sampled] int32.

        token_ids: [num_places], the sampled tokens; unusable: [num_places] bool, positions without a valid token. A row
        keeps the tokens before its first unusable position, which is sampled again in the next step; 0 tokens mean that
        it has failed.
        """
        has_next = np.ones(len(token_ids), bool)  # whether a draft follows
        has_next[self.starts + self.num_places - 1] = False
        is_last = ~has_next
        is_last[has_next] = token_ids[has_next] != self._drafts
        if unusable is not None:
            is_last |= unusable
        last = np.flatnonzero(is_last)
        last = last[np.searchsorted(last, self.starts)]
        counts = last - self.starts + 1
        if unusable is not None:
            counts -= unusable[last]
        return counts.astype(np.int32)

    def kept(self, counts: np.ndarray) -> np.ndarray:
        """[num_places] bool: whether a position's token is kept. counts: [num_sampled]."""
        kept: np.ndarray = self.nth < np.repeat(counts, self.num_places)
        return kept


@dataclass(frozen=True)
class Verified:
    """The result of a step with drafts, and the tokens that the batch must append. A failed row appends its first
    token, whatever that is: a plan made before the failure was known may compute it."""

    rows: np.ndarray  # [num_good] int32: the sampled rows without the failed ones
    token_ids: np.ndarray  # [num_new_tokens] int32
    counts: np.ndarray  # [num_good] int32, all >= 1
    logprob_indices: np.ndarray | None  # [num_logprob_rows] int32, ascending: indices into token_ids
    logprobs: LogprobRows | None
    problems: dict[int, str]
    """Row -> why it failed."""
    appended: np.ndarray
    num_appended: np.ndarray  # [num_sampled] int32


def verify(places: SampledPositions, sampled: Sampled, problems: Mapping[int, str]) -> Verified:
    """problems: row -> why it fails, whatever was sampled for it."""
    unusable = None
    if sampled.problems or problems:
        unusable = ~sampled.good | np.isin(places.row_of, list(problems))
    counts = places.counts(sampled.token_ids, unusable)
    failed = {
        int(places.rows[index]): problems.get(int(places.rows[index])) or sampled.problems[int(places.starts[index])]
        for index in np.flatnonzero(counts == 0)
    }
    kept, num_appended = places.kept(counts), np.maximum(counts, 1)
    indices, logprobs = sampled.logprob_indices, sampled.logprobs
    if indices is not None and logprobs is not None:
        # Logprobs exist only for positions without a problem.
        chosen = kept[indices]
        indices = (np.cumsum(kept, dtype=np.int32) - 1)[indices[chosen]].astype(np.int32) if chosen.any() else None
        logprobs = logprobs.select(chosen) if chosen.any() else None
    return Verified(
        rows=places.rows[counts > 0],
        token_ids=sampled.token_ids[kept],
        counts=counts[counts > 0],
        logprob_indices=indices,
        logprobs=logprobs,
        problems={**problems, **failed},
        appended=sampled.token_ids[places.kept(num_appended)],
        num_appended=num_appended,
    )
