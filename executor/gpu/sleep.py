"""A GPU's memory given back and taken again: what must not be lost waits in the host's pinned memory meanwhile.

Tensors stay the objects that they are, and lose and regain the storage beneath them, so nothing that holds a tensor
need know. Their addresses change: graphs that were captured before are of no use afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.executor.cpu.host import host_memory
from headrace.executor.gpu.device import gib
from headrace.executor.gpu.device_state import Device
from headrace.executor.parallel.rank_place import RankPlace
from headrace.ipc.failure import HeadraceError

PIECE_BYTES = 64 << 20
"""Pinned memory is taken in pieces of this size: torch rounds each up to a power of two."""


def tensors_of(root: object) -> list[Tensor]:
    """Every tensor that an object of ours holds, by its attributes, containers and the objects in them, each once.

    What ranks talk through (`RankPlace`) belongs to nobody's weights and is left out.
    """
    seen: set[int] = set()
    return list(_tensors(root, seen))


def _tensors(found: object, seen: set[int]) -> Iterator[Tensor]:
    if id(found) in seen or isinstance(found, RankPlace):
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
    """The memory on that device of all tensors that an object holds, each storage once; pinned memory is the host's."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors_of(root):
        if tensor.device.type == device.type and not tensor.is_pinned():
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage
    return [storage for storage in found.values() if storage.nbytes()]


def free(storages: Sequence[torch.UntypedStorage]) -> None:
    """Gives their memory back to torch's allocator; nothing may be under way on it."""
    for storage in storages:
        storage.resize_(0)


class HostCopy:
    """What some storages held when this was made."""

    def __init__(self, storages: Sequence[torch.UntypedStorage], device: Device, what: str) -> None:
        """Returns once it is copied. Raises HeadraceError, naming `what`, when the host has no room for it."""
        self._storages, self._sizes = tuple(storages), [storage.nbytes() for storage in storages]
        self._device = device
        self.nbytes = sum(self._sizes)
        available_bytes = host_memory().available_bytes
        if self.nbytes > available_bytes:
            raise HeadraceError(
                f"{what} needs {gib(self.nbytes)} of the host's memory, and {gib(available_bytes)} are available"
            )
        self._moves: list[tuple[Tensor, int, int]] = []  # pinned memory, which storage's, from which byte on
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
        """Gives the storages memory again, and what they held. Returns once that is done."""
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
    """[size] int8 of pinned memory. Raises HeadraceError when the host gives no more, as a limit may be lower than
    what is free."""
    try:
        return device.host_buffer(-(-size // 4)).view(torch.int8)[:size]
    except RuntimeError as error:
        why = str(error).partition("\n")[0]
        raise HeadraceError(f"{what} needs pinned memory of the host, which cannot be had: {why}") from error


def check_room(needed_bytes: int, memory: tuple[int, int], what: str) -> None:
    """memory: free and total bytes. Raises HeadraceError when another process has taken what was given back."""
    free_bytes, total_bytes = memory
    if needed_bytes > free_bytes:
        raise HeadraceError(
            f"{what} needs {gib(needed_bytes)}, and {gib(free_bytes)} of the GPU's {gib(total_bytes)} are free: "
            "another process has taken them"
        )


def bytes_of(storage: Any) -> Tensor:
    """[nbytes] int8, the storage itself."""
    return torch.empty(0, dtype=torch.int8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
