"""The messages between a core and its executor: a `StepPlan` to it, a `StepResult` back. Needs numpy.

A request has a `row` of the batch from admission until it finishes or is preempted; rows are reused. New and resumed
requests are sent in full, running ones as deltas, so the executor keeps its own copy of each row's tokens, block table
and sampling parameters. Only the core schedules: the executor never frees or reorders rows.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
import numpy as np

from headrace.ipc.adapters import RowAdapter
from headrace.ipc.codec import Tensor
from headrace.ipc.failure import Failure, HeadraceError, OptionError, let_interrupts_pass
from headrace.ipc.messages import ExpertBalance, LogprobRows, Task
from headrace.ipc.row_inputs import RowInput
from headrace.ipc.struct_types import threadsafe

_NO_PAGES = np.empty(0, np.int32)


class NewRow(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A request that enters a row, in full."""

    row: int
    token_ids: np.ndarray
    """[num_tokens] int32: the prompt, and for a resumed request also the tokens generated so far"""
    num_prompt_tokens: int
    num_computed_tokens: int
    """How many leading tokens already have keys and values in the cache."""
    block_ids: np.ndarray
    """[num_groups * num_blocks] int32: the request's block tables, one cache group after another, including blocks for
    this step; 0 for blocks that a sliding window has passed"""
    task: Task
    seed: int
    """The resolved 64-bit seed; 0 for a task that samples nothing."""
    inputs: tuple[RowInput, ...] = ()
    """What stands in the place of prompt tokens, in the order of positions: those that are not computed yet."""
    state_pages: np.ndarray = _NO_PAGES
    """[pages of the state group] int32: the row's own pages, as long as the request is in the row; empty for a model
    without a state group"""
    state_source: np.ndarray = _NO_PAGES
    """[as state_pages] int32: the pages of the snapshot that the row starts from, which is of the first
    num_computed_tokens tokens. Others may read them too, so they are not written. Empty: it starts without a state."""
    adapters: tuple[RowAdapter, ...] = ()
    """What is added to the weights for this row, as long as the request is in it. No two have the same slot."""


class StepSizes(NamedTuple):
    """What bounds the size of a step's attachments."""

    num_rows: int
    """Most rows of a step."""
    num_tokens: int
    """Most tokens of a step."""
    num_positions: int
    """Most positions that a step samples."""
    vocab_size: int
    num_state_pages: int = 0
    """Most pages of the snapshots that a step takes."""


class Attachment(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=True):
    """Base class of a step's optional data: what a step feature sends to the ranks with a plan, and what comes back to
    it with the result. Each has at most one per kind.

    A kind is a subclass that `attachment` registers. Its fields have wire types (`np.ndarray`, numbers, texts, tuples),
    and its class name is its name on the wire.
    """

    def select(self, kept: np.ndarray) -> Self:
        """Of a result's: what is left where only those of the result's rows are that are true in kept [num_rows] bool:
        the requests of the others have ended."""
        return self


A = TypeVar("A", bound=Attachment)
SizeOf = Callable[[StepSizes], int]
KINDS: dict[str, type[Attachment]] = {}
"""The registered kinds by name."""
_MOST_BYTES: dict[str, tuple[SizeOf | None, SizeOf | None]] = {}


def attachment(
    most_bytes: SizeOf | None = None, *, most_returned_bytes: SizeOf | None = None
) -> Callable[[type[A]], type[A]]:
    """Registers a kind. most_bytes: the size of the largest one that goes to the ranks, encoded; most_returned_bytes:
    of the largest that comes back. The rings between core and workers have room for them. None: none does.

    Raises TypeError if there is another kind of that name.
    """

    def register(kind: type[A]) -> type[A]:
        if KINDS.setdefault(kind.__name__, kind) is not kind:
            raise TypeError(f"two kinds of step attachments are called {kind.__name__}")
        _MOST_BYTES[kind.__name__] = most_bytes, most_returned_bytes
        return kind

    return register


def attachment_bytes(sizes: StepSizes) -> dict[str, int]:
    """The largest size of each kind that a plan may have, encoded. Raises OptionError, naming the kind."""
    return {name: _size(name, "most_bytes", most, sizes) for name, (most, _) in _MOST_BYTES.items() if most is not None}


def returned_bytes(sizes: StepSizes) -> dict[str, int]:
    """The largest size of each kind that a result may have, encoded. Raises OptionError, naming the kind."""
    return {
        name: _size(name, "most_returned_bytes", most, sizes)
        for name, (_, most) in _MOST_BYTES.items()
        if most is not None
    }


def _size(name: str, what: str, most: SizeOf, sizes: StepSizes) -> int:
    where = f"the step attachment {KINDS[name].__module__}.{name}"
    try:
        found: Any = most(sizes)
    except BaseException as error:  # of another package
        let_interrupts_pass(error)
        raise OptionError(f"{where} failed in {what}: {error!r:.200}") from error
    if not isinstance(found, int) or found < 0:
        raise OptionError(f"{where} has {what}={found!r:.100}; it must be a whole number of bytes, at least 0")
    return found


def attachments_type() -> Any:
    """The type of the attachments of plans and results, with the kinds that are registered by now, for a decoder."""
    return tuple[functools.reduce(operator.or_, KINDS.values()), ...]  # type: ignore[misc]


def encode_array(value: Any) -> Any:
    """The wire form of an array in a plan or a result. Raises TypeError for what has none."""
    if isinstance(value, LazyArray):
        value = value.value
    if isinstance(value, Tensor):
        return (value.dtype, value.shape, value.data)
    if isinstance(value, np.ndarray):
        return encode_array(Tensor.from_numpy(value))
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no wire format")


def decode_array(kind: type, value: Any) -> Any:
    dtype, shape, data = value
    tensor = Tensor(dtype, tuple(shape), memoryview(data))
    return tensor if kind is Tensor else tensor.numpy()


def problem_of_attachment(given: Any) -> str:
    """Why this cannot go to another process as an attachment, in a sentence; "" if it can. In one process nothing is
    encoded, so that a field of another type would only be found once there are workers."""
    kind = type(given)
    if KINDS.get(kind.__name__) is not kind:
        return f"{given!r:.200} is no attachment of a registered kind"
    try:
        _decoder_of(kind).decode(_CHECKING.encode(given))
    except Exception as error:
        return f"{kind.__name__} has a field of another type than it declares: {error}"
    return ""


def _encode_known(value: Any) -> Any:
    """As `encode_array`, without computing what is to be computed later."""
    return ("int32", (0,), b"") if isinstance(value, LazyArray) else encode_array(value)


_CHECKING = msgspec.msgpack.Encoder(enc_hook=_encode_known)


@functools.cache
def _decoder_of(kind: type[Attachment]) -> msgspec.msgpack.Decoder[Attachment]:
    return msgspec.msgpack.Decoder(threadsafe(kind), dec_hook=decode_array)


def _drafts_bytes(sizes: StepSizes) -> int:
    return 4 * (sizes.num_rows + sizes.num_tokens) + 64


@attachment(most_bytes=_drafts_bytes, most_returned_bytes=_drafts_bytes)
class Drafts(Attachment, frozen=True):
    """Draft tokens of speculative decoding. They follow a row's last known token, so a step can yield several tokens.

    With a result come those that a model in the rank drafts for the next step: tokens that may follow each of the
    result's rows.

    A row with drafts is sampled after its last known token and after each draft, and keeps each sampled token as long
    as the draft before it was right: at least one token, at most one more than it has drafts. Keys and values of
    rejected drafts are invalid; their positions are recomputed.
    """

    counts: np.ndarray
    """[num_rows] int32: how many of each row's planned tokens, at the end, are drafts; 0 for rows that are not
    sampled"""
    token_ids: np.ndarray
    """[sum of counts] int32, row after row"""

    def select(self, kept: np.ndarray) -> Drafts:
        return Drafts(counts=self.counts[kept], token_ids=self.token_ids[np.repeat(kept, self.counts)])


class LazyArray:
    """An array computed on first access, so that the computation can overlap the model's forward pass on a device."""

    def __init__(self, make: Callable[[], np.ndarray]) -> None:
        self._make = make

    @functools.cached_property
    def value(self) -> np.ndarray:
        return self._make()


@attachment(most_bytes=lambda sizes: sizes.num_positions * (4 + -(-sizes.vocab_size // 32) * 4) + 64)
class TokenMasks(Attachment, frozen=True):
    """Which tokens are allowed at some of the positions that the step samples.

    A sampled row has one such position after its last known token, and one after each of its drafts. They are numbered
    in the plan's order; those of a row are adjacent.
    """

    positions: np.ndarray
    """[num_masks] int32, ascending: the positions that have a mask; at the others any token is allowed"""
    words: np.ndarray
    """The array of `bits`; in the process that computes the masks, a `LazyArray` instead."""

    @property
    def bits(self) -> np.ndarray:
        """[num_masks * num_words] int32, mask after mask: bit t % 32 of word t // 32 is set if token t is allowed.

        Read as late as possible in the step: the first access waits until the masks are computed.
        """
        return self.words.value if isinstance(self.words, LazyArray) else self.words

    def allowed(self, vocab_size: int) -> np.ndarray:
        """[num_masks, vocab_size] bool"""
        words = self.bits.reshape(len(self.positions), -1).view(np.uint8)
        return np.unpackbits(words, axis=1, count=vocab_size, bitorder="little").view(bool)


@attachment(most_bytes=lambda sizes: 12 * sizes.num_state_pages + 64 if sizes.num_state_pages else 0)
class StateSnapshots(Attachment, frozen=True):
    """Which states of rows are kept in pages of their own, for other requests that begin alike.

    The state after exactly `positions[i]` tokens is stored as the step passes that position; no chunk ends there for
    it. In a row whose last step had accepted drafts, a position may be one that this step passes while it applies
    them, which is at most its num_computed_tokens.
    """

    rows: np.ndarray
    """[num_snapshots] int32: in the plan's order; a row may occur several times, with ascending positions"""
    positions: np.ndarray
    """[num_snapshots] int32: numbers of tokens, multiples of the block size, and at most num_computed_tokens +
    num_tokens without drafts"""
    pages: np.ndarray
    """[num_snapshots * pages of the state group] int32: where they are stored, snapshot after snapshot"""


def _attachment_of(self: StepPlan | StepResult, kind: type[A]) -> A | None:
    """The attachment of this kind; None if there is none."""
    for each in self.attachments:
        if type(each) is kind:
            return each
    return None


class StepPlan(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One step. Apply it in this order: release rows, enter new ones, append blocks, then compute."""

    step: int
    released_rows: np.ndarray
    """[num_released] int32: rows whose requests left since the plan before"""
    new_rows: tuple[NewRow, ...]
    block_tables: np.ndarray
    """[num_new_blocks] int32: for each block appended to a running row, the index of its block table: that of row r in
    cache group g is g * max_num_seqs + r."""
    block_ids: np.ndarray
    """[num_new_blocks] int32: the appended blocks"""
    rows: np.ndarray
    """[num_scheduled] int32: the rows computed in this step"""
    num_tokens: np.ndarray
    """[num_scheduled] int32: how many tokens of each row, all >= 1, from num_computed_tokens on; includes drafts"""
    num_computed_tokens: np.ndarray
    """[num_scheduled] int32: how many tokens of each row were computed before this step"""
    sampled: np.ndarray
    """[num_scheduled] bool: rows that generate whose last known token is computed, so that the next one is sampled"""
    total_tokens: int
    """The sum of num_tokens."""
    attachments: tuple[Attachment, ...] = ()
    """At most one per kind."""

    get = _attachment_of

    def check_read(self, reads: frozenset[type[Attachment]]) -> None:
        """Raises AttachmentError if the step has an attachment of a kind that is not in `reads`."""
        for each in self.attachments:
            if type(each) not in reads:
                raise AttachmentError.of({type(each).__name__}, {kind.__name__ for kind in reads})


class AttachmentError(HeadraceError):
    """A step feature attaches what the executor does not read."""

    @classmethod
    def of(cls, attached: Set[str], read: Set[str]) -> AttachmentError:
        return cls(
            f"steps carry {', '.join(sorted(attached - read))}, which this executor does not read; it reads "
            f"{', '.join(sorted(read))}. Install a handler for it where the ranks run (headrace.step_handlers), name a "
            "worker class that reads it (worker_cls), or uninstall the package whose step feature attaches it"
        )


class PromptLogprobRun(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    row: int
    start: int
    rows: LogprobRows


class RowFailure(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    row: int
    failure: Failure

    @classmethod
    def of(cls, row: int, why: str, error_type: str) -> RowFailure:
        """That of this process in a step."""
        message = f"the request cannot go on: {why}"
        return cls(row=row, failure=Failure(message=message, type=error_type, pid=os.getpid(), phase="step"))


class PooledRows(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The vectors of rows that pool, in the step that computes the last of their tokens: a part for each kind."""

    rows: np.ndarray
    """[num_parts] int32; those of one row are adjacent"""
    counts: np.ndarray
    """[num_parts] int32: how many vectors each has"""
    widths: np.ndarray
    """[num_parts] int32: the number of values in each of its vectors"""
    values: np.ndarray
    """[sum of counts * widths] float32, part after part, vector after vector"""

    def select(self, kept: np.ndarray) -> PooledRows:
        """The parts that are true in kept [num_parts] bool."""
        return PooledRows(
            rows=self.rows[kept],
            counts=self.counts[kept],
            widths=self.widths[kept],
            values=self.values[np.repeat(kept, self.counts * self.widths)],
        )


class StepResult(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The result of one StepPlan."""

    step: int
    rows: np.ndarray
    """[num_sampled] int32: plan.rows[plan.sampled], in the plan's order, without the failed ones"""
    token_ids: np.ndarray
    """[num_new_tokens] int32, row after row"""
    counts: np.ndarray | None = None
    """[num_sampled] int32: how many new tokens each row has, all >= 1. None means one each, as in every step without
    drafts."""
    logprob_indices: np.ndarray | None = None
    """[num_logprob_rows] int32, ascending: which entries of `token_ids` the rows of `logprobs` belong to"""
    logprobs: LogprobRows | None = None
    prompt_logprobs: tuple[PromptLogprobRun, ...] = ()
    vectors: PooledRows | None = None
    failures: tuple[RowFailure, ...] = ()
    began_s: float = 0.0
    """When the forward pass began and ended, by the worker's monotonic clock; 0 if the rank does not report it."""
    ended_s: float = 0.0
    expert_balance: ExpertBalance | None = None
    """Set if it was measured after this step."""
    attachments: tuple[Attachment, ...] = ()
    """What comes back to step features, at most one per kind: of registered kinds, from the handlers of the rank that
    replies (`executor/step/handlers.py`)."""

    get = _attachment_of

    def only(self, which: Callable[[np.ndarray], np.ndarray]) -> StepResult:
        """The result of the rows that `which` marks: [n] rows -> [n] bool."""
        stays = which(self.rows)
        if not (self.prompt_logprobs or self.failures or self.vectors) and stays.all():
            return self
        counts, kept = self.counts, stays
        if counts is not None:
            kept, counts = np.repeat(stays, counts), counts[stays]
        indices, logprobs = select_logprobs(self.logprob_indices, self.logprobs, kept)

        def is_marked(row: int) -> bool:
            return bool(which(np.array([row]))[0])

        attachments, why = _selected(self.attachments, stays)
        selected = msgspec.structs.replace(
            self,
            rows=self.rows[stays],
            token_ids=self.token_ids[kept],
            counts=counts,
            attachments=attachments,
            logprob_indices=indices,
            logprobs=logprobs,
            prompt_logprobs=tuple(run for run in self.prompt_logprobs if is_marked(run.row)),
            vectors=self.vectors and self.vectors.select(which(self.vectors.rows)),
            failures=tuple(failure for failure in self.failures if is_marked(failure.row)),
        )
        return selected.failing(dict.fromkeys(selected.rows.tolist(), why), "StepFeatureError") if why else selected

    def failing(self, problems: Mapping[int, str], error_type: str) -> StepResult:
        """The result with failures in the place of rows. problems: row -> why its request cannot go on."""
        others = self.only(lambda every: ~np.isin(every, list(problems)))
        failures = tuple(RowFailure.of(row, why, error_type) for row, why in problems.items())
        return msgspec.structs.replace(others, failures=(*others.failures, *failures))


def _selected(attachments: tuple[Attachment, ...], kept: np.ndarray) -> tuple[tuple[Attachment, ...], str]:
    """What is left of a result's attachments; and why one cannot say so, which is left out, or ""."""
    found, why = list[Attachment](), ""
    for each in attachments:
        try:
            if type(chosen := each.select(kept)) is not type(each):
                raise TypeError(f"it returned {chosen!r:.100}; expected: a {type(each).__name__}")
            found.append(chosen)
        except BaseException as error:  # of another package
            let_interrupts_pass(error)
            why = f"the step attachment {type(each).__module__}.{type(each).__name__} failed in select: {error!r:.200}"
    return tuple(found), why


def select_logprobs(
    indices: np.ndarray | None, logprobs: LogprobRows | None, kept: np.ndarray
) -> tuple[np.ndarray | None, LogprobRows | None]:
    """What is left of logprobs, one for each of the tokens at indices [num_logprob_rows], once only the tokens that
    kept [num_tokens] bool marks are left; indices drop by the number of other tokens before them."""
    if indices is None or logprobs is None or not (chosen := kept[indices]).any():
        return None, None
    return (np.cumsum(kept, dtype=np.int32) - np.int32(1))[indices[chosen]], logprobs.select(chosen)


def nth_of_each(counts: np.ndarray) -> np.ndarray:
    """[sum of counts]: 0, 1 ... counts[i] - 1 for each i of counts [n], one run after another."""
    starts = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) - np.repeat(starts, counts)
