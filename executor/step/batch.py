"""The running requests as numpy arrays: one row each, kept between steps and changed by a StepPlan's deltas.

Only `BatchState.apply` and its `append_` methods write; the runner and the sampler read. Imports no torch, so that it
can be tested alone.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.core.options.model_options import LogprobsMode
from headrace.executor.sampling.row_processors import Position, RowProcessor, processors_of
from headrace.executor.sampling.token_rules import TokenRules, rules_of
from headrace.executor.step.verification import SampledPositions
from headrace.ipc.messages import Sampling
from headrace.ipc.step import Drafts, NewRow, StepPlan, TokenMasks, nth_of_each

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


@dataclass(frozen=True)
class StepArrays:
    """A step's inputs on the host, for the model; the fields are those of `models.inputs.StepInputs`."""

    token_ids: np.ndarray  # [num_tokens] int32
    positions: np.ndarray  # [num_tokens] int32
    slot_mapping: np.ndarray  # [num_groups, num_tokens] int64: block id * block_size + offset, where keys and values go
    query_start: np.ndarray  # [num_seqs + 1] int32
    seq_lens: np.ndarray  # [num_seqs] int32: tokens in the cache after this step
    block_tables: np.ndarray  # [num_groups, num_seqs, max_blocks] int32, 0 beyond a sequence's last block
    logits_indices: np.ndarray  # [num_sampled] int32: the tokens whose logits are sampled from
    prompt_lens: np.ndarray  # [num_seqs] int32
    block_size: int
    reads_logits: bool = True
    """False where all rows are greedy and only the highest logit of each row is read."""


@dataclass(frozen=True)
class Draws:
    """How tokens are drawn from rows of logits after all changes to the logits. For a greedy row only its temperature,
    0, is read; top_k 0, top_p 1 and min_p 0 keep all tokens."""

    temperature: np.ndarray  # [num_rows] float32
    top_k: np.ndarray  # [num_rows] int64
    top_p: np.ndarray  # [num_rows] float64
    min_p: np.ndarray  # [num_rows] float64
    seed: np.ndarray  # [num_rows] uint64
    position: np.ndarray  # [num_rows] int32: the drawn token's position in its sequence
    masks: TokenMasks | None = None
    """The allowed tokens; None allows all. A model that chooses tokens applies them to its logits."""


class SamplingColumns:
    """Sampling parameters by row. A freed row keeps its old values until a new request is entered."""

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
        self.counts: dict[int, TokenCounts] = {}
        """Only for rows whose penalties are computed on the host."""

    def enter(self, row: int, sampling: Sampling, seed: int) -> None:
        """Enters a request's parameters. An error fails only this request, when its first token is due."""
        try:
            self._enter(row, sampling, seed)
        except MemoryError:  # the host is out of memory, which is not this request's error
            raise
        except Exception as error:
            self._enter(row, Sampling(max_tokens=1), seed)
            self.processors[row] = (NeverEntered(error),)
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


class NeverEntered(RowProcessor):
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


class BatchState:
    """Every row's tokens, block tables and sampling parameters.

    A row has a block table for each cache group; tables are numbered as in `StepPlan.block_tables`. Blocks that a
    sliding window has passed stay in its table and are never read.

    Arrays are np.zeros of their largest size: the operating system allocates a page of them when it is first written.
    """

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        eos_token_ids: Sequence[int] = (),
        layers_in_place: Sequence[int] = (1,),
    ) -> None:
        """layers_in_place: by cache group; a block's number in the group's tensors is its id times this."""
        self.block_size, self.num_groups = block_size, (num_groups := len(layers_in_place))
        self._factors = None if max(layers_in_place) == 1 else np.array(layers_in_place, np.int32)
        max_blocks = -(-max_model_len // block_size)
        self.tokens = np.zeros((num_rows, max_model_len), np.int32)
        self.num_tokens = np.zeros(num_rows, np.int32)
        """Known tokens: the prompt and the tokens sampled so far; 0 for a free row."""
        self.num_prompt_tokens = np.zeros(num_rows, np.int32)
        self.block_tables = np.zeros((num_groups, num_rows, max_blocks), np.int32)
        self.num_blocks = np.zeros(num_groups * num_rows, np.int32)
        """By table: how many blocks it has."""
        self.sampling = SamplingColumns(num_rows, eos_token_ids)
        self._repeated_rows = np.zeros(0, np.int32)
        self._repeated: list[np.ndarray] = []  # tokens of repeated steps, one array per step, not yet in `tokens`
        self._counting = np.arange(num_rows + 1, dtype=np.int32)

    def apply(self, plan: StepPlan) -> None:
        """Releases, enters and extends rows according to the plan, in that order."""
        if self._repeated:
            self._take_repeated()
        if plan.released_rows.size:
            self.num_tokens[plan.released_rows] = 0
            self.num_blocks.reshape(self.num_groups, -1)[:, plan.released_rows] = 0
            self.sampling.needs[plan.released_rows] = 0
        for new in plan.new_rows:
            self._enter(new)
        if plan.block_tables.size:
            self.append_blocks(plan.block_tables, plan.block_ids)
        if (drafts := plan.get(Drafts)) is not None:
            self._put_drafts(plan, drafts)

    def _put_drafts(self, plan: StepPlan, drafts: Drafts) -> None:
        """Writes drafts after each row's known tokens, which may themselves not have arrived yet."""
        first = plan.num_computed_tokens + plan.num_tokens - drafts.counts
        columns = np.repeat(first, drafts.counts) + nth_of_each(drafts.counts)
        self.tokens[np.repeat(plan.rows, drafts.counts), columns] = drafts.token_ids

    def append_sampled(self, rows: np.ndarray, token_ids: np.ndarray, counts: np.ndarray | None = None) -> None:
        """Appends counts [n] sampled tokens each to distinct rows [n], in row order; without counts one each."""
        if counts is not None:
            self._append_several(rows, token_ids, counts)
            return
        columns = self.num_tokens[rows]
        # A row that just reached max_model_len ends there: its last token is never computed.
        if np.maximum.reduce(columns, initial=0) >= self.tokens.shape[1]:
            fits = columns < self.tokens.shape[1]
            rows, columns, token_ids = rows[fits], columns[fits], token_ids[fits]
        self.tokens[rows, columns] = token_ids
        self.num_tokens[rows] = columns + 1

    def _append_several(self, rows: np.ndarray, token_ids: np.ndarray, counts: np.ndarray) -> None:
        row_of, nth = np.repeat(rows, counts), nth_of_each(counts)
        columns = self.num_tokens[row_of] + nth
        fits = columns < self.tokens.shape[1]
        self.tokens[row_of[fits], columns[fits]] = token_ids[fits]
        self.num_tokens[rows] = np.minimum(self.num_tokens[rows] + counts, self.tokens.shape[1])

    def append_repeated(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Like `append_sampled`, for a step that repeats the previous one, but only keeps the tokens; `apply` writes
        them. Until then no other call is allowed than this one, for the same rows."""
        self._repeated_rows = rows
        self._repeated.append(token_ids)

    def with_rules(self, rows: np.ndarray) -> list[tuple[int, int, TokenRules]]:
        """(index in rows, row, its rules) of the rows that have rules."""
        indices = np.flatnonzero((self.sampling.needs[rows] & Needs.TOKEN_RULES) != 0)
        return [
            (index, row, self.sampling.rules[row])
            for index, row in zip(indices.tolist(), rows[indices].tolist(), strict=True)
        ]

    def needs(self, rows: np.ndarray) -> int:
        """Bits of `Needs`: the union over rows."""
        return int(np.bitwise_or.reduce(self.sampling.needs[rows]))

    def draws(self, rows: np.ndarray, num_tokens: np.ndarray | None = None) -> Draws:
        """The parameters for drawing the next token of each of `rows`, each after num_tokens [num_rows] tokens; None:
        after all known tokens."""
        columns = self.sampling
        is_random = (columns.needs[rows] & Needs.RANDOM) != 0
        return Draws(
            temperature=columns.temperature[rows] * is_random,
            top_k=columns.top_k[rows],
            top_p=columns.top_p[rows],
            min_p=columns.min_p[rows],
            seed=columns.seed[rows],
            position=self.num_tokens[rows] if num_tokens is None else num_tokens,
        )

    def arrays(
        self, plan: StepPlan, places: SampledPositions | None = None, *, reads_logits: bool = True
    ) -> StepArrays:
        """The step's inputs. Requires `apply(plan)` first. places: the sampled positions of a plan with drafts."""
        rows, num_tokens, start = plan.rows, plan.num_tokens, plan.num_computed_tokens
        num_seqs = len(rows)
        if plan.total_tokens == num_seqs:  # one token of each, as in most steps
            query_start = self._counting[: num_seqs + 1]
            token_rows, positions, seq_lens = rows, start, start + 1
        else:
            query_start = np.zeros(num_seqs + 1, np.int32)
            np.cumsum(num_tokens, out=query_start[1:])
            token_rows, seq_lens = np.repeat(rows, num_tokens), start + num_tokens
            positions = np.arange(int(query_start[-1]), dtype=np.int32) + np.repeat(
                start - query_start[:-1], num_tokens
            )
        if places is None:
            logits_indices = query_start[1:][plan.sampled] - np.int32(1)
        else:
            logits_indices = places.logits_indices(query_start, plan.sampled)
        block_indices, offsets = np.divmod(positions, self.block_size)
        slot_mapping = self.block_tables[:, token_rows, block_indices] * np.int64(self.block_size) + offsets
        width = -(-int(np.maximum.reduce(seq_lens, initial=0)) // self.block_size)
        return StepArrays(
            token_ids=self.tokens[token_rows, positions],
            positions=positions,
            slot_mapping=slot_mapping,
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=self.block_tables[:, rows, :width],
            logits_indices=logits_indices,
            prompt_lens=self.num_prompt_tokens[rows],
            block_size=self.block_size,
            reads_logits=reads_logits,
        )

    def _enter(self, new: NewRow) -> None:
        row, num_tokens, num_blocks = new.row, len(new.token_ids), len(new.block_ids) // self.num_groups
        self.tokens[row, :num_tokens] = new.token_ids
        self.num_tokens[row] = num_tokens
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        block_ids = new.block_ids.reshape(self.num_groups, num_blocks)
        self.block_tables[:, row, :num_blocks] = (
            block_ids if self._factors is None else block_ids * self._factors[:, None]
        )
        self.block_tables[:, row, num_blocks:] = 0
        self.num_blocks.reshape(self.num_groups, -1)[:, row] = num_blocks
        self.sampling.enter(row, new.sampling, new.seed)

    def _take_repeated(self) -> None:
        rows, steps = self._repeated_rows, len(self._repeated)
        columns = self.num_tokens[rows][:, None] + np.arange(steps)
        self.tokens[rows[:, None], columns] = np.stack(self._repeated, 1)
        self.num_tokens[rows] += steps
        self._repeated.clear()

    def first_reported(self, row: int, begin: int) -> int:
        """The first prompt position, from begin on, whose logits are to be reported."""
        params = self.sampling.params[row]
        return begin if params is None else max(begin, params.prompt_logprob_start - 1)

    def numbers_in_group(self, tables: np.ndarray, block_ids: np.ndarray) -> np.ndarray:
        """The numbers of the blocks in the tensors of their group; tables and block_ids are parallel."""
        if self._factors is None:
            return block_ids
        return block_ids * self._factors[tables // len(self.num_tokens)]

    def append_blocks(self, tables: np.ndarray, block_ids: np.ndarray) -> None:
        """Appends a block to each of tables, which may repeat; the blocks of one table keep their order."""
        order = np.argsort(tables, kind="stable")
        tables, block_ids = tables[order], self.numbers_in_group(tables, block_ids)[order]
        nth_of_table = np.arange(len(tables)) - np.searchsorted(tables, tables)
        every = self.block_tables.reshape(len(self.num_blocks), -1)
        every[tables, self.num_blocks[tables] + nth_of_table] = block_ids
        np.add.at(self.num_blocks, tables, 1)
