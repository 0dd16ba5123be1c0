"""Collectives of the ranks of one host, through memory that they share; `shared_layout` draws that memory."""

from __future__ import annotations

import ctypes
import mmap
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from headrace.executor.parallel.rank_place import Collectives, PeerError, World
from headrace.executor.parallel.shared_layout import (
    HIDDEN_TENSORS,
    LINE_BYTES,
    PAGE_BYTES,
    PIPE_SLOTS,
    SLOT_HEADER_BYTES,
    TOKEN_SLOTS,
    SharedLayout,
)
from headrace.kernels.cpu.facade import DTYPES, OUTCOMES, GroupC, PeerC, build, declare, pointer

STORE_PORT_AT = 16
"""Offset in the shared memory of a uint16: the loopback port of the gloo ranks' store, 0 until it listens."""
SPIN_US = 50


def open_shared(fd: int, world: World, rank: int, deadline_s: float) -> Collectives:
    """Implements `rank_place.open_collectives`."""
    layout = SharedLayout(world)
    memory = mmap.mmap(fd, 0)
    if len(memory) < layout.total_bytes:
        raise ValueError(f"the ranks' shared memory has {len(memory)} bytes; {layout.total_bytes} are needed")
    library = build.load()
    if library is None:
        from headrace.executor.parallel.gloo import GlooCollectives

        store = loopback_store(memory, rank, deadline_s)
        return GlooCollectives(world, rank, store, "127.0.0.1", deadline_s)
    return SharedCollectives(memory, layout, rank, library, deadline_s)


class SharedCollectives:
    """`Collectives` over one shared mapping. Used from one thread; threads of a parallel region may synchronise in
    it."""

    def __init__(
        self, memory: mmap.mmap, layout: SharedLayout, rank: int, library: build.Library, deadline_s: float
    ) -> None:
        world = layout.world
        self._layout, self._memory, self._rank, self._dll = layout, memory, rank, declare(library)
        self._pp_rank, self._tp_rank = divmod(rank, world.tp_size)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._deadline_s = deadline_s
        self._peer = PeerC(header=self._base, deadline_ms=int(deadline_s * 1000), spin_us=SPIN_US)
        stage_lines = self._base + layout.lines_at + self._pp_rank * world.tp_size * LINE_BYTES
        self.group = GroupC(
            peer=ctypes.addressof(self._peer),
            lines=stage_lines,
            parts=self._base + layout.stage_parts_at(self._pp_rank),
            part_bytes=layout.part_bytes,
            rank=self._tp_rank,
            size=world.tp_size,
        )
        """This rank's stage, as the ops of a program expect it."""
        self._dll.hr_line_own(stage_lines + self._tp_rank * LINE_BYTES)
        self._sent = self._received = self._published = self._taken = 0
        if self._pp_rank < world.pp_size - 1:
            self._own(self._pipe(self._pp_rank))
            self._own(self._token_line(1 + rank))
        if self._pp_rank > 0:
            self._own(self._pipe(self._pp_rank - 1) + LINE_BYTES)
        if rank == (world.pp_size - 1) * world.tp_size and world.pp_size > 1:
            self._own(self._token_line(0))

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._check(self._dll.hr_group_sum(ctypes.addressof(self.group), pointer(x), x.numel(), DTYPES[x.dtype]))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        rows, columns = x.shape
        out = torch.empty(rows, columns * self.group.size, dtype=x.dtype)
        row_bytes = columns * x.itemsize
        self._check(self._dll.hr_group_gather(ctypes.addressof(self.group), pointer(x), rows, row_bytes, pointer(out)))
        return out

    def barrier(self) -> None:
        self._check(self._dll.hr_group_meet(ctypes.addressof(self.group)))

    def check(self) -> None:
        """Raises PeerError when a collective within a program failed."""
        self._check(self._peer.outcome == 0)

    def send(self, x: Tensor) -> None:
        pipe = self._pipe(self._pp_rank)
        self._wait(pipe + LINE_BYTES, self._sent + 1 - PIPE_SLOTS)
        head, body = self._pipe_slot(self._pp_rank, self._sent, tuple(x.shape), x.dtype)
        head[:] = (*x.shape, DTYPES[x.dtype])
        body.copy_(x)
        self._sent += 1
        self._raise_to(pipe, self._sent)

    def receive(self, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        pipe = self._pipe(self._pp_rank - 1)
        self._wait(pipe, self._received + 1)
        head, body = self._pipe_slot(self._pp_rank - 1, self._received, shape, dtype)
        if tuple(head) != (*shape, DTYPES[dtype]):
            raise RuntimeError(f"the stage before sent {head.tolist()}; {[*shape, DTYPES[dtype]]} was expected")
        x = body.clone()
        self._received += 1
        self._raise_to(pipe + LINE_BYTES, self._received)
        return x

    def publish(self, step: int, rows: np.ndarray, token_ids: np.ndarray) -> None:
        for reader in range((self._layout.world.pp_size - 1) * self._layout.world.tp_size):
            self._wait(self._token_line(1 + reader), self._published + 1 - TOKEN_SLOTS)
        head, both = self._token_slot(self._published)
        head[:2] = step, len(rows)
        both[0, : len(rows)], both[1, : len(rows)] = rows, token_ids
        self._published += 1
        self._raise_to(self._token_line(0), self._published)

    def sampled(self, wait: bool) -> tuple[int, np.ndarray, np.ndarray] | None:
        line = self._token_line(0)
        if not self._dll.hr_line_reached(line, (self._taken + 1) & 0xFFFFFFFF):
            if not wait:
                return None
            self._wait(line, self._taken + 1)
        head, both = self._token_slot(self._taken)
        step, count = int(head[0]), int(head[1])
        rows, token_ids = both[:, :count].copy()
        self._taken += 1
        self._raise_to(self._token_line(1 + self._rank), self._taken)
        return step, rows, token_ids

    def close(self) -> None:
        """Does nothing: the mapping is freed with the last tensor over it."""

    def parts(self, turn: int, rows: int, columns: int) -> Tensor:
        """One turn's slots, [tp_size, rows, columns] float32; the rows of a slot are contiguous."""
        size, stride = self.group.size, self._layout.part_bytes // 4
        start = self._layout.stage_parts_at(self._pp_rank) + turn * size * self._layout.part_bytes
        flat = torch.frombuffer(self._memory, dtype=torch.float32, count=size * stride, offset=start)
        return flat.view(size, stride)[:, : rows * columns].view(size, rows, columns)

    def logits(self, rows: int, columns: int) -> Tensor:
        """The logits that the last stage's ranks share, [rows, columns] float32."""
        start = self._layout.logits_at
        return torch.frombuffer(self._memory, dtype=torch.float32, count=rows * columns, offset=start).view(
            rows, columns
        )

    def _own(self, line: int) -> None:
        self._dll.hr_line_own(line)

    def _pipe(self, pp_rank: int) -> int:
        """Address of the writer's counter line of the pipe out of that stage; the reader's line follows it."""
        return self._base + self._layout.pipe_at(pp_rank, self._tp_rank)

    def _pipe_slot(
        self, pp_rank: int, number: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[np.ndarray, Tensor]:
        count = int(np.prod(shape))
        most = HIDDEN_TENSORS * self._layout.world.max_tokens * self._layout.world.hidden_size
        if count > most:
            raise ValueError(f"hidden states of {list(shape)} are more than the {most} values that a pipe has room for")
        start = self._layout.pipe_at(pp_rank, self._tp_rank) + PAGE_BYTES
        start += number % PIPE_SLOTS * self._layout.pipe_slot_bytes
        head = np.frombuffer(self._memory, np.int64, 4, start)
        if not count:
            return head, torch.empty(shape, dtype=dtype)
        body = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start + SLOT_HEADER_BYTES)
        return head, body.view(shape)

    def _token_line(self, index: int) -> int:
        return self._base + self._layout.tokens_at + index * LINE_BYTES

    def _token_slot(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        start = self._layout.token_slots_at + number % TOKEN_SLOTS * self._layout.token_slot_bytes
        width = (self._layout.token_slot_bytes - SLOT_HEADER_BYTES) // 8
        both = np.frombuffer(self._memory, np.int32, 2 * width, start + SLOT_HEADER_BYTES).reshape(2, width)
        return np.frombuffer(self._memory, np.int64, 2, start), both

    def _wait(self, line: int, count: int) -> None:
        if count > 0:
            self._check(self._dll.hr_line_wait(ctypes.addressof(self._peer), line, count & 0xFFFFFFFF))

    def _raise_to(self, line: int, count: int) -> None:
        self._dll.hr_line_raise(line, count & 0xFFFFFFFF)

    def _check(self, good: int | bool) -> None:
        if good:
            return
        culprit = self._peer.culprit
        what = {
            "failed": f"rank {culprit} of {self._layout.world.size} failed",
            "gone": f"the process {culprit} of another rank is gone",
            "late": f"another rank (process {culprit}) did not come within {self._deadline_s:g} s",
        }[OUTCOMES[self._peer.outcome]]
        raise PeerError(f"rank {self._rank} cannot go on: {what}")


def loopback_store(memory: mmap.mmap, rank: int, deadline_s: float) -> dist.TCPStore:
    """A store for a host's ranks without shared collectives: rank 0 opens it and writes its port into `memory`.

    Raises PeerError when rank 0 does not open it in time.
    """
    timeout = timedelta(seconds=deadline_s)
    if rank == 0:
        from headrace.executor.parallel.gloo import open_loopback_store

        store = open_loopback_store(timeout)
        # A single word needs no memory ordering.
        memory[STORE_PORT_AT : STORE_PORT_AT + 2] = int(store.port).to_bytes(2, "little")
        return store
    end = time.monotonic() + deadline_s
    while not (port := int.from_bytes(memory[STORE_PORT_AT : STORE_PORT_AT + 2], "little")):
        if time.monotonic() > end:
            raise PeerError(f"rank {rank} cannot go on: rank 0 did not come within {deadline_s:g} s")
        time.sleep(0.001)
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
