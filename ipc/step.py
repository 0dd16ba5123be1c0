"""What a core and its executor say to each other: a `StepPlan` down, a `StepResult` up. Needs numpy.

A request lives in a `row` of the batch from admission until it finishes or is preempted; rows are reused. New
(or resumed) requests are sent in full, running ones as deltas, so the executor keeps its own copy of each
row's tokens, block table and sampling parameters. Only the core decides; the executor never frees or reorders.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec
import numpy as np

from headrace.ipc.failure import Failure
from headrace.ipc.messages import ExpertBalance, LogprobRows, Sampling


class NewRow(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A request entering a row: everything about it."""

    row: int
    token_ids: np.ndarray
    """[num_tokens] int32: the prompt, and for a resumed request the tokens it had generated"""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Leading tokens whose keys and values are in the cache already."""
    block_ids: np.ndarray
    """[num_groups * num_blocks] int32: its block tables so far, one cache group's after another's, this step's blocks
    included; 0 where a sliding window has passed"""
    sampling: Sampling
    seed: int
    """The resolved 64-bit seed, never None."""


class Drafts(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """Guessed tokens, which rows compute after their last known one so that a step may bring several.

    A row with drafts is sampled from after its last known token and after each draft, and keeps what it sampled as long
    as the draft before it was right: at least one token, at most one more than it has drafts. Keys and values of wrong
    drafts are worthless; those positions are computed anew.
    """

    counts: np.ndarray
    """[num_scheduled] int32: how many of each row's tokens in the plan, the last ones, are drafts; only sampled rows
    have any"""
    token_ids: np.ndarray
    """[sum of counts] int32, row after row"""


class LaterWords:
    """An array that is made when it is first asked for, which is while a device runs the model that it was given."""

    def __init__(self, make: Callable[[], np.ndarray]) -> None:
        self._make = make

    @functools.cached_property
    def value(self) -> np.ndarray:
        return self._make()


class TokenMasks(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """Which tokens may be chosen at some of the places that the step samples for.

    A sampled row has one place, after its last known token, and one more after each of its drafts; places are numbered
    in the plan's order, a row's own adjacent.
    """

    places: np.ndarray
    """[num_masks] int32, ascending: the places that have a mask; at others any token may be chosen"""
    words: np.ndarray
    """What `bits` are; in the process that makes them, a `LaterWords` in their place."""

    @property
    def bits(self) -> np.ndarray:
        """[num_masks * num_words] int32, mask after mask: bit t % 32 of its word t // 32 is set where token t may be.

        Whoever computes the step asks for them as late as it can: the first to ask waits until they are made.
        """
        return self.words.value if isinstance(self.words, LaterWords) else self.words

    def allowed(self, vocab_size: int) -> np.ndarray:
        """[num_masks, vocab_size] bool"""
        words = self.bits.reshape(len(self.places), -1).view(np.uint8)
        return np.unpackbits(words, axis=1, count=vocab_size, bitorder="little").view(bool)

    def select(self, kept: np.ndarray) -> TokenMasks:
        """Of the places that kept [num_places] bool leaves, numbered anew."""
        chosen = kept[self.places]
        places = (np.cumsum(kept, dtype=np.int32) - 1)[self.places[chosen]].astype(np.int32)
        return TokenMasks(places=places, words=self.bits.reshape(len(self.places), -1)[chosen].reshape(-1))


Attachment = Drafts | TokenMasks
"""What a step may carry besides: a tagged union with one member for each feature."""


class StepPlan(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One step. Apply in this order: release rows, enter new ones, append blocks, then compute."""

    step: int
    released_rows: np.ndarray
    """[num_released] int32: rows whose request left since the plan before"""
    new_rows: tuple[NewRow, ...]
    block_tables: np.ndarray
    """[num_new_blocks] int32: the tables of running rows that get one more block each, in order. Row r's table of
    cache group g is number g * max_num_seqs + r."""
    block_ids: np.ndarray
    """[num_new_blocks] int32: those blocks"""
    rows: np.ndarray
    """[num_scheduled] int32: the rows computed in this step"""
    num_tokens: np.ndarray
    """[num_scheduled] int32: how many tokens of each, all >= 1, starting at num_computed_tokens; drafts included"""
    num_computed_tokens: np.ndarray
    """[num_scheduled] int32: tokens of each row already computed before this step"""
    sampled: np.ndarray
    """[num_scheduled] bool: rows that reach their last known token, and so sample the next one"""
    total_tokens: int
    """The sum of num_tokens."""
    attachments: tuple[Attachment, ...] = ()
    """At most one of each kind."""

    @property
    def drafts(self) -> Drafts | None:
        return next((each for each in self.attachments if isinstance(each, Drafts)), None) if self.attachments else None

    @property
    def masks(self) -> TokenMasks | None:
        if not self.attachments:
            return None
        return next((each for each in self.attachments if isinstance(each, TokenMasks)), None)


class PromptLogprobRun(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    row: int
    start: int
    rows: LogprobRows


class RowFailure(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    row: int
    failure: Failure


class StepResult(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The answer to one StepPlan."""

    step: int
    rows: np.ndarray
    """[num_sampled] int32: plan.rows[plan.sampled], in the plan's order, less the failed ones"""
    token_ids: np.ndarray
    """[num_new_tokens] int32, row after row"""
    counts: np.ndarray | None = None
    """[num_sampled] int32: how many new tokens each row brings, all >= 1. None: one each, as in every step without
    drafts."""
    logprob_indices: np.ndarray | None = None
    """[num_logprob_rows] int32, ascending: which entries of `token_ids` the rows of `logprobs` belong to"""
    logprobs: LogprobRows | None = None
    prompt_logprobs: tuple[PromptLogprobRun, ...] = ()
    failures: tuple[RowFailure, ...] = ()
    began_s: float = 0.0
    """When the forward pass began and ended, by the worker's monotonic clock; 0 when it does not tell."""
    ended_s: float = 0.0
    expert_balance: ExpertBalance | None = None
    """Where it was measured after this step."""


def nth_of_each(counts: np.ndarray) -> np.ndarray:
    """0, 1 ... of each of the runs that have counts [n] elements, one run after another: [sum of counts]."""
    starts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) - np.repeat(starts, counts)
