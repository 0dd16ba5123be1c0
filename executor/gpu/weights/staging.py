"""Loads weights to a GPU, tensor by tensor through two pinned buffers, so that reading and copying overlap."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.executor.checkpoints.weights import Numbers, StoredTensor, Weights, WeightSource
from headrace.executor.gpu.device_state import Device

STAGING_BYTES = 32 << 20
NUM_BUFFERS = 2


def staged(source: WeightSource, device: Device, staging_bytes: int = STAGING_BYTES) -> Weights:
    """The weights, whose parts are already on the device; packed ones stay in the host's memory.

    A page of the file is read once, into the pinned buffer that the device is not copying from; whatever is not asked
    for (another rank's part) is never read.
    """
    weights, stage = Weights.of(source), _Stage(device, staging_bytes)

    def stored(name: str) -> StoredTensor:
        found = weights.stored(name)
        return found.reading(Numbers(lambda *part: stage.send(found.numbers.part(*part)), found.numbers.packed))

    return weights.then("copied to the device", weights.names(), stored)


class _Stage:
    def __init__(self, device: Device, staging_bytes: int) -> None:
        self._device = device
        self._buffers = [device.host_buffer(staging_bytes // 4).view(torch.uint8) for _ in range(NUM_BUFFERS)]
        self._events = [device.event() for _ in range(NUM_BUFFERS)]
        self._next = 0
        self._used = 0

    def send(self, part: Tensor) -> Tensor:
        """Returns a tensor on the device. Its copy may still be running in the current stream."""
        read = part.contiguous()
        out = torch.empty(read.shape, dtype=read.dtype, device=self._device.device)
        if not read.numel():
            return out
        source, into = read.view(-1).view(torch.uint8), out.view(-1).view(torch.uint8)
        size = len(self._buffers[0])
        for start in range(0, len(source), size):
            self._send(source[start : start + size], into[start : start + size])
        return out

    def _send(self, source: Tensor, into: Tensor) -> None:
        at = self._next
        self._next = (at + 1) % NUM_BUFFERS
        if self._used >= NUM_BUFFERS:
            self._events[at].synchronize()
        buffer = self._buffers[at][: len(source)]
        buffer.copy_(source)
        into.copy_(buffer, non_blocking=True)
        self._events[at].record()
        self._used += 1
