"""The running requests as numpy arrays: one row each, kept between steps and changed by a StepPlan's deltas.

Only `BatchState.apply`, with the handlers that it calls, and its `append_` methods write; the runner and the sampler
read. Imports no torch, so that it can be tested alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.executor.sampling.columns import SamplingColumns
from headrace.executor.step.adapters import AdapterColumns, TokenAdapters
from headrace.executor.step.columns import RowColumns
from headrace.executor.step.handlers import Handlers
from headrace.executor.step.own_handlers import KeepingSnapshots, Masking, PuttingDrafts
from headrace.executor.step.row_inputs import InputColumns, PlacedInput
from headrace.executor.step.states import RowStates, StateArrays
from headrace.executor.step.verification import SampledPositions
from headrace.ipc.step import NewRow, StepPlan, StepResult, nth_of_each

_NONE = np.zeros(0, np.int32)


@dataclass
class StepArrays:
    """A step's inputs on the host, for the model; the fields are those of `executor/step/inputs.py:StepInputs`. Made by
    `BatchState.arrays`, and completed by the runner where rows pool."""

    token_ids: np.ndarray  # [num_tokens] int32
    positions: np.ndarray  # [num_tokens] int32
    slot_mapping: np.ndarray  # [num_groups, num_tokens] int64: block id * block_size + offset, where keys and values go
    query_start: np.ndarray  # [num_seqs + 1] int32
    seq_lens: np.ndarray  # [num_seqs] int32: tokens in the cache after this step
    block_tables: np.ndarray  # [num_groups, num_seqs, max_blocks] int32, 0 beyond a sequence's last block
    logits_indices: np.ndarray  # [num_sampled] int32: the tokens whose logits are sampled from
    prompt_lens: np.ndarray  # [num_seqs] int32
    block_size: int
    pooled_indices: np.ndarray = field(default_factory=lambda: _NONE)
    """[num_pooled] int32: the tokens whose hidden states are pooled"""
    token_types: np.ndarray | None = None
    """[num_tokens] int32: 1 in the second text of a pair; None: all are 0."""
    earlier_ids: np.ndarray | None = None
    """[num_tokens, lookback] int32: see `StepInputs`; None if the batch looks back at nothing."""
    key_lens: np.ndarray | None = None
    """[num_seqs] int32: to how many of a sequence's first tokens all attend; None: to all."""
    given: tuple[PlacedInput, ...] = ()
    reads_logits: bool = True
    """False where all rows are greedy and only the highest logit of each row is read."""
    states: StateArrays | None = None
    """For models with layers that keep a state per sequence."""
    adapters: TokenAdapters | None = None
    """None where no token has any."""


class BatchState:
    """Every row's tokens and block tables, and the columns of what requests bring.

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
        factors: Sequence[int] = (1,),
        state_pages: int = 0,
        lookback: int = 0,
    ) -> None:
        """factors: by cache group with block tables; a block's number in the group's tensors is its id times this.
        state_pages: of each row's state; 0: the model keeps none. lookback: how many tokens before a token its
        embedding depends on."""
        self.block_size, self.num_groups = block_size, (num_groups := len(factors))
        self._factors = np.array(factors, np.int32) if any(each != 1 for each in factors) else None
        self._back = np.arange(1, lookback + 1, dtype=np.int32)
        self._states = RowStates(num_rows, state_pages) if state_pages else None
        self.states_of_step: StateArrays | None = None
        """Of the plan that was applied last, for a model that keeps states."""
        max_blocks = -(-max_model_len // block_size)
        self.tokens = np.zeros((num_rows, max_model_len), np.int32)
        self.num_tokens = np.zeros(num_rows, np.int32)
        """Known tokens: the prompt and the tokens sampled so far; 0 for a free row."""
        self.num_prompt_tokens = np.zeros(num_rows, np.int32)
        self.generation = np.zeros(num_rows, np.int32)
        """How many requests have entered and left the row: a token of an earlier one is not the row's."""
        self.block_tables = np.zeros((num_groups, num_rows, max_blocks), np.int32)
        self.num_blocks = np.zeros(num_groups * num_rows, np.int32)
        """By table: how many blocks it has."""
        self.sampling = SamplingColumns(num_rows, eos_token_ids)
        self.inputs = InputColumns()
        self.adapters = AdapterColumns()
        self.columns: dict[str, RowColumns] = {
            "sampling": self.sampling,
            "inputs": self.inputs,
            "adapters": self.adapters,
        }
        """What requests bring besides tokens and blocks, by concern."""
        self.handlers = Handlers((PuttingDrafts(self), KeepingSnapshots(self), Masking()))
        self._repeated_rows = np.zeros(0, np.int32)
        self._repeated: list[np.ndarray] = []  # tokens of repeated steps, one array per step, not yet in `tokens`
        self._counting = np.arange(num_rows + 1, dtype=np.int32)

    def apply(self, plan: StepPlan) -> None:
        """Releases, enters and extends rows according to the plan, in that order, and begins with its attachments."""
        if self._repeated:
            self._take_repeated()
        if plan.released_rows.size:
            self.num_tokens[plan.released_rows] = 0
            self.generation[plan.released_rows] += 1
            self.num_blocks.reshape(self.num_groups, len(self.num_tokens))[:, plan.released_rows] = 0
            for columns in self.columns.values():
                columns.leave(plan.released_rows)
        for new in plan.new_rows:
            self._enter(new)
        if plan.block_tables.size:
            self.append_blocks(plan.block_tables, plan.block_ids)
        if self._states is not None:
            self.states_of_step = self._states.advance(plan)
        if plan.attachments:
            self.handlers.begin(plan)

    def ended(self, plan: StepPlan, result: StepResult) -> StepResult:
        """The result of a step with what inputs and attachments add to it. Called on every result of the last stage."""
        result = self.inputs.failing(result)
        return self.handlers.end(plan, result) if plan.attachments else result

    def append_sampled(self, rows: np.ndarray, token_ids: np.ndarray, counts: np.ndarray | None = None) -> None:
        """Appends counts [n] sampled tokens each to distinct rows [n], in row order; without counts one each."""
        if not len(rows):  # a step of prompts alone
            return
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

    def arrays(
        self, plan: StepPlan, sampled: SampledPositions | None = None, *, reads_logits: bool = True
    ) -> StepArrays:
        """The step's inputs. Requires `apply(plan)` first. sampled: the positions of a plan with drafts."""
        rows, num_tokens, start = plan.rows, plan.num_tokens, plan.num_computed_tokens
        num_seqs = len(rows)
        if plan.total_tokens == num_seqs:  # one token of each, as in most steps
            query_start = self._counting[: num_seqs + 1]
            token_rows, positions, seq_lens = rows, start, start + 1
        else:
            query_start = np.zeros(num_seqs + 1, np.int32)
            num_tokens.cumsum(out=query_start[1:])
            token_rows, seq_lens = rows.repeat(num_tokens), start + num_tokens
            positions = np.arange(plan.total_tokens, dtype=np.int32) + (start - query_start[:-1]).repeat(num_tokens)
        if sampled is None:
            logits_indices = query_start[1:][plan.sampled] - np.int32(1)
        else:
            logits_indices = sampled.logits_indices(query_start, plan.sampled)
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
            earlier_ids=self._earlier(token_rows, positions) if len(self._back) else None,
            given=self.inputs.placed(plan),
            reads_logits=reads_logits,
            states=self.states_of_step,
            adapters=self.adapters.of_tokens(rows, query_start, positions),
        )

    def _earlier(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """rows, positions: of the step's tokens."""
        at = positions[:, None] - self._back
        return np.where(at < 0, np.int32(-1), self.tokens[rows[:, None], np.maximum(at, 0)])

    def _enter(self, new: NewRow) -> None:
        row, num_tokens, num_blocks = new.row, len(new.token_ids), len(new.block_ids) // max(1, self.num_groups)
        self.tokens[row, :num_tokens] = new.token_ids
        self.num_tokens[row] = num_tokens
        self.generation[row] += 1
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        block_ids = new.block_ids.reshape(self.num_groups, num_blocks)
        self.block_tables[:, row, :num_blocks] = (
            block_ids if self._factors is None else block_ids * self._factors[:, None]
        )
        self.block_tables[:, row, num_blocks:] = 0
        self.num_blocks.reshape(self.num_groups, len(self.num_tokens))[:, row] = num_blocks
        for columns in self.columns.values():
            columns.enter(new)
        if self._states is not None:
            self._states.enter(new)

    def _take_repeated(self) -> None:
        rows, steps = self._repeated_rows, len(self._repeated)
        columns = self.num_tokens[rows][:, None] + np.arange(steps)
        self.tokens[rows[:, None], columns] = np.stack(self._repeated, 1)
        self.num_tokens[rows] += steps
        if self._states is not None:
            self._states.covered[rows] += steps
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
