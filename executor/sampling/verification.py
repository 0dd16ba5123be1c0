"""Which drafts were right: a row keeps what was sampled after its last known token, and after each right draft."""

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
    """The places of a step's plan that tokens are sampled for: of each sampled row one, and one after each draft.

    `rows` [num_sampled] int32 are the plan's sampled rows; every other array has one element for each place, a row's
    places in order, so that `row_of` repeats a row that has drafts.
    """

    def __init__(self, plan: StepPlan, drafts: Drafts) -> None:
        self.rows = plan.rows[plan.sampled]
        self.num_places = drafts.counts[plan.sampled] + np.int32(1)  # [num_sampled] int32
        self.starts = np.cumsum(self.num_places, dtype=np.int32) - self.num_places  # [num_sampled]: each row's first
        self.row_of = np.repeat(self.rows, self.num_places)
        self.nth = nth_of_each(self.num_places).astype(np.int32)  # how many drafts come before the place
        self._drafts = drafts.token_ids

    def logits_indices(self, query_start: np.ndarray, sampled: np.ndarray) -> np.ndarray:
        """[num_places] int32: which of the step's tokens each place follows."""
        first = query_start[1:][sampled] - self.num_places
        return np.repeat(first, self.num_places) + self.nth

    def counts(self, token_ids: np.ndarray, unusable: np.ndarray | None = None) -> np.ndarray:
        """How many of a row's sampled tokens count, [num_sampled] int32.

        token_ids: [num_places], what was sampled; unusable: [num_places] bool, places that nothing could be sampled
        for. A row whose first place is one has count 0; at a later one it ends before that, and begins there next time.
        """
        has_next = np.ones(len(token_ids), bool)  # a draft follows
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
        """[num_places] bool: the places that count. counts: [num_sampled]."""
        kept: np.ndarray = self.nth < np.repeat(counts, self.num_places)
        return kept


@dataclass(frozen=True)
class Verified:
    """What a step with drafts brings, and what the batch is to take in: of a failed row its first token, whatever that
    is, as a plan made before the failure was known may compute it."""

    rows: np.ndarray  # [num_good] int32: the sampled rows, less the failed ones
    token_ids: np.ndarray  # [num_new_tokens] int32
    counts: np.ndarray  # [num_good] int32, all >= 1
    logprob_indices: np.ndarray | None  # [num_logprob_rows] int32, ascending: indices into token_ids
    logprobs: LogprobRows | None
    problems: dict[int, str]
    """Row -> why it failed."""
    appended: np.ndarray
    num_appended: np.ndarray  # [num_sampled] int32


def verify(places: SampledPositions, sampled: Sampled, problems: Mapping[int, str]) -> Verified:
    """problems: why rows failed whatever was sampled for them, by row."""
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
        # The rows of logprobs are of places without a problem only.
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
