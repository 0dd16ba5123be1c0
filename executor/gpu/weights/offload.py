"""Layers whose weights stay in the host's memory (cpu_offload_gb), and are copied to the GPU ahead of their use.

    second stream    [copy 0][copy 1]          [copy 2]          [copy 3]
    computing        ... layer 0 of them ... layer 1 ... ... layer 2 ...

They take turns with two buffers. A copy begins when the layer that had its buffer before is done, and a layer begins
when its copy is; both are events between the streams, so a captured step holds the copies too. The layers are spread
over the model, so that others compute while a copy is under way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.executor.cpu.host import host_memory
from headrace.executor.gpu.device_state import Device
from headrace.executor.gpu.hardware.device import gib
from headrace.executor.gpu.weights.residency import PIECE_BYTES, bytes_of, pinned, storages_of, tensors_of
from headrace.ipc.failure import ModelError

logger = logging.getLogger(__name__)
NUM_BUFFERS = 2
ALIGNMENT = 256
"""Of a weight in a buffer, as of torch's own allocations on a GPU at the least."""
Wait = Callable[[], None]


class SideStream(Protocol):
    """A second stream of work on a device. `gpu_cuda.CudaSideStream` is a GPU's."""

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Wait:
        """Copies pinned memory, the second of each pair, into the first, which is the device's: after all that the
        current stream was given so far, and beside what it is given next. What is returned makes the current stream
        wait for it, and must be called before the step ends."""
        ...


def layers_to_offload(layers: range, layer_bytes: int, offload_bytes: int) -> frozenset[int]:
    """As many of a rank's layers as hold offload_bytes, at most all, spread evenly."""
    count = min(len(layers), -(-offload_bytes // max(1, layer_bytes)))
    return frozenset(layers[(i + 1) * len(layers) // count - 1] for i in range(count))


class Offload:
    """Takes over layers as they are read: `keep`, in the order of the model."""

    def __init__(self, which: frozenset[int], device: Device, side: SideStream) -> None:
        self._which, self._device, self._side = which, device, side
        self._buffers: list[Tensor] = []  # at most NUM_BUFFERS, [bytes of the largest layer in it] int8
        self._copies: list[list[tuple[Tensor, Tensor]]] = []  # per offloaded layer, for `SideStream.copy`
        self._waits: dict[int, Wait] = {}
        self._has_first = False
        self.offloaded_bytes = 0

    @property
    def saved_bytes(self) -> int:
        """Of the device's memory."""
        return self.offloaded_bytes - sum(len(buffer) for buffer in self._buffers)

    def keep(self, index: int, layer: Any) -> Any:
        """The layer as it is to be called. Raises ModelError when the host has no room for it."""
        is_first, self._has_first = not self._has_first, True
        order = None
        if index in self._which:
            order = len(self._copies)
            self._copies.append(self._move(layer, order))
        return layer if order is None and not is_first else OffloadedLayer(self, layer, order, is_first)

    def begin(self) -> None:
        """A step begins."""
        for order in range(min(NUM_BUFFERS, len(self._copies))):
            self._waits[order] = self._side.copy(self._copies[order])

    def arrive(self, order: int) -> None:
        """What the current stream is given from now on finds this layer's weights."""
        self._waits.pop(order)()

    def leave(self, order: int) -> None:
        """The layer has been given to the current stream: the next one may have its buffer after it."""
        following = order + NUM_BUFFERS
        if following < len(self._copies):
            self._waits[following] = self._side.copy(self._copies[following])

    def _move(self, layer: Any, order: int) -> list[tuple[Tensor, Tensor]]:
        """The layer's tensors lie in a buffer afterwards, and what they held in pinned memory."""
        storages = storages_of(layer, self._device.device)
        offsets, size = {}, 0
        for storage in storages:
            offsets[storage.data_ptr()] = size
            size += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        available_bytes = host_memory().available_bytes
        if size > available_bytes:
            raise ModelError(
                f"cpu_offload_gb needs {gib(size)} more of the host's memory for the next layer, after "
                f"{gib(self.offloaded_bytes)}, and {gib(available_bytes)} are available"
            )
        buffer = self._buffer(order % NUM_BUFFERS, size)
        for storage in storages:
            start = offsets[storage.data_ptr()]
            buffer[start : start + storage.nbytes()].copy_(bytes_of(storage))
        for tensor in tensors_of(layer):
            if (held := tensor.untyped_storage().data_ptr()) in offsets:
                at = offsets[held] // tensor.itemsize + tensor.storage_offset()
                tensor.set_(buffer.untyped_storage(), at, tensor.size(), tensor.stride())
        self.offloaded_bytes += size
        return self._pinned(buffer[:size])

    def _buffer(self, index: int, size: int) -> Tensor:
        """[at least size] int8; grown where it lies, so that earlier layers' tensors stay in it."""
        if index == len(self._buffers):
            self._buffers.append(torch.empty(size, dtype=torch.int8, device=self._device.device))
        buffer = self._buffers[index]
        if len(buffer) < size:
            buffer.untyped_storage().resize_(size)
            self._buffers[index] = buffer = bytes_of(buffer.untyped_storage())
        return buffer

    def _pinned(self, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
        """whole [n] int8 on the device -> its pieces, each with a pinned copy."""
        pairs = []
        for into in whole.split(PIECE_BYTES):
            piece = pinned(self._device, len(into), "cpu_offload_gb")
            self._device.to_host(piece, into)
            pairs.append((into, piece))
        done = self._device.event()
        done.record()
        done.synchronize()
        return pairs


class OffloadedLayer:
    """A layer among what its weights need; the first of the model begins the copying, wherever its own weights are."""

    def __init__(self, offload: Offload, layer: Any, order: int | None, is_first: bool) -> None:
        """order: among the offloaded layers; None for one whose weights are on the device."""
        self._offload, self._layer, self._order, self._is_first = offload, layer, order, is_first

    def __call__(self, *arguments: Any) -> Any:
        """As `decoder.Layer`."""
        if self._is_first:
            self._offload.begin()
        if self._order is None:
            return self._layer(*arguments)
        self._offload.arrive(self._order)
        result = self._layer(*arguments)
        self._offload.leave(self._order)
        return result
