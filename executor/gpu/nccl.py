"""NCCL and symmetric memory, opened. Needs GPUs; what uses them is elsewhere, and runs with gloo in their place."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from headrace.executor.gpu.collectives import DeviceGroups, GpuCollectives
from headrace.executor.gpu.small_sums import LARGEST_BYTES, SymmetricSums, open_small_sums
from headrace.executor.parallel.rank_place import PeerError
from headrace.executor.parallel.rendezvous import Rendezvous

WATCHDOG_GRACE_S = 60.0
"""By how much torch's own watchdog outlasts our deadline, which knows what to say."""


def open_nccl(meeting: Rendezvous, device: torch.device, *, custom_all_reduce: bool, in_order: bool) -> GpuCollectives:
    """Joins the other ranks, each of which has called this with a GPU of its own.

    in_order: see `GpuCollectives`. Raises PeerError when not all came in time.
    """
    # By default a watchdog aborts a process whose peer is gone, and would be taken for the cause. 0: it only logs.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    torch.cuda.set_device(device)
    store = meeting.store()
    try:
        groups = _groups(meeting, store, device)
    except RuntimeError as error:
        first_line, _, _ = str(error).strip().partition("\n")
        raise PeerError(f"rank {meeting.rank} of {meeting.world.size} cannot join the others: {first_line}") from error
    link = GpuCollectives(meeting, dist.PrefixStore("headrace/hosts", store), device, groups, in_order=in_order)
    if meeting.world.tp_size > 1 and custom_all_reduce and not in_order:
        why_not = _why_no_access(meeting, device)
        link.small_sums = open_small_sums(
            link, meeting, why_not=why_not, join=lambda: _symmetric_sums(groups.stage, meeting.world.tp_size, device)
        )
    return link


def _groups(meeting: Rendezvous, store: dist.Store, device: torch.device) -> DeviceGroups:
    world, timeout = meeting.world, timedelta(seconds=meeting.deadline_s + WATCHDOG_GRACE_S)
    dist.init_process_group(
        "nccl",
        store=dist.PrefixStore("headrace/nccl", store),
        rank=meeting.rank,
        world_size=world.size,
        timeout=timeout,
        device_id=device,  # communicators are made now: the first use of one cannot be captured
    )
    if 1 in (world.tp_size, world.pp_size):  # a stage is the world, or a rank of its own
        return DeviceGroups(world=dist.group.WORLD, stage=dist.group.WORLD)
    stages = []
    for stage in range(world.pp_size):  # every rank takes part in making every group
        ranks = list(range(stage * world.tp_size, (stage + 1) * world.tp_size))
        stages.append(dist.new_group(ranks, timeout=timeout, device_id=device))
    return DeviceGroups(world=dist.group.WORLD, stage=stages[meeting.rank // world.tp_size])


def _why_no_access(meeting: Rendezvous, device: torch.device) -> str:
    """Whether this GPU may read the memory of the stage's others. Ranks of a host have its GPUs in order."""
    tp_size = meeting.world.tp_size
    first = meeting.rank // tp_size * tp_size - meeting.host_ranks.start
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
