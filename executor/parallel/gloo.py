"""Collectives through torch.distributed's gloo, for ranks of several hosts, or of one host without a compiler."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from contextlib import suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from headrace.executor.parallel.rank_place import DEADLINE_S, PeerError, World

HIDDEN_TAG, TOKENS_TAG, RESULT_TAG = 1, 2, 3
CLOSE_S = 5.0
MOST_UNSENT = 64
"""How many sent messages are kept in memory until their receivers have taken them."""


def open_gloo(
    master: tuple[str, int],
    world: World,
    rank: int,
    *,
    host: str = "",
    listen_fd: int | None = None,
    opens_store: bool | None = None,
    deadline_s: float = DEADLINE_S,
) -> GlooCollectives:
    """Joins the world whose store rank 0 opens at `master` (address, port), and waits until all ranks have joined.

    host: this machine's address, as the other ranks reach it; by default the one from which it reaches `master`.
    GLOO_SOCKET_IFNAME names another interface. listen_fd: a socket that already listens at `master`, for rank 0 to take
    over; without it rank 0 binds one. opens_store: whether this rank opens the store, where that is not rank 0.

    Raises PeerError when not all ranks joined in time.
    """
    opens = rank == 0 if opens_store is None else opens_store
    store = open_store(master, rank, listen_fd=listen_fd, opens=opens, deadline_s=deadline_s)
    return GlooCollectives(world, rank, store, host or _own_address(master), deadline_s)


def open_store(
    master: tuple[str, int], rank: int, *, listen_fd: int | None, opens: bool, deadline_s: float
) -> dist.Store:
    """The store at `master`; the rank that `opens` it takes over `listen_fd`, or binds a socket to that address alone:
    torch would listen on all interfaces, and everybody who reaches a store may change it.

    Raises PeerError when it cannot be reached in time.
    """
    if opens and listen_fd is None:
        try:
            listen_fd = _listen_at(master)
        except OSError as error:
            raise PeerError(f"rank {rank} cannot wait for the others at {master[0]}:{master[1]}: {error}") from error
    try:
        return dist.TCPStore(
            master[0],
            master[1],
            is_master=opens,
            wait_for_workers=False,
            timeout=timedelta(seconds=deadline_s),
            master_listen_fd=listen_fd if opens else None,
        )
    except RuntimeError as error:
        raise PeerError(f"rank {rank} cannot reach rank 0 at {master[0]}:{master[1]}: {_first_line(error)}") from error


class GlooCollectives:
    """`Collectives` over a process group of the world and one of the stage. Sums equal those of `SharedCollectives`."""

    def __init__(self, world: World, rank: int, store: dist.Store, host: str, deadline_s: float) -> None:
        self._world, self._rank, self._store = world, rank, store
        self._pp_rank, self._tp_rank = divmod(rank, world.tp_size)
        self._deadline = timedelta(seconds=deadline_s)
        self._unsent: deque[tuple[dist.Work, Tensor]] = deque()
        stage = f"headrace/stage {self._pp_rank}"
        try:
            self._all = self._group(dist.PrefixStore("headrace/world", store), rank, world.size, host)
            self._stage = self._group(dist.PrefixStore(stage, store), self._tp_rank, world.tp_size, host)
        except RuntimeError as error:
            raise PeerError(f"rank {rank} of {world.size} cannot go on: {_first_line(error)}") from error

    def _group(self, store: dist.Store, rank: int, size: int, host: str) -> Any:
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs lack most of its members
        options = gloo._Options()
        options._timeout = self._deadline
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        device = gloo.create_device(interface=interface) if interface else gloo.create_device(hostname=host)
        options._devices = [device]
        return gloo(store, rank, size, options)

    def all_reduce(self, x: Tensor) -> Tensor:
        # gloo's own sum adds in an order that depends on the sizes; this order is always the same.
        parts = self._gathered(x.contiguous())
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        return total.to(x.dtype)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._gathered(x.contiguous()), dim=1)

    def barrier(self) -> None:
        self._wait(self._stage.barrier())

    def send(self, x: Tensor) -> None:
        self._send(x.contiguous(), self._rank + self._world.tp_size, HIDDEN_TAG)

    def receive(self, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        x = torch.empty(shape, dtype=dtype)
        if x.numel():
            self._wait(self._all.recv([_bytes(x)], self._rank - self._world.tp_size, HIDDEN_TAG))
        return x

    def publish(self, step: int, rows: np.ndarray, token_ids: np.ndarray) -> None:
        message = torch.zeros(2 + 2 * self._world.max_seqs, dtype=torch.int64)
        message[0], message[1] = step, len(rows)
        message[2 : 2 + 2 * len(rows)] = torch.from_numpy(np.concatenate((rows, token_ids)).astype(np.int64))
        for reader in range((self._world.pp_size - 1) * self._world.tp_size):
            self._send(message, reader, TOKENS_TAG)

    def sampled(self, wait: bool) -> tuple[int, np.ndarray, np.ndarray] | None:
        if not wait:
            return None  # gloo cannot test for a message without receiving it
        message = torch.empty(2 + 2 * self._world.max_seqs, dtype=torch.int64)
        source = (self._world.pp_size - 1) * self._world.tp_size
        self._wait(self._all.recv([_bytes(message)], source, TOKENS_TAG))
        count = int(message[1])
        both = message[2 : 2 + 2 * count].numpy().astype(np.int32).reshape(2, count)
        return int(message[0]), both[0], both[1]

    def tell(self, data: bytes) -> None:
        """Sends data from the last stage's first rank to every rank of the other stages; `told` receives it."""
        length, body = torch.tensor([len(data)]), torch.frombuffer(bytearray(data), dtype=torch.uint8)
        for reader in range((self._world.pp_size - 1) * self._world.tp_size):
            self._send(length, reader, RESULT_TAG)
            self._send(body, reader, RESULT_TAG)

    def told(self) -> bytearray:
        """Receives the next data that the last stage's first rank sent with `tell`."""
        source, length = (self._world.pp_size - 1) * self._world.tp_size, torch.empty(1, dtype=torch.int64)
        self._wait(self._all.recv([_bytes(length)], source, RESULT_TAG))
        data = bytearray(int(length))
        self._wait(self._all.recv([torch.frombuffer(data, dtype=torch.uint8)], source, RESULT_TAG))
        return data

    def least(self, value: int) -> int:
        """The minimum of `value` over all ranks of the world."""
        own = torch.tensor([value])
        values = [torch.empty_like(own) for _ in range(self._world.size)]
        self._wait(self._all.allgather([values], [own]))
        return int(torch.cat(values).min())

    def close(self) -> None:
        """Waits until sent messages are taken, as long as their receivers live."""
        end_s = time.monotonic() + CLOSE_S
        while self._unsent:
            with suppress(RuntimeError):
                self._unsent.popleft()[0].wait(timedelta(seconds=max(0.001, end_s - time.monotonic())))

    def _gathered(self, x: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(self._world.tp_size)]
        if x.numel():
            self._wait(self._stage.allgather([[_bytes(part) for part in parts]], [_bytes(x)]))
        return parts

    def _send(self, x: Tensor, to: int, tag: int) -> None:
        if not x.numel():
            return
        while len(self._unsent) >= MOST_UNSENT:
            self._wait(self._unsent.popleft()[0])
        kept = x.clone()
        try:
            self._unsent.append((self._all.send([_bytes(kept)], to, tag), kept))
        except RuntimeError as error:
            raise PeerError(f"rank {self._rank} cannot go on: {_first_line(error)}") from error

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerError(f"rank {self._rank} cannot go on: {_first_line(error)}") from error


def open_loopback_store(timeout: timedelta) -> dist.TCPStore:
    """A store for this host's other ranks, at a free port of the loopback interface."""
    fd = _listen_at(("127.0.0.1", 0))
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=fd)


def _listen_at(master: tuple[str, int]) -> int:
    """A descriptor of a new listening socket, for a store to own."""
    family, *_, address = socket.getaddrinfo(*master, type=socket.SOCK_STREAM)[0]
    with socket.create_server(address[:2], family=family) as listener:
        return listener.detach()


def _own_address(master: tuple[str, int]) -> str:
    """This machine's address on the way to `master`."""
    family, *_, address = socket.getaddrinfo(*master, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _bytes(x: Tensor) -> Tensor:
    """The same memory as uint8: gloo transfers every type alike."""
    return x.view(-1).view(torch.uint8)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
