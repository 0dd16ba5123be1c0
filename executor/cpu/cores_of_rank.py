"""The cores of each of several workers on one host."""

from __future__ import annotations

import os
from pathlib import Path

from headrace.executor.cpu.host import usable_cores


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
