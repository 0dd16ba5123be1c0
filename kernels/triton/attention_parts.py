"""How the keys of sequences of one token are divided among programs, and the room for what each leaves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.triton.configs import Device

PROGRAMS_PER_MULTIPROCESSOR = 2
"""Decode programs wanted at once, each of which keeps a few tiles of keys in flight."""
MOST_PARTS = 128
"""With one key/value head, as on each of eight ranks, a single long sequence still has programs for all of an H200."""
PARTS_AT_ONCE = 32
"""Parts that are merged together by a program of four warps, where there are more than FEW_PARTS."""
FEW_PARTS = 4
"""So many are merged by a program of one warp: large batches have few parts of each sequence, and many sequences."""


@dataclass(frozen=True, eq=False)
class Parts:
    """Room for softmaxes over parts of the keys."""

    values: Tensor  # [num_seqs, num_heads, num_parts, head_dim] float32
    stats: Tensor  # [num_seqs, num_heads, num_parts, 2] float32

    @classmethod
    def empty(cls, query: Tensor, num_seqs: int, num_parts: int) -> Parts:
        _, num_heads, head_dim = query.shape
        shape = (num_seqs, num_heads, num_parts)
        return cls(
            torch.empty((*shape, head_dim), dtype=torch.float32, device=query.device),
            torch.empty((*shape, 2), dtype=torch.float32, device=query.device),
        )

    @property
    def count(self) -> int:
        return self.values.shape[2]


def num_parts_for(device: Device, num_programs: int) -> int:
    """How many parts keys are divided into when there are so many programs without that."""
    parts = device.num_multiprocessors * PROGRAMS_PER_MULTIPROCESSOR // max(1, num_programs)
    if parts > PARTS_AT_ONCE:
        parts = min(MOST_PARTS, parts - parts % PARTS_AT_ONCE)
    return max(1, parts)
