"""What tests of the GPU runner share: a small model in tensor operations alone, and devices that are awkward on
purpose."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headrace.executor.device_state import Device, HostDevice
from headrace.executor.inputs import StepInputs

BLOCK_SIZE = 4
NUM_ROWS = 6
MAX_MODEL_LEN = 32
VOCAB_SIZE = 50
NUM_HASHES = 997
POISON = 13
"""A token from which on the small model's logits are NaN."""


class TensorHashModel:
    """Logits by a hash of all tokens in context, each read from its cache slot; a wrong slot gives other tokens.

    No operation depends on the values of its inputs, so it can be captured.
    """

    choose = None

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self._factors = torch.randint(1, NUM_HASHES, (MAX_MODEL_LEN,), generator=generator)
        self._logits = torch.randn(NUM_HASHES, VOCAB_SIZE, generator=generator) * 2
        self._logits[:, POISON] = -torch.inf

    def forward(self, inputs: StepInputs, kv_cache: Tensor) -> Tensor:
        """kv_cache: [num_slots] int64 token ids. Returns [num_tokens, 1] int64; negative with POISON in context."""
        kv_cache[inputs.slot_mapping] = inputs.token_ids
        tokens = torch.arange(len(inputs.token_ids))
        seqs = torch.searchsorted(inputs.query_start[1:], tokens, right=True)
        tables = inputs.block_tables[seqs].long()
        slots = (tables[:, :, None] * inputs.block_size + torch.arange(inputs.block_size)).flatten(1)
        seen = torch.arange(slots.shape[1]) <= inputs.positions[:, None]
        context = torch.where(seen, kv_cache[slots], 0)
        hashes = (context * self._factors[: slots.shape[1]] + seen).sum(1) % NUM_HASHES
        return torch.where((context == POISON).any(1), -1, hashes)[:, None]

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.where(hidden < 0, torch.nan, self._logits[hidden[:, 0].clamp(min=0)])


def new_cache(num_blocks: int = 1000) -> Tensor:
    """Full of tokens that no request has, so that whatever reads a slot too early shows."""
    return torch.full((num_blocks * BLOCK_SIZE,), VOCAB_SIZE + 1)


class LateEvent:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def record(self) -> None:
        self._waiting, self._device.copies = self._device.copies, []

    def synchronize(self) -> None:
        self._device.num_waits += 1
        for into, snapshot in self._waiting:
            into.copy_(snapshot)
        self._waiting = []


class LateDevice(HostDevice):
    """Copies to the host arrive only when an event is waited for; until then their place holds nonsense."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.num_waits = 0

    def event(self) -> LateEvent:
        return LateEvent(self)

    def to_host(self, into: Tensor, source: Tensor) -> None:
        into.fill_(-77)
        self.copies.append((into, source.clone()))


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


__all__ = ["Device"]
