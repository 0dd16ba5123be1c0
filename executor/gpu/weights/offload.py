"""Offloading: layers whose weights stay in host memory (cpu_offload_gb) and are copied to the GPU ahead of their use.

    second stream    [copy 0][copy 1]          [copy 2]          [copy 3]
    computing        ... layer 0 of them ... layer 1 ... ... layer 2 ...

These layers alternate between two buffers. A copy begins when the layer that last used its buffer is done, and a layer
begins when its copy is; both are events between the streams, so a captured step contains the copies too. The offloaded
layers are spread over the model, so that other layers compute during a copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from headrace.executor.gpu.device_state import Device
from headrace.executor.gpu.hardware.device import gib
from headrace.executor.gpu.weights.residency import PIECE_BYTES, bytes_of, pinned, storages_of, tensors_of
from headrace.ipc.failure import ModelError
from headrace.ipc.process.host import host_memory

logger = logging.getLogger(__name__)
NUM_BUFFERS = 2
ALIGNMENT = 256
"""Alignment of a weight in a buffer; torch's own allocations on a GPU have at least this."""
Wait = Callable[[], None]


class SideStream(Protocol):
    """A second stream of work on a device. `hardware.cuda.CudaSideStream` is a GPU's."""

    def copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Wait:
        """Copies, for each pair, pinned memory (the second) to the device (the first). The copies wait for all work
        given to the current stream so far, and run beside its later work. The returned function makes the current
        stream wait for the copies; it must be called before the step ends."""
        ...


def layers_to_offload(layers: range, layer_bytes: int, offload_bytes: int) -> frozenset[int]:
    """As many of a rank's layers as hold offload_bytes, at most all, spread evenly."""
    count = min(len(layers), -(-offload_bytes // max(1, layer_bytes)))
    return frozenset(layers[(i + 1) * len(layers) // count - 1] for i in range(count))


class Offload:
    """Offloads layers as they are read: `keep` must be called for each layer, in the order of the model."""

    def __init__(self, which: frozenset[int], device: Device, side: SideStream) -> None:
        self._which, self._device, self._side = which, device, side
        self._buffers: list[Tensor] = []  # at most NUM_BUFFERS: [bytes of the largest layer in it] int8
        self._copies: list[list[tuple[Tensor, Tensor]]] = []  # per offloaded layer, for `SideStream.copy`
        self._waits: dict[int, Wait] = {}
        self._has_first = False
        self.offloaded_bytes = 0

    @property
    def saved_bytes(self) -> int:
        """Device memory that offloading saves."""
        return self.offloaded_bytes - sum(len(buffer) for buffer in self._buffers)

    def keep(self, index: int, layer: Any) -> Any:
        """Returns the layer as it must be called from now on. Raises ModelError when the host has no room for it."""
        is_first, self._has_first = not self._has_first, True
        order = None
        if index in self._which:
            order = len(self._copies)
            self._copies.append(self._move(layer, order))
        return layer if order is None and not is_first else OffloadedLayer(self, layer, order, is_first)

    def begin(self) -> None:
        """Starts the first copies of a step."""
        for order in range(min(NUM_BUFFERS, len(self._copies))):
            self._waits[order] = self._side.copy(self._copies[order])

    def arrive(self, order: int) -> None:
        """Makes the current stream wait for this layer's weights."""
        self._waits.pop(order)()

    def leave(self, order: int) -> None:
        """Called when the layer's work is in the current stream: starts the copy of the next layer in its buffer."""
        following = order + NUM_BUFFERS
        if following < len(self._copies):
            self._waits[following] = self._side.copy(self._copies[following])

    def _move(self, layer: Any, order: int) -> list[tuple[Tensor, Tensor]]:
        """Moves the layer's tensors to a buffer and their contents to pinned memory; returns the pairs to copy."""
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
        """[at least size] int8; grown in place, so that earlier layers' tensors stay in it."""
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
    """A layer that waits for its weights and frees their buffer. The model's first layer starts each step's copies."""

    def __init__(self, offload: Offload, layer: Any, order: int | None, is_first: bool) -> None:
        """order: its index among the offloaded layers; None for a layer whose weights stay on the device."""
        self._offload, self._layer, self._order, self._is_first = offload, layer, order, is_first

    def __call__(self, *arguments: Any) -> Any:
        """Calls the layer, like `decoder.Layer`."""
        if self._is_first:
            self._offload.begin()
        if self._order is None:
            return self._layer(*arguments)
        self._offload.arrive(self._order)
        result = self._layer(*arguments)
        self._offload.leave(self._order)
        return result
