"""A step's new tokens, up to where they end their requests: by an end-of-sequence or stop token, by length, or because
the form that the answer has to have is complete."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headrace.core.schedule.grammar_masks import Followed, GrammarMasks
from headrace.core.schedule.requests import RowTable
from headrace.ipc.step import StepResult, nth_of_each


class NewTokens(NamedTuple):
    """A result's tokens; all are [num_tokens] but for counts."""

    row_of: np.ndarray
    num_tokens: np.ndarray  # how many its row has with it
    token_ids: np.ndarray
    counts: np.ndarray | None  # [num_rows]: of each row; None: one each
    ends: np.ndarray  # its request
    stops: np.ndarray  # ends it, and not for its length
    is_stop_token: np.ndarray  # one of the request's own
    completes: np.ndarray  # the form that the answer has to have
    problems: dict[int, str]  # index of a token with which its row cannot go on -> why
    kept: np.ndarray | None = None  # of the result's tokens, which these are; None: all

    def up_to_first_end(self, counts: np.ndarray) -> NewTokens:
        """Without what follows an end in the same row."""
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
    grammars: GrammarMasks | None,
    followed: Followed | None = None,
) -> NewTokens:
    """A result's tokens up to where they end their requests. known: [num_rows], tokens of each row before.

    followed: what the grammars say of the tokens, where they have been asked."""
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
    if grammars is not None:
        completes, problems = followed or grammars.take(table, row_of, token_ids, ends)
        completes &= ~stops  # an end-of-sequence token completes a form too, and is no part of it
        stops |= completes
        ends |= completes
        ends[list(problems)] = True
    new = NewTokens(row_of, num_tokens, token_ids, counts, ends, stops, is_stop_token, completes, problems)
    return new if counts is None else new.up_to_first_end(counts)
