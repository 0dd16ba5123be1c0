"""Finds which of a step's new tokens end their requests: by an end-of-sequence or stop token, by length, or because a
step feature says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from headrace.core.schedule.features.feature import Followed
from headrace.core.schedule.requests import RowTable
from headrace.ipc.step import StepResult, nth_of_each


class NewTokens(NamedTuple):
    """A result's tokens. Arrays are [num_tokens] unless they say otherwise; masks are bool."""

    row_of: np.ndarray  # the row of each token
    num_tokens: np.ndarray  # number of the row's tokens up to and including this one
    token_ids: np.ndarray
    counts: np.ndarray | None  # [num_rows]: new tokens of each row; None: one each
    ends: np.ndarray  # the token ends its request
    stops: np.ndarray  # the token ends its request for another reason than its length
    is_stop_token: np.ndarray  # the token is in the request's stop_token_ids
    completes: np.ndarray  # the token completes its row's answer
    problems: dict[int, str]  # index of a token after which its row cannot continue -> reason
    kept: np.ndarray | None = None  # [num_tokens_of_the_result]: which of the result's tokens these are; None: all

    def up_to_first_end(self, counts: np.ndarray) -> NewTokens:
        """Drops the tokens that follow an end in the same row. counts: [num_rows]."""
        starts = np.cumsum(counts) - counts
        num_before = np.cumsum(self.ends) - self.ends
        kept = num_before == np.repeat(num_before[starts], counts)
        if kept.all():
            return self
        return NewTokens(
            row_of=self.row_of[kept],
            num_tokens=self.num_tokens[kept],
            token_ids=self.token_ids[kept],
            counts=np.add.reduceat(kept, starts, dtype=counts.dtype),
            ends=self.ends[kept],
            stops=self.stops[kept],
            is_stop_token=self.is_stop_token[kept],
            completes=self.completes[kept],
            problems={int(kept[:index].sum()): why for index, why in self.problems.items()},
            kept=kept,
        )


def new_tokens(
    result: StepResult,
    known: np.ndarray,
    table: RowTable,
    is_eos: np.ndarray,
    follow: Callable[[np.ndarray, np.ndarray, np.ndarray], Followed | None],
) -> NewTokens:
    """A result's tokens up to the first that ends its request. known: [num_rows], known tokens of each row before.

    follow: which tokens complete their row's answer, or cannot be continued (`StepFeature.follow`)."""
    row_of, token_ids, counts = result.rows, result.token_ids, result.counts
    num_tokens = known + 1
    if counts is not None:
        row_of, num_tokens = np.repeat(row_of, counts), np.repeat(num_tokens, counts) + nth_of_each(counts)
    may_stop = num_tokens > table.min_tokens_total[row_of]
    stops = may_stop & table.stops_at_eos[row_of] & is_eos[token_ids]
    is_stop_token = np.zeros(len(token_ids), bool)
    for index in (table.has_stop_token_ids[row_of] & may_stop & ~stops).nonzero()[0].tolist():
        request = table.requests[row_of[index]]
        is_stop_token[index] = request is not None and int(token_ids[index]) in request.stop_token_ids
    stops |= is_stop_token
    ends = stops | (num_tokens >= table.max_tokens_total[row_of])
    completes, problems = np.zeros(len(token_ids), bool), dict[int, str]()
    followed = follow(row_of, token_ids, ends)
    if followed is not None:
        completes, problems = followed
        is_mark = stops | is_eos[token_ids]  # completes an answer even with ignore_eos, but is no part of the answer
        stops |= completes
        ends |= completes
        completes &= ~is_mark
        ends[list(problems)] = True
    new = NewTokens(row_of, num_tokens, token_ids, counts, ends, stops, is_stop_token, completes, problems)
    return new if counts is None else new.up_to_first_end(counts)
