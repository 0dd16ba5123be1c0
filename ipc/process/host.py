"""The cores and memory of the machine that this process may use, by its affinity and control groups.

Several workers of one host each take a share of its cores.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

PROC_CGROUP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")
SHARE_OF_ADDRESSES = 0.75
"""Share of the addresses left that may be taken: the stacks and arenas of threads reserve more than they use."""


@dataclass(frozen=True)
class HostMemory:
    total_bytes: int
    """The machine's memory, or the tightest limit that applies to this process."""
    available_bytes: int
    """Memory that can still be taken without swapping: free or reclaimable."""


def host_memory(proc_cgroup: Path = PROC_CGROUP, cgroup_root: Path = CGROUP_ROOT) -> HostMemory:
    """The machine's memory, reduced to the limits of this process's control groups (version 1 or 2), and to that of its
    address space (`ulimit -v`) and of its data (`ulimit -d`)."""
    machine = psutil.virtual_memory()
    total_bytes, available_bytes = machine.total, machine.available
    for folder in _control_groups("memory", proc_cgroup, cgroup_root):
        limit_bytes = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
        used_bytes = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit_bytes is None or used_bytes is None or limit_bytes >= machine.total:
            continue
        total_bytes = min(total_bytes, limit_bytes)
        used_bytes -= _reclaimable_bytes(folder / "memory.stat")
        available_bytes = min(available_bytes, max(0, limit_bytes - used_bytes))
    own = psutil.Process().memory_info()
    # Linux counts private memory that can be written, whether it is used or not, as data.
    for limit, used_bytes in ((resource.RLIMIT_AS, own.vms), (resource.RLIMIT_DATA, own.data)):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            total_bytes = min(total_bytes, most)
            available_bytes = min(available_bytes, int(max(0, most - used_bytes) * SHARE_OF_ADDRESSES))
    return HostMemory(total_bytes, available_bytes)


def usable_cores(proc_cgroup: Path = PROC_CGROUP, cgroup_root: Path = CGROUP_ROOT) -> int:
    """The number of cores that this process may use by its affinity and its control groups' CPU quotas, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _control_groups("cpu", proc_cgroup, cgroup_root):
        quota_us, period_us = _cpu_quota(folder)
        if quota_us > 0 and period_us > 0:
            # Threads beyond the quota would be stopped in the middle of a step, while the others wait for them.
            cores = min(cores, max(1, quota_us // period_us))
    return cores


def _control_groups(controller: str, proc_cgroup: Path, cgroup_root: Path) -> Iterator[Path]:
    """The folders of this process's control group and its parents: any of them may set the limit."""
    try:
        lines = proc_cgroup.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroup_root / controller if controllers else cgroup_root
        folder = root / path.lstrip("/")
        while folder.is_relative_to(root):
            yield folder
            folder = folder.parent


def _number(*candidates: Path) -> int | None:
    """The number in the first of the files that exists; None for `max`, and where no file exists."""
    for path in candidates:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def _reclaimable_bytes(path: Path) -> int:
    """File pages that count as used, but that the kernel drops when memory is short."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


def _cpu_quota(folder: Path) -> tuple[int, int]:
    """(quota, period) in microseconds; (0, 0) without a quota."""
    try:
        quota, _, period = (folder / "cpu.max").read_text().strip().partition(" ")
        return (int(quota), int(period)) if quota != "max" else (0, 0)
    except (OSError, ValueError):
        return _number(folder / "cpu.cfs_quota_us") or 0, _number(folder / "cpu.cfs_period_us") or 0


def take_share(rank: int, num_workers: int) -> None:
    """Restricts this process to its share of the usable cores: sets its affinity, and OMP_NUM_THREADS unless that is
    set.

    Call it before importing anything that reads them. A control group's quota is divided among all workers.
    """
    granted = usable_cores()
    cores = by_core(sorted(os.sched_getaffinity(0)))
    mine = [cores[index] for index in share(len(cores), rank, num_workers)]
    os.sched_setaffinity(0, {cpu for core in mine for cpu in core})
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, min(len(mine), granted // num_workers))))


def share(num_cores: int, rank: int, num_workers: int) -> range:
    """The indices of this rank's cores: consecutive ones, as neighbours share caches and memory. With fewer cores than
    workers, several workers share one."""
    first = rank * num_cores // num_workers
    return range(first, max(first + 1, (rank + 1) * num_cores // num_workers))


def by_core(cpus: list[int]) -> list[list[int]]:
    """CPUs grouped by physical core: two hardware threads of one core never go to different workers."""
    cores: dict[str, list[int]] = {}
    for cpu in cpus:
        try:
            core = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            core = str(cpu)
        cores.setdefault(core, []).append(cpu)
    return list(cores.values())
