"""Verifies drafts: a row keeps the token sampled after its last known token, and after each accepted draft."""

from __future__ import annotations

import numpy as np

from headrace.ipc.step import Drafts, StepPlan, nth_of_each


class SampledPositions:
    """The positions of a step at which tokens are sampled: one for each sampled row, and one after each of its drafts.

    `rows` [num_sampled] int32 are the plan's sampled rows. Every other array has one element per position, in order of
    rows, so `row_of` repeats a row that has drafts.
    """

    def __init__(self, plan: StepPlan, drafts: Drafts) -> None:
        self.rows = plan.rows[plan.sampled]
        self.num_positions = drafts.counts[plan.sampled] + np.int32(1)  # [num_sampled] int32
        ends = np.cumsum(self.num_positions, dtype=np.int32)
        self.starts = ends - self.num_positions  # [num_sampled]: each row's first
        self.row_of = np.repeat(self.rows, self.num_positions)
        self.nth = nth_of_each(self.num_positions).astype(np.int32)  # how many drafts come before the position
        self._drafts = drafts.token_ids

    def logits_indices(self, query_start: np.ndarray, sampled: np.ndarray) -> np.ndarray:
        """[num_positions] int32: the index of the step's token that each position follows."""
        first = query_start[1:][sampled] - self.num_positions
        return np.repeat(first, self.num_positions) + self.nth

    def counts(self, token_ids: np.ndarray, unusable: np.ndarray | None = None) -> np.ndarray:
        """How many of each row's sampled tokens are kept, [num_sampled] int32.

        token_ids: [num_positions], the sampled tokens; unusable: [num_positions] bool, positions without a valid token.
        A row keeps the tokens before its first unusable position, which is sampled again in the next step; 0 tokens
        mean that it has failed.
        """
        has_next = np.ones(len(token_ids), bool)  # whether a draft follows
        has_next[self.starts + self.num_positions - 1] = False
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
        """[num_positions] bool: whether a position's token is kept. counts: [num_sampled]."""
        kept: np.ndarray = self.nth < np.repeat(counts, self.num_positions)
        return kept
