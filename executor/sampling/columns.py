"""The sampling parameters of the running requests as numpy arrays: one row each. Imports no torch, so that it can be
tested alone."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from headrace.core.options.model_options import LogprobsMode
from headrace.executor.sampling.draws import Draws
from headrace.executor.sampling.row_processors import Position, RowProcessor, kinds, processors_of
from headrace.executor.sampling.token_rules import TokenRules, rules_of
from headrace.ipc.messages import Generate, Sampling
from headrace.ipc.step import NewRow, TokenMasks

if TYPE_CHECKING:
    from headrace.executor.sampling.logits_processors import LogitsProcessors
    from headrace.executor.sampling.penalties import TokenCounts

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy, as in vLLM."""


class Needs(enum.IntFlag):
    """What a request's sampling parameters need beyond an argmax."""

    RANDOM = 1
    TRUNCATION = 2
    """top_k, top_p or min_p; only with RANDOM."""
    PENALTIES = 4
    MIN_TOKENS = 8
    LOGPROBS = 16
    PROMPT_LOGPROBS = 32
    TOKEN_RULES = 64
    """allowed_token_ids, bad_words or logit_bias."""
    BAD_WORDS = 128
    """Bad words of several tokens, which depend on the tokens before; only with TOKEN_RULES."""
    PROCESSORS = 256
    """One or more of `sampling/row_processors`."""
    LOGITS_PROCESSORS = 512
    """Set for every row where the engine has logits processors (sampling/logits_processors.py)."""
    OTHER_LOGPROBS = 1024
    """Set with LOGPROBS where the engine's logprobs_mode is not raw_logprobs."""


ON_HOST_ALONE = int(Needs.PROCESSORS | Needs.LOGITS_PROCESSORS | Needs.OTHER_LOGPROBS)
"""Needs that only the host's sampler computes, whatever the device."""
CHANGES = int(Needs.PENALTIES | Needs.MIN_TOKENS | Needs.TOKEN_RULES | Needs.PROCESSORS | Needs.LOGITS_PROCESSORS)
"""Needs that change logits before a token is chosen."""


class SamplingColumns:
    """Sampling parameters by row (`executor.step.columns.RowColumns`). A freed row needs nothing, and keeps its other
    values until a new request is entered."""

    def __init__(self, num_rows: int, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self.needs = np.zeros(num_rows, np.uint16)
        """Bits of `Needs`."""
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_p = np.ones(num_rows, np.float64)
        self.top_k = np.zeros(num_rows, np.int64)
        """0 keeps the whole vocabulary."""
        self.min_p = np.zeros(num_rows, np.float64)
        self.presence_penalty = np.zeros(num_rows, np.float32)
        self.frequency_penalty = np.zeros(num_rows, np.float32)
        self.repetition_penalty = np.ones(num_rows, np.float32)
        self.seed = np.zeros(num_rows, np.uint64)
        self.min_tokens = np.zeros(num_rows, np.int32)
        self.num_logprobs = np.full(num_rows, -2, np.int32)
        """-1 is the whole vocabulary, -2 no logprobs."""
        self.num_prompt_logprobs = np.full(num_rows, -2, np.int32)
        self.ending_token_ids: list[np.ndarray] = [np.zeros(0, np.int64)] * num_rows
        """What min_tokens forbids: end-of-sequence tokens and the request's own stop tokens."""
        self.params: list[Sampling | None] = [None] * num_rows
        """The parameters as received: rarely used ones are read from here and have no column."""
        self.rules: dict[int, TokenRules] = {}
        """Only for rows that need TOKEN_RULES."""
        self.processors: dict[int, tuple[RowProcessor, ...]] = {}
        """Only for rows that need PROCESSORS."""
        self.logprobs_mode: LogprobsMode = "raw_logprobs"
        self.logits_processors: LogitsProcessors | None = None
        self.entries: list[int] = [0] * num_rows
        """With logits processors, the number of the row's request, counted in the order of entry."""
        self._num_entered = 0
        kinds()  # imported now, so that the first request need not wait for it
        self.counts: dict[int, TokenCounts] = {}
        """Only for rows whose penalties are computed on the host."""

    def enter(self, new: NewRow) -> None:
        if isinstance(new.task, Generate):
            self.put(new.row, new.task.sampling, new.seed)

    def leave(self, rows: np.ndarray) -> None:
        self.needs[rows] = 0

    def put(self, row: int, sampling: Sampling, seed: int) -> None:
        """Enters a request's parameters. An error fails only this request, when its first token is due."""
        try:
            self._enter(row, sampling, seed)
        except MemoryError:  # the host is out of memory, which is not this request's error
            raise
        except Exception as error:
            self._enter(row, Sampling(max_tokens=1), seed)
            self.processors[row] = (InvalidSampling(error),)
            self.needs[row] |= Needs.PROCESSORS

    def _enter(self, row: int, sampling: Sampling, seed: int) -> None:
        self.counts.pop(row, None)
        self.params[row] = sampling
        self.temperature[row] = sampling.temperature
        self.top_p[row] = sampling.top_p
        self.top_k[row] = sampling.top_k
        self.min_p[row] = sampling.min_p
        self.presence_penalty[row] = sampling.presence_penalty
        self.frequency_penalty[row] = sampling.frequency_penalty
        self.repetition_penalty[row] = sampling.repetition_penalty
        self.seed[row] = seed & 0xFFFFFFFFFFFFFFFF
        self.min_tokens[row] = sampling.min_tokens
        self.num_logprobs[row] = -2 if sampling.logprobs is None else sampling.logprobs
        self.num_prompt_logprobs[row] = -2 if sampling.prompt_logprobs is None else sampling.prompt_logprobs
        self.ending_token_ids[row] = np.array([*self._eos_token_ids, *sampling.stop_token_ids], np.int64)
        self.needs[row] = _needs(sampling)
        self.rules.pop(row, None)
        if (rules := rules_of(sampling)) is not None:
            self.rules[row] = rules
            self.needs[row] |= Needs.TOKEN_RULES | (Needs.BAD_WORDS if rules.words_after else 0)
        self.processors.pop(row, None)
        if sampling.logprobs is not None and self.logprobs_mode != "raw_logprobs":
            self.needs[row] |= Needs.OTHER_LOGPROBS
        if self.logits_processors is not None:
            self._num_entered += 1
            self.entries[row] = self._num_entered
            self.needs[row] |= Needs.LOGITS_PROCESSORS
        if processors := processors_of(sampling):
            self.processors[row] = processors
            self.needs[row] |= Needs.PROCESSORS

    def all_needs(self, rows: np.ndarray) -> int:
        """Bits of `Needs`: the union over rows."""
        return int(np.bitwise_or.reduce(self.needs[rows]))

    def with_rules(self, rows: np.ndarray) -> list[tuple[int, int, TokenRules]]:
        """(index in rows, row, its rules) of the rows that have rules."""
        indices = np.flatnonzero((self.needs[rows] & Needs.TOKEN_RULES) != 0)
        return [
            (index, row, self.rules[row]) for index, row in zip(indices.tolist(), rows[indices].tolist(), strict=True)
        ]

    def draws(self, rows: np.ndarray, num_tokens: np.ndarray, masks: TokenMasks | None = None) -> Draws:
        """The parameters for drawing the next token of each of `rows`, each after num_tokens [num_rows] tokens."""
        is_random = (self.needs[rows] & Needs.RANDOM) != 0
        return Draws(
            temperature=self.temperature[rows] * is_random,
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
            position=num_tokens,
            masks=masks,
        )


class InvalidSampling(RowProcessor):
    """Stands in for sampling parameters that could not be entered; fails the row with their error."""

    only_random = False

    def __init__(self, cause: Exception) -> None:
        self._cause = cause

    def change(self, logits: np.ndarray, at: Position) -> None:
        raise ValueError(f"its sampling parameters cannot be used: {type(self._cause).__name__}: {self._cause}")


def _needs(sampling: Sampling) -> Needs:
    needs = Needs(0)
    if sampling.temperature >= GREEDY_BELOW:
        needs |= Needs.RANDOM
        if sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0:
            needs |= Needs.TRUNCATION
    if has_penalties(sampling):
        needs |= Needs.PENALTIES
    if sampling.min_tokens > 0:
        needs |= Needs.MIN_TOKENS
    if sampling.logprobs is not None:
        needs |= Needs.LOGPROBS
    if sampling.prompt_logprobs is not None:
        needs |= Needs.PROMPT_LOGPROBS
    return needs


def has_penalties(sampling: Sampling) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1)


class SampledRows(Protocol):
    """What samplers read of the running requests, one row each. `step.batch.BatchState` implements it."""

    tokens: np.ndarray  # [num_rows, max_model_len] int32
    num_tokens: np.ndarray  # [num_rows] int32: how many of `tokens` are known
    num_prompt_tokens: np.ndarray  # [num_rows] int32
    sampling: SamplingColumns
