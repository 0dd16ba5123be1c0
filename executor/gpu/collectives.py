"""Collectives of ranks on GPUs: device to device for tensors, and gloo for messages between hosts.

    sums, gathers of a stage   its process group, on the current stream; small sums through symmetric memory
    hidden states              the world's process group, from a stage to the next
    sampled tokens, agreement  gloo, between the hosts' processes: the core reads a row's token before it plans the
                               row's next step, so sending tokens from device to device would not be faster

The device's operations never wait for the host, so all of them can be captured in a graph. If a rank is lost, the
others' devices keep waiting: their hosts notice that a step takes too long, or the supervisor ends them.

Small sums avoid NCCL's protocol: one kernel copies this rank's part into memory that all GPUs of the stage have mapped,
synchronises with the others, and either reads all parts (one-shot), or reduces its own piece of them and then reads the
others' (two-shot). The kernels are torch's (`torch.ops.symm_mem`,
torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu); they support float32 and bfloat16 on 2, 4 or 8 GPUs of
one host with access to each other's memory.

`open_nccl` needs GPUs; everything else here also runs with gloo in place of NCCL.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from headrace.executor.gpu.graphs import Capturer, Replay
from headrace.executor.parallel.gloo import GlooCollectives
from headrace.executor.parallel.rank_place import PeerError
from headrace.executor.parallel.rendezvous import Rendezvous
from headrace.ipc.failure import HeadraceError

logger = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
HIDDEN_TAG = 3
PEERS_FAULT = ("remote", "by peer", "timed out", "connection")
"""Words in errors of NCCL and gloo that mean that another rank is gone."""
SIZES = (2, 4, 8)
DTYPES = (torch.float32, torch.bfloat16)
ALIGNMENT_BYTES = 16
ONE_SHOT_BYTES = {2: 1 << 20, 4: 512 << 10, 8: 256 << 10}
"""Up to this size, by number of ranks, one-shot: each rank reads every part, which takes world size times the traffic
but one synchronisation less. Not measured yet."""
LARGEST_BYTES = 8 << 20
"""Above this size the bandwidth of the links dominates, which NCCL uses as well. Not measured yet."""
WATCHDOG_GRACE_S = 60.0
"""torch's own watchdog waits this much longer than our deadline, whose error names the cause."""


class SmallSums(Protocol):
    """A faster implementation for small sums."""

    description: str

    def takes(self, x: Tensor) -> bool: ...
    def add(self, x: Tensor) -> Tensor:
        """The sum over the stage's ranks, written into x."""
        ...


@dataclass(frozen=True, eq=False)
class DeviceGroups:
    """torch.distributed process groups whose tensors are on the ranks' devices: NCCL's on GPUs."""

    world: Any
    stage: Any
    """For this rank's stage; unused if the stage has one rank."""


class GpuCollectives(GlooCollectives):
    """`Collectives` of one rank. A sum is bit-identical on all ranks, since each part of it is computed by one of them.

    in_order: sums of any size are added in float32 in order of rank, as `Collectives` promises, so that a token's
    result does not depend on its batch.
    """

    small_sums: SmallSums | None = None

    def __init__(
        self,
        rendezvous: Rendezvous,
        store: dist.Store,
        device: torch.device,
        groups: DeviceGroups,
        *,
        in_order: bool = False,
    ) -> None:
        super().__init__(rendezvous.world, rendezvous.rank, store, rendezvous.host or LOOPBACK, rendezvous.deadline_s)
        self.device, self._groups, self._in_order = device, groups, in_order
        self._sum, self._gather = dist.AllreduceOptions(), AllgatherOptions()
        # NCCL's own stream is not used: the work belongs to the current stream, and to a graph that is captured on it.
        self._sum.asyncOp = self._gather.asyncOp = False

    @property
    def sums(self) -> str:
        """How sums are computed, for DescribeEngine."""
        if self._in_order:
            return "in order of rank"
        return "process group" if self.small_sums is None else f"{self.small_sums.description}, else process group"

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if not x.numel():
            return x
        if self._in_order:
            return _summed_in_order(self._each(x))
        if self.small_sums is not None and self.small_sums.takes(x):
            return self.small_sums.add(x)
        self._finish(lambda: self._groups.stage.allreduce([x], self._sum))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return self._each(x.contiguous()).transpose(0, 1).reshape(len(x), self._world.tp_size * x.shape[1])

    def send(self, x: Tensor) -> None:
        x, to = x.contiguous(), self._rank + self._world.tp_size
        if x.numel():
            self._finish(lambda: self._groups.world.send([x], to, HIDDEN_TAG))

    def receive(self, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        x, source = torch.empty(shape, dtype=dtype, device=self.device), self._rank - self._world.tp_size
        if x.numel():
            self._finish(lambda: self._groups.world.recv([x], source, HIDDEN_TAG))
        return x

    def agree(self, is_well: bool) -> bool:
        """Whether all ranks of the world pass True. Every rank must call it."""
        vote, least = torch.tensor([int(is_well)]), dist.AllreduceOptions()
        least.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._wait(self._all.allreduce([vote], least))
        return bool(vote)

    def _each(self, x: Tensor) -> Tensor:
        """[tp_size, *x.shape]"""
        out = torch.empty((self._world.tp_size, *x.shape), dtype=x.dtype, device=x.device)
        if x.numel():
            self._finish(lambda: self._groups.stage._allgather_base(out.flatten(0, 1), x, self._gather))
        return out

    def _finish(self, start: Callable[[], dist.Work | None]) -> None:
        """Makes the current stream wait for the operation; on a CPU, the caller waits."""
        try:
            work = start()
            if work is not None:
                work.wait()
        except RuntimeError as error:
            text = str(error).strip().partition("\n")[0]
            if any(word in text.lower() for word in PEERS_FAULT):
                raise PeerError(f"rank {self._rank} cannot go on: {text}") from error
            raise


def _summed_in_order(parts: Tensor) -> Tensor:
    """[tp_size, ...] -> [...]: adds the parts one after the other, whatever the shape."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


class AgreedCapturer:
    """A `Capturer` whose graphs exist on all ranks or on none: a step then has the same batch size on each of them."""

    def __init__(self, capturer: Capturer, agree: Callable[[bool], bool]) -> None:
        self._capturer, self._agree = capturer, agree

    @property
    def pool_bytes(self) -> int:
        return self._capturer.pool_bytes

    def forget(self) -> None:
        self._capturer.forget()

    def capture(self, run: Callable[[], Any]) -> tuple[Replay, Any]:
        """Raises RuntimeError where any rank could not capture it, and HeadraceError where this one could not run it.

        A rank that cannot run it leaves the others waiting, so this ends the engine.
        """
        runs = 0

        def counted() -> Any:
            nonlocal runs
            runs += 1
            return run()

        try:
            captured = self._capturer.capture(counted)
        except (RuntimeError, AssertionError, ValueError, TypeError) as error:
            if runs < 2:  # the first run is not captured: its collectives are really executed
                why = str(error).strip().partition("\n")[0]
                raise HeadraceError(f"a step that was to be captured as a CUDA graph cannot be run: {why}") from error
            self._agree(False)
            raise
        if not self._agree(True):
            raise RuntimeError("another rank could not capture it")
        return captured


class SymmetricSums:
    """`SmallSums` over one buffer in symmetric memory.

    The kernels end with a synchronisation of all ranks, so whatever follows in the stream may overwrite the buffer.
    """

    def __init__(self, buffer: Tensor, size: int, group_name: str, ops: Any = torch.ops.symm_mem) -> None:
        """buffer: [n] bytes of symmetric memory, which all ranks have joined; ops: the namespace of the kernels."""
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
        """`add` by one kernel that reads every rank's whole part."""
        flat, shared = self._flat(x)
        # The output may be the input: a thread reads an element before it overwrites it, as it copies the elements
        # whose sums it writes.
        self._ops.one_shot_all_reduce_copy_out(shared, flat, "sum", self._name, flat)
        return x

    def two_shot(self, x: Tensor) -> Tensor:
        """`add` by a copy, and a kernel that reduces one piece and reads the other ranks' pieces."""
        flat, shared = self._flat(x)
        shared.copy_(flat)
        self._ops.two_shot_all_reduce_out(shared, "sum", self._name, flat)
        return x

    def _flat(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x as [x.numel()], and shared memory of the same shape and type."""
        flat = x.view(-1)
        return flat, self._views[x.dtype][: len(flat)]


def open_small_sums(
    link: GpuCollectives, rendezvous: Rendezvous, *, why_not: str, join: Callable[[], SymmetricSums]
) -> SmallSums | None:
    """Opens the small sums where all ranks can; logs the reason where they cannot. All ranks of the world must call it.

    why_not: why this rank cannot, or ""; join: joins the stage's ranks, and waits for them.
    """
    reason = why_not or why_no_symmetric_memory(rendezvous)
    if not link.agree(not reason):
        _say(rendezvous, reason or "another rank cannot")
        return None
    sums: SymmetricSums | None = None
    try:
        sums = join()
    except (RuntimeError, ImportError, AttributeError) as error:  # of builds of torch and drivers without it
        reason = str(error).strip().partition("\n")[0]
    if not link.agree(sums is not None):
        _say(rendezvous, reason or "another rank could not join")
        return None
    return sums


def why_no_symmetric_memory(rendezvous: Rendezvous) -> str:
    """Why the places of the stage's ranks rule out sharing their GPUs' memory, in a phrase; "" if they do not."""
    size = rendezvous.world.tp_size
    stage = rendezvous.rank // size * size
    if size not in SIZES:
        return f"there are kernels for {', '.join(map(str, SIZES))} ranks, not for {size}"
    if stage < rendezvous.host_ranks.start or stage + size > rendezvous.host_ranks.stop:
        return "the ranks of a stage are on several hosts, or were placed one by one"
    return ""


def _say(rendezvous: Rendezvous, reason: str) -> None:
    if rendezvous.rank == 0:
        logger.warning("sums over the tensor-parallel ranks go through NCCL alone, whatever their size: %s", reason)


def open_nccl(
    rendezvous: Rendezvous, device: torch.device, *, custom_all_reduce: bool, in_order: bool
) -> GpuCollectives:
    """Joins the other ranks, each of which must call this with its own GPU.

    in_order: see `GpuCollectives`. Raises PeerError when not all joined in time.
    """
    # By default a watchdog aborts a process that lost its peer, which would then look like the cause. 0 only logs.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    if rendezvous.address is None:  # by default NCCL's ranks meet on an interface that other hosts reach
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(device)
    store = rendezvous.store()
    try:
        groups = _groups(rendezvous, store, device)
    except RuntimeError as error:
        first_line, _, _ = str(error).strip().partition("\n")
        raise PeerError(
            f"rank {rendezvous.rank} of {rendezvous.world.size} cannot join the others: {first_line}"
        ) from error
    link = GpuCollectives(rendezvous, dist.PrefixStore("headrace/hosts", store), device, groups, in_order=in_order)
    if rendezvous.world.tp_size > 1 and custom_all_reduce and not in_order:
        why_not = _why_no_access(rendezvous, device)
        link.small_sums = open_small_sums(
            link,
            rendezvous,
            why_not=why_not,
            join=lambda: _symmetric_sums(groups.stage, rendezvous.world.tp_size, device),
        )
    return link


def _groups(rendezvous: Rendezvous, store: dist.Store, device: torch.device) -> DeviceGroups:
    world, timeout = rendezvous.world, timedelta(seconds=rendezvous.deadline_s + WATCHDOG_GRACE_S)
    dist.init_process_group(
        "nccl",
        store=dist.PrefixStore("headrace/nccl", store),
        rank=rendezvous.rank,
        world_size=world.size,
        timeout=timeout,
        device_id=device,  # makes communicators now: the first use of one cannot be captured
    )
    if 1 in (world.tp_size, world.pp_size):  # a stage is the whole world, or a single rank
        return DeviceGroups(world=dist.group.WORLD, stage=dist.group.WORLD)
    stages = []
    for stage in range(world.pp_size):  # every rank must take part in making every group
        ranks = list(range(stage * world.tp_size, (stage + 1) * world.tp_size))
        stages.append(dist.new_group(ranks, timeout=timeout, device_id=device))
    return DeviceGroups(world=dist.group.WORLD, stage=stages[rendezvous.rank // world.tp_size])


def _why_no_access(rendezvous: Rendezvous, device: torch.device) -> str:
    """Why this GPU cannot read the stage's other GPUs' memory, or "". A host's ranks have its GPUs in order."""
    tp_size = rendezvous.world.tp_size
    first = rendezvous.rank // tp_size * tp_size - rendezvous.host_ranks.start
    others = [index for index in range(first, first + tp_size) if index != device.index]
    blocked = [
        f"cuda:{index}"
        for index in others
        if 0 <= index < torch.cuda.device_count() and not torch.cuda.can_device_access_peer(device, index)
    ]
    return f"{device} has no access to the memory of {', '.join(blocked)}" if blocked else ""


def _symmetric_sums(group: dist.ProcessGroup, size: int, device: torch.device) -> SymmetricSums:
    import torch.distributed._symmetric_memory as symmetric_memory

    buffer = symmetric_memory.empty(LARGEST_BYTES, dtype=torch.uint8, device=device)
    symmetric_memory.rendezvous(buffer, group)
    return SymmetricSums(buffer, size, group.group_name)
