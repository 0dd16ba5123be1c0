"""Moves a GPU's weights and cache between the GPU and host memory, drops them, and brings them back.

    on the GPU --- sleep 1, or new weights are read ---> aside --- wake up, or they failed ---> on the GPU
    on the GPU --- sleep 2 -------------------------> dropped --- wake up: read again -------> on the GPU

New weights take the memory of the old ones, since there is seldom room for a second model beside model and cache. After
any move, graphs are captured anew.

Tensor objects stay the same; only the storage beneath them is freed and allocated again. So objects that hold tensors
need not know, but the tensors' addresses change.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.executor.gpu.device_state import Device
from headrace.executor.gpu.hardware.device import gib
from headrace.executor.gpu.runner import GpuRunner
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.kv_cache import KVCache
from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.ipc.control import ASLEEP
from headrace.ipc.failure import HeadraceError, ModelError
from headrace.ipc.process.host import host_memory

Read = Callable[[], Decoder]
"""Reads the weights of a checkpoint that has been checked. Raises ModelError, and RuntimeError when memory runs out."""
PIECE_BYTES = 64 << 20
"""Pinned memory is allocated in pieces of this size: torch rounds each up to a power of two."""


class Memory(Protocol):
    """The part of `executor.gpu.rank.Backend` that is used here."""

    device: torch.device

    def host_side(self) -> Device: ...
    def memory(self) -> tuple[int, int]: ...


class WeightResidency:
    """Owns the model after `allocate`. Used from one thread, with no step in flight."""

    def __init__(
        self, decoder: Decoder, cache: KVCache, runner: GpuRunner, backend: Memory, find: Callable[[str | None], Read]
    ) -> None:
        """find: finds the checkpoint at a path, the model's own for "", or the one in use for None, and returns the
        function that reads it."""
        self.decoder = decoder
        self._cache, self._runner, self._backend, self._find = cache, runner, backend, find
        self._asleep: frozenset[str] = frozenset()
        self._aside: HostCopy | None = None
        self._prepared: Decoder | None = None

    @property
    def is_awake(self) -> bool:
        """Weights and cache are there, so that steps can be computed."""
        return not self._asleep and self._aside is None

    @property
    def has_weights(self) -> bool:
        """Whether the weights' memory is there."""
        return "weights" not in self._asleep

    def sleep(self, level: int) -> None:
        self._put_aside("sleep level 1" if level == 1 else "")
        self._cache.release()
        self._asleep = ASLEEP
        self._backend.memory()  # returns memory to the driver, for other processes

    def wake_up(self, tags: frozenset[str]) -> None:
        for tag in sorted(tags & self._asleep, reverse=True):  # weights first
            if tag == "weights":
                self._wake_weights()
            else:
                check_room(self._cache.nbytes, self._backend.memory(), "waking the cache")
                self._cache.restore()
            self._asleep -= {tag}

    def _wake_weights(self) -> None:
        if self._aside is None:
            self._use(self._read_safely(self._find(None)))
            return
        check_room(self._aside.nbytes, self._backend.memory(), "waking the weights")
        self._aside.restore()
        self._aside = None

    def prepare(self, path: str) -> None:
        read = self._find(path)
        self._put_aside("to keep the old weights while new ones are read")
        assert self._aside is not None, "they have just been put aside"
        try:
            self._prepared = self._read_safely(read)
        except HeadraceError:
            self.use_prepared(False)
            raise

    def use_prepared(self, is_wanted: bool) -> None:
        prepared, self._prepared = self._prepared, None
        aside, self._aside = self._aside, None
        if aside is None:
            return
        if is_wanted and prepared is not None:
            self._use(prepared)
            return
        prepared = None
        gc.collect()
        self._backend.memory()
        aside.restore()

    def _put_aside(self, why: str) -> None:
        """Frees the weights' memory, after a copy to host memory if there is a reason `why`, else dropping them."""
        storages = storages_of(self.decoder, self._backend.device)
        self._aside = HostCopy(storages, self._backend.host_side(), why) if why else None
        self._runner.graphs.forget()
        self._backend.memory()  # waits for pending work
        free(storages)
        self._backend.memory()

    def _read_safely(self, read: Read) -> Decoder:
        """Reads, or raises HeadraceError and leaves nothing of what was read in memory."""
        problem: HeadraceError
        try:
            return read()
        except HeadraceError as error:
            problem = error.with_traceback(None)
        except Exception as error:  # such as lack of device memory, or a damaged file
            problem = ModelError(f"the weights could not be read: {str(error).partition(chr(10))[0]}")
        gc.collect()
        self._backend.memory()
        raise problem

    def _use(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._runner.use(decoder)


def tensors_of(root: object) -> list[Tensor]:
    """All tensors that one of Headrace's objects holds in attributes, containers and the objects in them, each once.

    Communication between ranks (`RankCoordinates`) belongs to no weights and is left out.
    """
    seen: set[int] = set()
    return list(_tensors(root, seen))


def _tensors(found: object, seen: set[int]) -> Iterator[Tensor]:
    if id(found) in seen or isinstance(found, RankCoordinates):
        return
    seen.add(id(found))
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from _tensors(value, seen)
    elif isinstance(found, (tuple, list)):
        for value in found:
            yield from _tensors(value, seen)
    elif type(found).__module__.startswith("headrace."):
        yield from _tensors(getattr(found, "__dict__", {}), seen)


def storages_of(root: object, device: torch.device) -> list[torch.UntypedStorage]:
    """The storages on that device of all tensors that an object holds, each once; pinned memory belongs to the host."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors_of(root):
        if tensor.device.type == device.type and not tensor.is_pinned():
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage
    return [storage for storage in found.values() if storage.nbytes()]


def free(storages: Sequence[torch.UntypedStorage]) -> None:
    """Returns their memory to torch's allocator; no pending work may use it."""
    for storage in storages:
        storage.resize_(0)


class HostCopy:
    """A copy of the contents of storages in host memory."""

    def __init__(self, storages: Sequence[torch.UntypedStorage], device: Device, what: str) -> None:
        """Returns once the copy is complete. Raises HeadraceError, naming `what`, when the host has no room for it."""
        self._storages, self._sizes = tuple(storages), [storage.nbytes() for storage in storages]
        self._device = device
        self.nbytes = sum(self._sizes)
        available_bytes = host_memory().available_bytes
        if self.nbytes > available_bytes:
            raise HeadraceError(
                f"{what} needs {gib(self.nbytes)} of the host's memory, and {gib(available_bytes)} are available"
            )
        self._moves: list[tuple[Tensor, int, int]] = []  # pinned memory, index of the storage, offset in bytes
        room = torch.empty(0, dtype=torch.int8)
        for index, storage in enumerate(storages):
            source, at = bytes_of(storage), 0
            while at < len(source):
                if not len(room):
                    room = pinned(device, PIECE_BYTES, what)
                piece, room = room.tensor_split([min(len(room), len(source) - at)])
                device.to_host(piece, source[at : at + len(piece)])
                self._moves.append((piece, index, at))
                at += len(piece)
        self._wait()

    def restore(self) -> None:
        """Allocates the storages again and restores their contents. Returns once that is done."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        for piece, index, at in self._moves:
            bytes_of(self._storages[index])[at : at + len(piece)].copy_(piece, non_blocking=True)
        self._wait()

    def _wait(self) -> None:
        done = self._device.event()
        done.record()
        done.synchronize()


def pinned(device: Device, size: int, what: str) -> Tensor:
    """[size] int8 of pinned memory. Raises HeadraceError if refused: a limit may be lower than the free memory."""
    try:
        return device.host_buffer(-(-size // 4)).view(torch.int8)[:size]
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise HeadraceError(f"{what} needs pinned memory of the host, which cannot be allocated: {why}") from error


def check_room(needed_bytes: int, memory: tuple[int, int], what: str) -> None:
    """memory: free and total bytes. Raises HeadraceError when another process has taken the released memory."""
    free_bytes, total_bytes = memory
    if needed_bytes > free_bytes:
        raise HeadraceError(
            f"{what} needs {gib(needed_bytes)}, and {gib(free_bytes)} of the GPU's {gib(total_bytes)} are free: "
            "another process has taken them"
        )


def bytes_of(storage: Any) -> Tensor:
    """[nbytes] int8 on the storage itself."""
    return torch.empty(0, dtype=torch.int8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
