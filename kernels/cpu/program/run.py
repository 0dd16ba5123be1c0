"""Runs a program: takes a step's arrays, returns its output rows, and can profile the time of each op."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from headrace.kernels.cpu.linear.args import RowAdaptersC
from headrace.kernels.cpu.linear.deltas import PairedRows
from headrace.kernels.cpu.linear.linear import Runtime
from headrace.kernels.cpu.program.args import ProgramC, ProgramOp
from headrace.kernels.cpu.program.parts import FEW_ROWS, Buffer
from headrace.kernels.cpu.recurrent.args import StateStepC
from headrace.kernels.cpu.runtime.threads import Step

GIVEN_ROW = -1
"""kGivenRow of op.h, in the place of a token id."""
REFUSED_TOKEN_ID, REFUSED_POSITION = 1, 2
"""`Refusal` in program.cpp."""


@dataclass(frozen=True)
class ProgramStep:
    """The inputs of a step, all C-contiguous: sequence after sequence, each sequence's tokens in order of position."""

    token_ids: np.ndarray  # [num_tokens] int32
    positions: np.ndarray  # [num_tokens] int32
    slot_mapping: np.ndarray  # [num_tokens] int64: block * block_size + offset; negative: do not store
    query_start: np.ndarray  # [num_seqs + 1] int32
    seq_lens: np.ndarray  # [num_seqs] int32: tokens in context, including the step's
    block_tables: np.ndarray  # [num_seqs, max_blocks] int32
    logits_rows: np.ndarray  # [num_logits] int32: the rows of tokens whose logits are computed


class StepBuffers:
    """Preallocated arrays of `ProgramStep`, to be filled for each step. `step` holds their addresses, since looking up
    seven addresses takes longer than filling the arrays. The caller fills the first part of each array and sets the
    counts in `step`.

    Slots and block tables exist once per cache group, and `LayerCache` has the offsets of a layer's group. A
    `ProgramStep` has only one group.
    """

    def __init__(
        self, *, max_tokens: int, max_seqs: int, max_logits: int, max_blocks: int, num_groups: int = 1
    ) -> None:
        self.token_ids = np.zeros(max_tokens, np.int32)
        self.positions = np.zeros(max_tokens, np.int32)
        self.token_types = np.zeros(max_tokens, np.int32)
        self.slot_mapping = np.zeros((num_groups, max_tokens), np.int64)
        self.query_start = np.zeros(max_seqs + 1, np.int32)
        self.seq_lens = np.zeros(max_seqs, np.int32)
        self.key_lens = np.zeros(max_seqs, np.int32)
        self.block_tables = np.zeros((num_groups, max_seqs, max_blocks), np.int32)
        self.logits_rows = np.zeros(max_logits, np.int32)
        self.step = Step(
            token_ids=self.token_ids.ctypes.data,
            positions=self.positions.ctypes.data,
            token_types=self.token_types.ctypes.data,
            slot_mapping=self.slot_mapping.ctypes.data,
            query_start=self.query_start.ctypes.data,
            seq_lens=self.seq_lens.ctypes.data,
            block_table=self.block_tables.ctypes.data,
            logits_rows=self.logits_rows.ctypes.data,
        )
        self.states = StateStepC()
        """Of the layers that keep a state per sequence."""
        self._adapters = (RowAdaptersC * 2)()
        self._paired: list[PairedRows | None] = [None, None]
        self._state_arrays: Mapping[str, np.ndarray] = {}

    def take_adapters(self, tokens: PairedRows | None, logits: PairedRows | None) -> None:
        """Of the step's tokens and rows of logits; None: no row has any."""
        self.step.adapters = None if tokens is None else ctypes.addressof(self._adapters)
        before, self._paired = self._paired, [tokens, logits]
        for args, paired, held in zip(self._adapters, self._paired, before, strict=True):
            if paired is not None and paired is not held:
                paired.put(args)

    def take_key_lens(self, key_lens: np.ndarray | None) -> None:
        """key_lens: [num_seqs]; None: tokens attend to all of their sequence."""
        if key_lens is not None:
            self.key_lens[: len(key_lens)] = key_lens
        self.step.key_lens = None if key_lens is None else self.key_lens.ctypes.data

    def take_states(self, arrays: Mapping[str, np.ndarray]) -> None:
        """The step's states: arrays by field of `StateStepC`, int32, which are kept and read in place."""
        self._state_arrays, states = arrays, self.states
        for name, array in arrays.items():
            setattr(states, name, _address(array, np.int32, array.shape, name))
        states.pages_per_state = arrays["pages"].shape[1]
        states.num_snapshots = len(arrays["snapshot_ends"])


@dataclass(frozen=True)
class Profile:
    """The time spent in profiled runs, summed over runs. `working_s` and `waiting_s` are means over the threads."""

    runs: int
    seconds: float
    """Elapsed time from call to return, in Python."""
    working_s: dict[str, float]
    """Time in ops, by kind of op."""
    waiting_s: float
    """Time at barriers: waiting for other threads, and the barriers' own cost."""

    @property
    def share_outside(self) -> float:
        """The share of the elapsed time that a thread spent outside ops."""
        return 1.0 - sum(self.working_s.values()) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, eq=False)
class Written:
    """The result of a builder: two lists of the same ops, for steps of few rows and of many, and their properties."""

    ops: tuple[list[ProgramOp], list[ProgramOp]]
    names: tuple[list[str], list[str]]
    output: Buffer
    max_rows: dict[str, int]
    vocab_size: int
    """Limit on token ids; 0 if no op looks them up."""
    max_position: int | None
    """Limit on positions, from the position and rotary tables; None if no op uses them."""
    logits_start: tuple[int, int] | None
    """The index, in each list, of the first op of those that work only on rows of logits."""
    alone_rows: int
    """The calling thread runs steps of at most this many tokens alone."""
    kept: object
    """Keeps alive everything that the ops point to."""


class Program:
    """A list of ops, ready to run. Made by `Builder.build`; used from one thread at a time."""

    def __init__(self, runtime: Runtime, written: Written) -> None:
        self.runtime, self._written = runtime, written
        self.names = written.names
        self._ops = [(ProgramOp * len(ops))(*ops) for ops in written.ops]
        self._programs = [
            ProgramC(
                ops=ctypes.addressof(ops),
                first=0,
                end=len(ops),
                vocab_size=written.vocab_size,
                position_limit=written.max_position or 0,
                alone_rows=written.alone_rows,
            )
            for ops in self._ops
        ]
        self._own_step = self._step = Step()
        self._arrays: ProgramStep | StepBuffers | None = None
        dll = runtime.library.dll
        dll.hr_program_run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        dll.hr_program_run.restype = ctypes.c_int
        dll.hr_ticks_now.restype = ctypes.c_uint64
        self._run = dll.hr_program_run

    @property
    def num_barriers(self) -> tuple[int, int]:
        """The numbers of barriers in a step of few rows with one token per sequence, and in a step of many rows."""
        few, many = self._ops
        return (
            sum(op.barrier_before for op in few if not op.skipped_when_single),
            sum(op.barrier_before for op in many),
        )

    def run(self, arrays: ProgramStep) -> Tensor:
        """Runs the step, cache writes included. Returns the output's rows, valid until the next run.

        Raises ValueError for arrays of another type or shape, more rows than the program's maximum, a token id outside
        the vocabulary, a position beyond the tables or a row of logits beyond the tokens. Slots and block tables are
        not checked: the caller keeps them in range.
        """
        self._load(arrays)
        self._call(self._programs[self._which])
        output = self._written.output
        return output.tensor[: self._step.num_logits if output.rows == "logits" else self._step.num_tokens]

    def run_filled(self, buffers: StepBuffers) -> None:
        """Runs the step in the buffers; the output is in `Written.output`. Raises ValueError for a token id, position
        or row of logits out of range."""
        self._step, self._arrays = buffers.step, buffers
        self._call(self._programs[self._which])

    def run_logits(self, logits_rows: np.ndarray) -> Tensor:
        """Computes the logits of other tokens of the last step: [len(logits_rows), ...], valid until the next run.

        Raises ValueError for a program without `Builder.start_of_logits`, or before its first run."""
        starts = self._written.logits_start
        if starts is None or self._arrays is None:
            raise ValueError("a program without start_of_logits, or that has not run yet, has no logits to run again.")
        self._step = Step.from_buffer_copy(self._step)  # a copy: that of the StepBuffers keeps its own logits_rows
        self._load_logits(logits_rows)
        self._step.only_highest = 0
        tail = ProgramC.from_buffer_copy(self._programs[self._which])
        tail.first, tail.vocab_size, tail.position_limit = starts[self._which], 0, 0
        self._call(tail)
        return self._written.output.tensor[: len(logits_rows)]

    def profile(self, arrays: ProgramStep, runs: int) -> Profile:
        """Runs the same step `runs` times and measures the time of each kind of op."""
        self._load(arrays)
        program, names = self._programs[self._which], self.names[self._which]
        num_threads = self.runtime.pool.num_threads
        ticks = np.zeros((num_threads, len(names), 2), np.uint64)
        dll = self.runtime.library.dll
        program.ticks, program.ticks_per_thread = ticks.ctypes.data, 2 * len(names)
        try:
            begin, first_tick = time.perf_counter(), dll.hr_ticks_now()
            for _ in range(runs):
                self.run(arrays)
            seconds, last_tick = time.perf_counter() - begin, dll.hr_ticks_now()
        finally:
            program.ticks = None
        to_seconds = seconds / (last_tick - first_tick) / num_threads
        working: dict[str, float] = {}
        for name, spent in zip(names, ticks[:, :, 1].sum(0, dtype=np.float64), strict=True):
            working[name] = working.get(name, 0.0) + float(spent) * to_seconds
        return Profile(runs, seconds, working, float(ticks[:, :, 0].sum(dtype=np.float64)) * to_seconds)

    def _load(self, arrays: ProgramStep) -> None:
        """Checks the types and shapes of the arrays and stores their addresses in the step."""
        self._step, self._arrays = self._own_step, arrays
        step = self._step
        num_tokens, num_seqs = len(arrays.token_ids), len(arrays.seq_lens)
        if num_tokens > (most := self._written.max_rows["tokens"]):
            raise ValueError(f"a step of {num_tokens} tokens; this program has room for {most}.")
        step.num_tokens, step.num_seqs = num_tokens, num_seqs
        step.token_ids = _address(arrays.token_ids, np.int32, (num_tokens,), "token_ids")
        step.positions = _address(arrays.positions, np.int32, (num_tokens,), "positions")
        step.slot_mapping = _address(arrays.slot_mapping, np.int64, (num_tokens,), "slot_mapping")
        step.query_start = _address(arrays.query_start, np.int32, (num_seqs + 1,), "query_start")
        step.seq_lens = _address(arrays.seq_lens, np.int32, (num_seqs,), "seq_lens")
        tables = arrays.block_tables
        step.block_table = _address(tables, np.int32, (num_seqs, tables.shape[-1]), "block_tables")
        step.block_table_stride = tables.shape[-1]
        self._load_logits(arrays.logits_rows)

    def _load_logits(self, logits_rows: np.ndarray) -> None:
        count, most = len(logits_rows), self._written.max_rows["logits"]
        if count > most:
            raise ValueError(f"{count} rows of logits; this program has room for {most}.")
        self._step.num_logits = count
        self._step.logits_rows = _address(logits_rows, np.int32, (count,), "logits_rows")

    @property
    def _which(self) -> int:
        return 0 if self._step.num_tokens <= FEW_ROWS else 1

    def _call(self, program: ProgramC) -> None:
        refusal = self._run(self.runtime.pool.handle, ctypes.byref(program), ctypes.byref(self._step))
        if not refusal:
            return
        written = self._written
        assert self._arrays is not None
        if refusal == REFUSED_TOKEN_ID:
            worst = _least_or_most(self._arrays.token_ids[: self._step.num_tokens])
            raise ValueError(f"token id {worst} is outside the vocabulary of {written.vocab_size}.")
        if refusal == REFUSED_POSITION:
            worst = _least_or_most(self._arrays.positions[: self._step.num_tokens])
            raise ValueError(f"position {worst} is outside the tables, which hold {written.max_position}.")
        raise ValueError(f"logits_rows name a token that a step of {self._step.num_tokens} tokens does not have.")


def _least_or_most(numbers: np.ndarray) -> int:
    return int(numbers.min()) if numbers.min() < 0 else int(numbers.max())


def _address(array: np.ndarray, dtype: type, shape: tuple[int, ...], name: str) -> int:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ValueError(
            f"{name} is {array.dtype} {list(array.shape)}; it must be contiguous {np.dtype(dtype)} {list(shape)}."
        )
    address: Any = array.__array_interface__["data"][0]
    return int(address)
