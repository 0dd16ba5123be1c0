"""The device's state of each running request between steps, and how the host changes it.

The whole state is one int32 tensor, so that a step's changes are sent as one list of (index, word) pairs: one copy from
pinned memory and one scatter, however many columns and rows change. A steady decode changes nothing.

    words: | seed | top_p | min_p | block_table | last_token | num_computed | ... | adapters | states | batch_rows |
             2 words a row, first so    W words    1 word each                      3 words    below    the rows of this
             that they are aligned      a group                                     of each             step's batch

    the states of a row, as in `kernels.reference.states.StateBatch`, for models that keep one per sequence:
           | own pages | source | snapshot | has_source | replayed | committed | snapshot_end |
             P words     P words  P words    1 word each

Row `num_rows` belongs to no request: batches are padded with it. Its block table is all block 0, the null block, and
its num_computed stays 0, so a padding row reads and writes slot 0 of block 0, which no request ever holds. Its state
begins as zeros and is written to that block too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.executor.sampling.columns import GREEDY_BELOW
from headrace.executor.step.states import StateArrays
from headrace.ipc.adapters import RowAdapter
from headrace.ipc.messages import Sampling


class DeviceEvent(Protocol):
    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        """Whether the device has passed it."""
        ...


class Mark(DeviceEvent, Protocol):
    """An event whose time can be read once the device has passed it."""

    def seconds_since(self, earlier: Any) -> float:
        """Seconds by the device's clock; `earlier` is a mark of the same device that has passed too."""
        ...


class Device(Protocol):
    """How the host sends to a device and reads from it. `HostDevice` is the CPU, `hardware.cuda.CudaDevice` a GPU."""

    device: torch.device

    def host_buffer(self, num_elements: int) -> Tensor:
        """[num_elements] int32 of host memory; pinned for a GPU."""
        ...

    def event(self) -> DeviceEvent:
        """An event to record in the stream of work; waiting for it waits for all work before it."""
        ...

    def mark(self) -> Mark:
        """An event that records its time too."""
        ...

    def to_host(self, into: Tensor, source: Tensor) -> None:
        """Copies in the stream, without waiting. Both are contiguous, of one size; `into` is part of a host_buffer."""
        ...

    def to_device(self, source: Tensor) -> Tensor:
        """A copy on the device of a part of a host_buffer, which must not change before an event recorded later."""
        ...


class _Passed:
    """An event of a device without asynchronous work: it has always passed."""

    at_s = 0.0

    def record(self) -> None:
        self.at_s = time.monotonic()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def seconds_since(self, earlier: _Passed) -> float:
        return self.at_s - earlier.at_s


class HostDevice:
    """The CPU: copies are complete when they return."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def host_buffer(self, num_elements: int) -> Tensor:
        return torch.zeros(num_elements, dtype=torch.int32)

    def event(self) -> DeviceEvent:
        return _Passed()

    def mark(self) -> Mark:
        return _Passed()

    def to_host(self, into: Tensor, source: Tensor) -> None:
        into.copy_(source)

    def to_device(self, source: Tensor) -> Tensor:
        return source.clone()


WIDE_COLUMNS = ("seed", "top_p", "min_p")
"""int64 and float64: two words a row. The numbers are bit-identical to those that the host's sampler uses."""
COLUMNS = (
    *("last_token", "num_computed", "prompt_len", "temperature", "top_k"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""One word a row."""
ADAPTER_COLUMNS = ("adapter_slot", "adapter_scale", "adapter_from")
"""One word for each adapter that a row may have; those of all rows' first adapters lie together."""
STATE_FLAGS = ("has_source", "replayed", "committed", "snapshot_end")
"""The last words of a row's part of `states`."""
FLOATS = ("temperature", "presence_penalty", "frequency_penalty", "repetition_penalty")


@dataclass(frozen=True)
class StateShape:
    num_rows: int
    """max_num_seqs; the padding row is added to it."""
    max_blocks: int
    """Most blocks of one request in one cache group."""
    num_groups: int = 1
    most_adapters: int = 0
    """Of one request."""
    state_pages: int = 0
    """Of the state of one sequence; 0: the model keeps none."""

    @property
    def state_words(self) -> int:
        """Of one row's part of `states`."""
        return 3 * self.state_pages + len(STATE_FLAGS) if self.state_pages else 0

    def offsets(self) -> tuple[dict[str, int], int]:
        """Each column's offset in words, and the total number of words."""
        rows, at, offsets = self.num_rows + 1, 0, dict[str, int]()
        for name in WIDE_COLUMNS:
            offsets[name], at = at, at + 2 * rows
        offsets["block_table"], at = at, at + self.num_groups * rows * self.max_blocks
        for name in COLUMNS:
            offsets[name], at = at, at + rows
        for name in ADAPTER_COLUMNS:
            offsets[name], at = at, at + self.most_adapters * rows
        offsets["states"], at = at, at + self.state_words * rows
        offsets["batch_rows"], at = at, at + rows
        return offsets, at


class DeviceState:
    """The tensors of the state. Written by `Deltas.ship` and by the steps themselves; their addresses never change."""

    def __init__(self, shape: StateShape, device: torch.device) -> None:
        self.shape = shape
        rows = shape.num_rows + 1
        offsets, num_words = shape.offsets()
        self.words = torch.zeros(num_words, dtype=torch.int32, device=device)

        def column(name: str, width: int = 1) -> Tensor:
            return self.words[offsets[name] : offsets[name] + rows * width]

        self.seed = column("seed", 2).view(torch.int64)  # [num_rows + 1], the bits of a uint64
        self.top_p = column("top_p", 2).view(torch.float64)  # [num_rows + 1]
        self.min_p = column("min_p", 2).view(torch.float64)  # [num_rows + 1]
        tables = column("block_table", shape.num_groups * shape.max_blocks)
        self.block_tables = tables.view(shape.num_groups, rows, shape.max_blocks)
        self.last_token = column("last_token")  # [num_rows + 1]: the last known token, which a decode computes
        self.num_computed = column("num_computed")  # [num_rows + 1]
        self.prompt_len = column("prompt_len")  # [num_rows + 1]
        self.temperature = column("temperature").view(torch.float32)  # [num_rows + 1], 0 is greedy
        self.top_k = column("top_k")  # [num_rows + 1]
        self.presence_penalty = column("presence_penalty").view(torch.float32)
        self.frequency_penalty = column("frequency_penalty").view(torch.float32)
        self.repetition_penalty = column("repetition_penalty").view(torch.float32)
        most = shape.most_adapters
        slots, scales, firsts = (column(name, most).view(most, rows) for name in ADAPTER_COLUMNS)
        self.adapter_slot = slots  # [most_adapters, num_rows + 1], -1 for none
        self.adapter_scale = scales.view(torch.float32)  # [most_adapters, num_rows + 1]
        self.adapter_from = firsts  # [most_adapters, num_rows + 1]: the position from which it applies
        self.adapter_slot.fill_(-1)
        self.states = column("states", shape.state_words).view(rows, shape.state_words)
        if shape.state_pages:
            self.states[:] = torch.tensor(first_states(shape)).to(device)
        self.batch_rows = column("batch_rows")  # [num_rows + 1]: rows of the decode batch, then the padding row
        self.repetition_penalty.fill_(1.0)
        self.batch_rows.fill_(shape.num_rows)

    @property
    def padding_row(self) -> int:
        return self.shape.num_rows

    @property
    def nbytes(self) -> int:
        return self.words.nbytes


def first_states(shape: StateShape) -> np.ndarray:
    """[state_words] int32: of a row before its first step, and of the padding row."""
    words = np.zeros(shape.state_words, np.int32)
    words[-2:] = 1, -1  # it computes one token, and keeps no snapshot
    return words


ALIGNED_WORDS = 4
"""16 bytes: Triton distinguishes no larger alignment of a pointer."""


class Staging:
    """A ring of pinned buffers through which the host sends to the device.

    A buffer is rewritten only after the event recorded at its last copy has passed; with one buffer more than the steps
    in flight need, that never waits.
    """

    def __init__(self, device: Device, num_buffers: int, num_words: int = 1 << 16) -> None:
        """num_words: enough for most prefill steps: allocating larger pinned buffers later makes the device wait."""
        self._device = device
        self._buffers = [device.host_buffer(num_words) for _ in range(num_buffers)]
        self._read = [device.event() for _ in range(num_buffers)]
        self._used = [False] * num_buffers
        self._at = 0

    def send(self, *parts: np.ndarray) -> list[Tensor]:
        """Sends the parts, of 4-byte or 8-byte types, to the device in one copy; returns int32 tensors.

        A part of an 8-byte type becomes twice as many words. Each part begins at a multiple of 16 bytes: for a pointer
        of another alignment Triton compiles the kernel again, which would stop all requests for seconds.
        """
        words = [np.ascontiguousarray(part).view(np.int32) for part in parts]
        lengths = [len(part) for part in words]
        starts = list(accumulate((-(-length // ALIGNED_WORDS) * ALIGNED_WORDS for length in lengths), initial=0))
        total = starts.pop()
        at = self._at = (self._at + 1) % len(self._buffers)
        if self._used[at]:
            self._read[at].synchronize()
        if len(self._buffers[at]) < total:
            self._buffers[at] = self._device.host_buffer(1 << (total - 1).bit_length())
        buffer = self._buffers[at]
        host = buffer.numpy()
        for start, part in zip(starts, words, strict=True):
            host[start : start + len(part)] = part
        sent = self._device.to_device(buffer[:total])
        self._read[at].record()
        self._used[at] = True
        return [sent[start : start + length] for start, length in zip(starts, lengths, strict=True)]


class Deltas:
    """Collects a step's changes of the state, then ships them. No word may be set twice between two ships."""

    def __init__(self, state: DeviceState, staging: Staging) -> None:
        self._state, self._staging = state, staging
        self._offsets, _ = state.shape.offsets()
        self._indices: list[np.ndarray] = []
        self._values: list[np.ndarray] = []
        self.num_shipped = 0
        """Words changed so far, for the per-step breakdown and for tests."""

    def set(self, column: str, rows: np.ndarray, values: np.ndarray) -> None:
        """Sets a one-word column to values [n] for rows [n]."""
        self._put(self._offsets[column] + rows, values.astype(np.float32 if column in FLOATS else np.int32))

    def set_blocks(self, tables: np.ndarray, places: np.ndarray, block_ids: np.ndarray) -> None:
        """Sets entries `places` [n] of tables [n], which are numbered as in `StepPlan`, to block_ids [n]."""
        shape = self._state.shape
        rows = tables.astype(np.int64) + tables // shape.num_rows  # each group has a padding row too
        self._put(self._offsets["block_table"] + rows * shape.max_blocks + places, block_ids)

    def enter(self, row: int, sampling: Sampling, seed: int) -> None:
        """Sets the sampling parameters of a row that is assigned to a new request."""
        at = np.array([row])
        wide = (
            np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64), np.array([sampling.top_p]), np.array([sampling.min_p])
        )  # fmt: skip
        for name, value in zip(WIDE_COLUMNS, wide, strict=True):
            self._put(self._offsets[name] + 2 * row + np.arange(2), value)
        greedy = sampling.temperature < GREEDY_BELOW
        self.set("temperature", at, np.array([0.0 if greedy else sampling.temperature]))
        for name in ("top_k", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            self.set(name, at, np.array([getattr(sampling, name)]))

    def set_adapters(self, row: int, adapters: Sequence[RowAdapter]) -> None:
        """Sets the adapters of a row that is assigned to a new request."""
        shape, none = self._state.shape, RowAdapter(-1, 0.0)
        given = [*adapters, *[none] * (shape.most_adapters - len(adapters))]
        at = row + np.arange(shape.most_adapters) * (shape.num_rows + 1)
        values = (
            np.array([each.slot for each in given], np.int32),
            np.array([each.scale for each in given], np.float32),
            np.array([each.from_position for each in given], np.int32),
        )
        for name, each in zip(ADAPTER_COLUMNS, values, strict=True):
            self._put(self._offsets[name] + at, each)

    def set_states(self, rows: np.ndarray, columns: np.ndarray, words: np.ndarray) -> None:
        """Sets words [n] of the rows' parts of `states`."""
        self._put(self._offsets["states"] + rows.astype(np.int64) * self._state.shape.state_words + columns, words)

    def ship(self) -> None:
        """Starts the copy and the scatter, if anything has changed."""
        if not self._indices:
            return
        indices, values = np.concatenate(self._indices), np.concatenate(self._values)
        self._indices, self._values = [], []
        self.num_shipped += len(indices)
        at, words = self._staging.send(indices, values)
        self._state.words.index_copy_(0, at.view(torch.int64), words)

    def _put(self, indices: np.ndarray, values: np.ndarray) -> None:
        self._indices.append(indices.astype(np.int64))
        self._values.append(np.ascontiguousarray(values).view(np.int32))


class DecodeRows:
    """The host's copy of `DeviceState.batch_rows`, so that only changed entries are shipped."""

    def __init__(self, state: DeviceState, deltas: Deltas) -> None:
        self._state, self._deltas = state, deltas
        self._held = np.full(state.shape.num_rows + 1, state.padding_row, np.int32)

    def place(self, rows: np.ndarray, size: int) -> None:
        """Makes the decode batch of `size` entries consist of rows, then padding, once the deltas are shipped."""
        wanted = np.full(size, self._state.padding_row, np.int32)
        wanted[: len(rows)] = rows
        changed = np.flatnonzero(self._held[:size] != wanted)
        if changed.size:
            self._deltas.set("batch_rows", changed, wanted[changed])
            self._held[:size] = wanted

    def clear(self) -> None:
        """Makes all entries padding, immediately."""
        self._state.batch_rows.fill_(self._state.padding_row)
        self._held[:] = self._state.padding_row


class DecodeStates:
    """The host's copy of `DeviceState.states`, so that only changed words are shipped: a row's pages with its first
    decode, and two words at each end of a block at which a snapshot is stored."""

    def __init__(self, state: DeviceState, deltas: Deltas) -> None:
        self._deltas, self._pages = deltas, state.shape.state_pages
        self._held = np.tile(first_states(state.shape), (state.shape.num_rows, 1))

    @staticmethod
    def can(states: StateArrays) -> bool:
        """Whether a decode can store the snapshots: one of each row."""
        return len(states.snapshot_sequences) < 2 or bool((np.diff(states.snapshot_sequences) > 0).all())

    def place(self, states: StateArrays) -> None:
        """Makes `states` the inputs of the rows that it is of, once the deltas are shipped."""
        held, pages = self._held[states.rows], self._pages
        wanted = held.copy()
        wanted[:, :pages], wanted[:, pages : 2 * pages] = states.pages, states.sources
        wanted[:, -4], wanted[:, -3], wanted[:, -1] = states.has_source, states.replayed, -1
        wanted[states.snapshot_sequences, 2 * pages : 3 * pages] = states.snapshot_pages
        wanted[states.snapshot_sequences, -1] = states.snapshot_ends
        at, columns = np.nonzero(wanted != held)
        if at.size:
            self._deltas.set_states(states.rows[at], columns, wanted[at, columns])
            self._held[states.rows] = wanted
