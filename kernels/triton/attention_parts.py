"""The division of a decoding sequence's keys among programs (split-KV), and the buffers of their partial results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.triton.configs import DeviceProperties

PROGRAMS_PER_MULTIPROCESSOR = 2
"""Wanted decode programs per multiprocessor, each of which keeps a few tiles of keys in flight."""
MOST_PARTS = 128
"""Enough for one long sequence to use a whole H200 even with one key/value head, as each of eight ranks may have."""
PARTS_AT_ONCE = 32
"""Parts that a program of four warps merges at a time, if there are more than FEW_PARTS."""
FEW_PARTS = 4
"""Up to this many parts are merged by a program of one warp: large batches have many sequences of few parts."""


@dataclass(frozen=True, eq=False)
class SoftmaxParts:
    """Buffers for the softmaxes over parts of the keys."""

    values: Tensor  # [num_seqs, num_heads, num_parts, head_dim] float32
    stats: Tensor  # [num_seqs, num_heads, num_parts, 2] float32

    @classmethod
    def empty(cls, query: Tensor, num_seqs: int, num_parts: int) -> SoftmaxParts:
        _, num_heads, head_dim = query.shape
        shape = (num_seqs, num_heads, num_parts)
        return cls(
            torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device),
            torch.empty((*shape, 2), dtype=torch.float32, device=query.device),
        )

    @property
    def count(self) -> int:
        return self.values.shape[2]


def num_parts_for(device: DeviceProperties, num_programs: int) -> int:
    """The number of parts that keys are divided into. num_programs: the programs of an undivided launch."""
    parts = device.num_multiprocessors * PROGRAMS_PER_MULTIPROCESSOR // max(1, num_programs)
    if parts > PARTS_AT_ONCE:
        parts = min(MOST_PARTS, parts - parts % PARTS_AT_ONCE)
    return max(1, parts)
