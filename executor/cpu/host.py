"""What this process may use of the machine: cores and memory, with affinity and control groups taken into account.

Several workers of one host each take a share of its cores.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

PROC_CGROUP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class HostMemory:
    total_bytes: int
    """Of the machine, or the tightest limit that applies to this process."""
    available_bytes: int
    """What can still be taken without swapping: free or reclaimable."""


def host_memory(proc_cgroup: Path = PROC_CGROUP, cgroup_root: Path = CGROUP_ROOT) -> HostMemory:
    """The machine's memory, or what is left of it within the limits of our control groups (version 1 or 2)."""
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
    return HostMemory(total_bytes, available_bytes)


def usable_cores(proc_cgroup: Path = PROC_CGROUP, cgroup_root: Path = CGROUP_ROOT) -> int:
    """Cores that this process's affinity allows and whose time its control groups grant it, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in _control_groups("cpu", proc_cgroup, cgroup_root):
        quota_us, period_us = _cpu_quota(folder)
        if quota_us > 0 and period_us > 0:
            # A thread beyond the quota would be stopped in mid-step while the others wait for it.
            cores = min(cores, max(1, quota_us // period_us))
    return cores


def _control_groups(controller: str, proc_cgroup: Path, cgroup_root: Path) -> Iterator[Path]:
    """The folders that may limit us: our own group's and its parents', as any of them may carry the limit."""
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
    """The content of the first of the files that exists; None for `max` and for no file."""
    for path in candidates:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() else None
    return None


def _reclaimable_bytes(path: Path) -> int:
    """File pages that count as used and that the kernel drops when memory is short."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    values = dict(line.split(maxsplit=1) for line in lines if " " in line)
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


def _cpu_quota(folder: Path) -> tuple[int, int]:
    """(quota, period) in microseconds; (0, 0) without one."""
    try:
        quota, _, period = (folder / "cpu.max").read_text().strip().partition(" ")
        return (int(quota), int(period)) if quota != "max" else (0, 0)
    except (OSError, ValueError):
        return _number(folder / "cpu.cfs_quota_us") or 0, _number(folder / "cpu.cfs_period_us") or 0


def take_share(rank: int, num_workers: int) -> None:
    """Gives this process its part of the cores it may use: its affinity, and OMP_NUM_THREADS unless that is set.

    Call it before anything is imported that reads them. A control group's quota counts for all workers together.
    """
    granted = usable_cores()
    cores = by_core(sorted(os.sched_getaffinity(0)))
    mine = [cores[index] for index in share(len(cores), rank, num_workers)]
    os.sched_setaffinity(0, {cpu for core in mine for cpu in core})
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, min(len(mine), granted // num_workers))))


def share(num_cores: int, rank: int, num_workers: int) -> range:
    """Which of the cores: a run of them, as neighbours share caches and memory. With too few, several share one."""
    first = rank * num_cores // num_workers
    return range(first, max(first + 1, (rank + 1) * num_cores // num_workers))


def by_core(cpus: list[int]) -> list[list[int]]:
    """The CPUs of each physical core: two hardware threads of one never go to different workers."""
    cores: dict[str, list[int]] = {}
    for cpu in cpus:
        try:
            core = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
        except OSError:
            core = str(cpu)
        cores.setdefault(core, []).append(cpu)
    return list(cores.values())
