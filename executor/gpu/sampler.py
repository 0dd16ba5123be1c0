"""From logits to tokens without the host: everything that a choice depends on is read from the device's state.

The shapes of all operations are known to the host beforehand, so that they can be captured in a graph and nothing
waits.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace import kernels
from headrace.executor.gpu.device_state import DeviceState, Staging
from headrace.executor.sampling.columns import Needs, has_penalties
from headrace.executor.sampling.token_rules import TokenRules
from headrace.executor.step.batch import BatchState
from headrace.ipc.messages import Sampling
from headrace.ipc.step import NewRow, TokenMasks
from headrace.kernels.reference.sampling import DeviceChosen, DeviceDraws, LogitChanges, Penalties, choose_tokens

logger = logging.getLogger(__name__)


class StepEnding(enum.IntEnum):
    """How a step ends, and which requests it serves. A higher one serves every request that a lower one serves."""

    ARGMAX = 0
    DRAW = 1
    """For greedy rows, and rows that draw from the whole vocabulary."""
    TRUNCATE = 2
    """Also for rows with top_k, top_p or min_p."""
    LOGITS = 3
    """The step ends with the logits, which are then changed, or from which logprobs are reported."""


def ending_for(needs: int) -> StepEnding:
    """needs: bits of `Needs`, the union over all rows."""
    if needs & ~int(Needs.RANDOM | Needs.TRUNCATION):  # int first: a flag's complement contains only known bits
        return StepEnding.LOGITS
    if needs & Needs.TRUNCATION:
        return StepEnding.TRUNCATE
    return StepEnding.DRAW if needs & Needs.RANDOM else StepEnding.ARGMAX


Choose = Callable[[Tensor, DeviceState, Tensor, Tensor, StepEnding], DeviceChosen]
"""Chooses the next token of each row from logits [num_rows, vocab_size] float32, which stay unchanged, for rows
[num_rows] int64 of the state at positions [num_rows] int64 of their sequences. LOGITS chooses like TRUNCATE."""


def chooser(device: torch.device, vocab_size: int) -> Choose:
    """Returns the `Choose` of this device: by its own kernel if there is one, else by the reference."""
    facts = {"device": device, "dtype": torch.float32, "vocab_size": vocab_size, "captured": True}
    return partial(choose_with, kernels.choose("choose_tokens", **facts))


def choose_with(
    op: Callable[[Tensor, DeviceDraws], DeviceChosen],
    logits: Tensor,
    state: DeviceState,
    rows: Tensor,
    positions: Tensor,
    ending: StepEnding,
) -> DeviceChosen:
    """A `Choose` by a version of the op `choose_tokens`."""
    may_draw, may_truncate = ending is not StepEnding.ARGMAX, ending > StepEnding.DRAW

    def of_rows(column: Tensor, is_read: bool) -> Tensor:
        """Does not gather a column that is not read, since each gather costs a launch."""
        return column[rows] if is_read else column[: len(rows)]

    draws = DeviceDraws(
        temperature=of_rows(state.temperature, may_draw),
        top_k=of_rows(state.top_k, may_truncate),
        top_p=of_rows(state.top_p, may_truncate),
        min_p=of_rows(state.min_p, may_truncate),
        seed=of_rows(state.seed, may_draw),
        position=positions,
        may_draw=may_draw,
        may_truncate=may_truncate,
    )
    chosen = op(logits, draws)
    return DeviceChosen(chosen.token_ids.int(), chosen.best)


choose: Choose = partial(choose_with, choose_tokens)
"""Uses the reference version of the op."""


class TokenStates:
    """Which tokens of the vocabulary each running request may use and has used, on the device, one row per request.

    Bits, 32 to an int32 word, mark the tokens that are allowed, in the prompt and in the output. How often a token is
    in the output matters only to a frequency penalty: these counts take 32 times as much memory, and are allocated only
    when a request needs them. No memory is reserved for them; if there is none left, the host must choose.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self._num_words = vocab_size, -(-vocab_size // 32)
        self.bits = torch.zeros(3, num_rows + 1, self._num_words, dtype=torch.int32, device=device)
        self.allowed_bits, self.prompt_bits, self.output_bits = self.bits
        self.allowed_bits.fill_(-1)
        self.counts: Tensor | None = None  # [num_rows + 1, vocab_size] int32
        self.lacks_counts = False
        """A request needed the counts, and there was no memory for them."""
        self._limited: set[int] = set()  # rows whose allowed bits are not all ones
        self._bit = 1 << torch.arange(32, dtype=torch.int32, device=device)
        self._adjust = kernels.choose("adjust_logits", device=device, dtype=torch.float32)

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes + (self.counts.nbytes if self.counts is not None else 0)

    def enter(self, new: NewRow, sampling: Sampling, rules: TokenRules | None, staging: Staging) -> None:
        """Enters a request that is assigned a row, with the tokens known so far."""
        row = new.row
        if rules is not None and len(rules.allowed):
            self._limited.add(row)
            self._set_bits(self.allowed_bits[row], rules.allowed, staging)
        elif row in self._limited:
            self._limited.remove(row)
            self.allowed_bits[row].fill_(-1)
        if not has_penalties(sampling):
            return
        prompt, output = np.split(np.asarray(new.token_ids, np.int32), [new.num_prompt_tokens])
        self._set_bits(self.prompt_bits[row], prompt, staging)
        self._set_bits(self.output_bits[row], output, staging)
        if sampling.frequency_penalty and self._has_counts():
            assert self.counts is not None, "it has just been asked"
            self.counts[row].zero_()
            if len(output):
                (ids,) = staging.send(output)
                self.counts[row].index_add_(0, ids.long(), torch.ones_like(ids))

    def add(self, rows: Tensor, token_ids: Tensor) -> None:
        """Records one more output token, token_ids [n] int64, for each of rows [n] int64, which are distinct."""
        words = self.output_bits.view(-1)
        words[rows * self._num_words + token_ids // 32] |= self._bit[token_ids % 32]
        if self.counts is not None:
            ones = torch.ones_like(token_ids, dtype=torch.int32)
            self.counts.view(-1).index_add_(0, rows * self.vocab_size + token_ids, ones)

    def adjust(self, logits: Tensor, state: DeviceState, rows: Tensor, changes: Changes) -> None:
        """Applies allowed tokens and penalties in place.

        logits: [num_rows, vocab_size] float32; rows: [num_rows] int64.
        """
        if not (changes.limited or changes.penalised):
            return
        penalties = Penalties(
            prompt_bits=self.prompt_bits,
            output_bits=self.output_bits,
            output_counts=self.counts if changes.counted else None,
            repetition=state.repetition_penalty,
            frequency=state.frequency_penalty,
            presence=state.presence_penalty,
        )
        # Penalties are always combined with the allowed bits, which are cheap to read: one kernel less to compile.
        self._adjust(logits, LogitChanges(rows, self.allowed_bits, penalties if changes.penalised else None))

    def mask(self, logits: Tensor, masks: TokenMasks, staging: Staging) -> None:
        """Forbids, in place, what masks do not allow; their positions are rows of logits [num_rows, vocab_size]."""
        mask_of = np.zeros(len(logits), np.int64)  # mask 0, which is sent before the others, allows everything
        mask_of[masks.positions] = np.arange(1, 1 + len(masks.positions))
        rows, bits = staging.send(mask_of, np.concatenate((np.full(self._num_words, -1, np.int32), masks.bits)))
        self._adjust(logits, LogitChanges(rows.view(torch.int64), bits.view(-1, self._num_words)))

    def visit_counted(self, logits: Tensor, state: DeviceState, rows: Tensor) -> None:
        """Runs `adjust` with counts for one row, which must be row 0."""
        assert self.counts is None, "no request has come"
        self.counts = torch.zeros(1, self.vocab_size, dtype=torch.int32, device=logits.device)
        self.adjust(logits, state, rows, Changes(limited=True, penalised=True, counted=True))
        self.counts = None

    def changes(self, batch: BatchState, rows: np.ndarray) -> Changes:
        """The changes that `rows` [num_rows] need."""
        penalised = bool(batch.sampling.all_needs(rows) & Needs.PENALTIES)
        return Changes(
            limited=not self._limited.isdisjoint(rows.tolist()),
            penalised=penalised,
            counted=penalised and bool(batch.sampling.frequency_penalty[rows].any()),
        )

    def _set_bits(self, row: Tensor, token_ids: np.ndarray, staging: Staging) -> None:
        if not len(token_ids):
            row.zero_()
            return
        flags = np.zeros(self._num_words * 32, bool)
        flags[token_ids] = True
        (words,) = staging.send(np.packbits(flags, bitorder="little").view(np.int32))
        row.copy_(words)

    def _has_counts(self) -> bool:
        if self.counts is None and not self.lacks_counts:
            shape = (self.bits.shape[1], self.vocab_size)
            try:
                self.counts = torch.zeros(shape, dtype=torch.int32, device=self.bits.device)
            except torch.OutOfMemoryError:
                self.lacks_counts = True
                logger.warning(
                    "no memory for the counts of frequency penalties, %d bytes: tokens of requests with one are chosen "
                    "by the host, which is slow; lower gpu_memory_utilization",
                    4 * shape[0] * shape[1],
                )
        return self.counts is not None


class Changes(NamedTuple):
    """Which changes of logits that depend on all tokens a step's rows need."""

    limited: bool
    """Some row has a set of allowed tokens."""
    penalised: bool
    """Some row has penalties."""
    counted: bool
    """Some row has a frequency penalty."""
