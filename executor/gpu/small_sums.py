"""Small sums over a stage's ranks through memory of each other's GPUs, without NCCL's protocol.

One kernel copies this rank's part into memory that all GPUs of the stage have mapped, meets the others there, and reads
(one-shot) all parts, or (two-shot) reduces its own piece of them and then reads the others'. The kernels are torch's
(`torch.ops.symm_mem`, torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu); they take float32 and bfloat16
on 2, 4 or 8 GPUs of one host with access to each other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.executor.gpu.collectives import GpuCollectives, SmallSums
from headrace.executor.parallel.rendezvous import Rendezvous

logger = logging.getLogger(__name__)
SIZES = (2, 4, 8)
DTYPES = (torch.float32, torch.bfloat16)
ALIGNMENT_BYTES = 16
ONE_SHOT_BYTES = {2: 1 << 20, 4: 512 << 10, 8: 256 << 10}
"""Up to here every rank reads every part: world size times the traffic, and one meeting fewer. Not measured yet."""
LARGEST_BYTES = 8 << 20
"""Beyond this the links' bandwidth decides, which NCCL uses as well. Not measured yet."""


class SymmetricSums:
    """`SmallSums` over one symmetric buffer.

    The kernels end with a meeting of all ranks, so the buffer may be written again by whatever follows in the stream.
    """

    def __init__(self, buffer: Tensor, size: int, group_name: str, ops: Any = torch.ops.symm_mem) -> None:
        """buffer: [n] bytes of symmetric memory, which all ranks have joined; ops: the kernels."""
        self._size, self._name, self._ops = size, group_name, ops
        self._views = {dtype: buffer.view(dtype) for dtype in DTYPES}
        self._largest_bytes = buffer.nbytes
        self.description = f"symmetric memory up to {buffer.nbytes} bytes"

    def takes(self, x: Tensor) -> bool:
        start_bytes = x.storage_offset() * x.itemsize
        return (
            x.dtype in DTYPES
            and x.nbytes <= self._largest_bytes
            and x.nbytes % ALIGNMENT_BYTES == 0
            and start_bytes % ALIGNMENT_BYTES == 0
        )

    def add(self, x: Tensor) -> Tensor:
        return self.one_shot(x) if x.nbytes <= ONE_SHOT_BYTES[self._size] else self.two_shot(x)

    def one_shot(self, x: Tensor) -> Tensor:
        """`add` by one kernel that reads every part whole."""
        flat, shared = self._flat(x)
        # A thread has read what it overwrites: it copies the very elements whose sums it writes.
        self._ops.one_shot_all_reduce_copy_out(shared, flat, "sum", self._name, flat)
        return x

    def two_shot(self, x: Tensor) -> Tensor:
        """`add` by a copy, and a kernel that reduces a piece and reads the other ranks' pieces."""
        flat, shared = self._flat(x)
        shared.copy_(flat)
        self._ops.two_shot_all_reduce_out(shared, "sum", self._name, flat)
        return x

    def _flat(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x and as much of the shared memory, [x.numel()]."""
        flat = x.view(-1)
        return flat, self._views[x.dtype][: len(flat)]


def open_small_sums(
    link: GpuCollectives, meeting: Rendezvous, *, why_not: str, join: Callable[[], SymmetricSums]
) -> SmallSums | None:
    """Joins the other ranks in it where all of them can, and says in the log when they cannot.

    why_not: of this rank, "" where it can; join: waits for the stage's other ranks. All ranks of the world must call.
    """
    reason = why_not or why_no_symmetric_memory(meeting)
    if not link.agree(not reason):
        _say(meeting, reason or "another rank cannot")
        return None
    sums: SymmetricSums | None = None
    try:
        sums = join()
    except (RuntimeError, ImportError, AttributeError) as error:  # of torch's builds and drivers without it
        reason = str(error).strip().partition("\n")[0]
    if not link.agree(sums is not None):
        _say(meeting, reason or "another rank could not join")
        return None
    return sums


def why_no_symmetric_memory(meeting: Rendezvous) -> str:
    """A phrase, or "" where the stage's ranks may share their GPUs' memory as far as their places go."""
    size = meeting.world.tp_size
    stage = meeting.rank // size * size
    if size not in SIZES:
        return f"there are kernels for {', '.join(map(str, SIZES))} ranks, not for {size}"
    if stage < meeting.host_ranks.start or stage + size > meeting.host_ranks.stop:
        return "the ranks of a stage are on several hosts, or were placed one by one"
    return ""


def _say(meeting: Rendezvous, reason: str) -> None:
    if meeting.rank == 0:
        logger.warning("sums over the tensor-parallel ranks go through NCCL alone, whatever their size: %s", reason)
