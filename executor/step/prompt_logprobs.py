"""The log-probabilities of prompt tokens that a step reports: a position's logits predict the token after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from headrace.executor.sampling.columns import Needs
from headrace.executor.sampling.logprobs import logprob_rows, no_prompt_logprobs
from headrace.executor.step.batch import BatchState
from headrace.ipc.messages import LogprobRows
from headrace.ipc.step import PromptLogprobRun, StepPlan

PROMPT_LOGITS_BYTES = 1 << 27
"""Logits of prompt positions are computed in pieces of about this size: a whole chunk's could dwarf the model."""
NOT_FINITE = "the model's logits for the prompt are not finite: its computation overflowed"


class PromptPiece(NamedTuple):
    """Adjacent tokens of one prompt whose logprobs a step reports."""

    row: int
    start: int
    """Position of the first of these tokens."""
    first: int
    """The step's tokens [first, last) are the ones before them, whose logits predict them."""
    last: int
    token_ids: np.ndarray  # [last - first] int32
    counts: np.ndarray  # [last - first]: how many top tokens the request asked for


class PieceLogprobs(Protocol):
    """The logprobs of a piece, which may be on their way to the host until the step is done."""

    @property
    def finite(self) -> bool:
        """Whether all logits were finite."""

    def rows(self) -> LogprobRows: ...


class HostLogprobs:
    """The logprobs of a piece, computed at once: the logits' memory is used again."""

    def __init__(self, logits: Tensor, piece: PromptPiece) -> None:
        self.finite = bool(logits.amax(1).isfinite().all())
        self._rows = logprob_rows(logits, piece.token_ids, piece.counts) if self.finite else None

    def rows(self) -> LogprobRows:
        assert self._rows is not None, "only finite logprobs are read"
        return self._rows


class PromptReport:
    """The logprobs of a step's prompt tokens. An error that one row causes fails only that row."""

    def __init__(self) -> None:
        self.problems: dict[int, str] = {}
        """Row -> why its logprobs cannot be reported."""
        self.begun: list[tuple[int, int, PieceLogprobs]] = []
        """Row, position of the first reported token, and the logprobs, which may be on their way."""

    @classmethod
    def begin(
        cls,
        batch: BatchState,
        plan: StepPlan,
        query_start: np.ndarray,
        vocab_size: int,
        logits_at: Callable[[int, int], Tensor],
        logprobs_of: Callable[[Tensor, PromptPiece], PieceLogprobs] = HostLogprobs,
    ) -> PromptReport:
        """logits_at: (first, last) -> the logits of the step's tokens [first, last)."""
        report = cls()
        for piece in _pieces(batch, plan, query_start, vocab_size):
            logits = logits_at(piece.first, piece.last)  # whatever has failed, as other ranks take part in it
            if piece.row in report.problems:
                continue
            try:
                report.begun.append((piece.row, piece.start, logprobs_of(logits, piece)))
            except Exception as error:
                report.problems[piece.row] = no_prompt_logprobs(error)
        return report

    def finish(self) -> tuple[PromptLogprobRun, ...]:
        """The logprobs, once the step is done; adds to `problems`."""
        runs: list[PromptLogprobRun] = []
        for row, start, logprobs in self.begun:
            if row in self.problems:
                continue
            if not logprobs.finite:
                self.problems[row] = NOT_FINITE
                continue
            try:
                runs.append(PromptLogprobRun(row=row, start=start, rows=logprobs.rows()))
            except Exception as error:
                self.problems[row] = no_prompt_logprobs(error)
        return tuple(runs)


def _pieces(batch: BatchState, plan: StepPlan, query_start: np.ndarray, vocab_size: int) -> Iterator[PromptPiece]:
    at_once = max(1, PROMPT_LOGITS_BYTES // (4 * vocab_size))
    for index in np.flatnonzero((batch.sampling.needs[plan.rows] & Needs.PROMPT_LOGPROBS) != 0):
        row, begin = int(plan.rows[index]), int(plan.num_computed_tokens[index])
        end = min(begin + int(plan.num_tokens[index]), int(batch.num_prompt_tokens[row]) - 1)
        offset = int(query_start[index]) - begin
        for first in range(batch.first_reported(row, begin), end, at_once):
            last = min(first + at_once, end)
            counts = np.full(last - first, batch.sampling.num_prompt_logprobs[row])
            tokens = batch.tokens[row, first + 1 : last + 1]
            yield PromptPiece(row, first + 1, offset + first, offset + last, tokens, counts)
