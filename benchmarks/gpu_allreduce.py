"""Sums over this host's GPUs, one rank each, by size: NCCL, and one-shot and two-shot through symmetric memory.

    torchrun --nproc-per-node 8 benchmarks/gpu_allreduce.py --out results/gpu_allreduce.json

Each sample is a captured graph of SUMS consecutive sums, as in a decode step, divided by their number, on the slowest
rank. The limits in `executor/gpu/collectives.py` should be set where the methods cross.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import write_report
from torch import Tensor

from headrace.executor.gpu.collectives import LARGEST_BYTES, GpuCollectives, SymmetricSums, open_nccl
from headrace.executor.gpu.hardware.cuda import CudaCapturer
from headrace.executor.parallel.rank_place import World
from headrace.executor.parallel.rendezvous import Rendezvous

SUMS, SAMPLES = 64, 20
FROM_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SIZES_BYTES = tuple(1 << power for power in range(12, 25, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_allreduce.json"), help="where rank 0 writes the JSON")
    arguments = parser.parse_args()
    if absent := [name for name in FROM_TORCHRUN if name not in os.environ]:
        raise SystemExit(
            f"{', '.join(absent)} not set: start it by torchrun --nproc-per-node N benchmarks/gpu_allreduce.py, "
            "with one process for each of N GPUs"
        )
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    with torch.cuda.device(device), torch.inference_mode():
        link = open_nccl(meeting_of(rank, size), device, custom_all_reduce=True, in_order=False)
        rows = [row for num_bytes in SIZES_BYTES for row in measure(link, device, num_bytes, size)]
    if rank == 0:
        found = {"gpu": torch.cuda.get_device_name(device), "ranks": size, "sums_in_a_graph": SUMS, "sums": rows}
        write_report(arguments.out, "gpu_allreduce", found)
    os._exit(0)  # ending a communicator would wait for all ranks


def meeting_of(rank: int, size: int) -> Rendezvous:
    """Uses the port after that of torchrun's own store."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1)
    listener = socket.create_server(address) if rank == 0 else None
    world = World(size, 1, max_tokens=1, max_seqs=1, hidden_size=1, vocab_size=1)
    listen_fd = listener.detach() if listener is not None else None
    return Rendezvous(world, rank, range(size), -1, 60.0, address, address[0], listen_fd)


def measure(link: GpuCollectives, device: torch.device, num_bytes: int, size: int) -> list[dict[str, Any]]:
    x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
    small = link.small_sums
    ways: dict[str, Callable[[Tensor], Tensor]] = {"nccl": by_nccl(link)}
    if isinstance(small, SymmetricSums) and num_bytes <= LARGEST_BYTES:
        ways |= {"one-shot": small.one_shot, "two-shot": small.two_shot}
    rows = []
    for name, way in ways.items():
        samples_us = [1e6 * sample / SUMS for sample in samples_s(link, device, lambda way=way: way(x))]  # type: ignore[misc]
        rows.append(
            {"way": name, "bytes": num_bytes, "median_us": statistics.median(samples_us), "samples_us": samples_us}
        )
    return rows


def by_nccl(link: GpuCollectives) -> Callable[[Tensor], Tensor]:
    def add(x: Tensor) -> Tensor:
        small, link.small_sums = link.small_sums, None
        try:
            return link.all_reduce(x)
        finally:
            link.small_sums = small

    return add


def samples_s(link: GpuCollectives, device: torch.device, add: Callable[[], Tensor]) -> list[float]:
    def run() -> None:
        for _ in range(SUMS):
            add()

    replay, _ = CudaCapturer(device).capture(run)
    samples = []
    for _ in range(SAMPLES):
        link.agree(True)  # all begin together
        began_s = time.perf_counter()
        replay()
        torch.cuda.synchronize(device)
        slowest = torch.tensor([time.perf_counter() - began_s], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        samples.append(float(slowest))
    return samples


if __name__ == "__main__":
    main()
