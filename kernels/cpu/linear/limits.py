"""Measures the machine's limits with the threads that run the kernels. Benchmarks report shares of these limits.

`python -m headrace.kernels.cpu.linear.limits` prints them as JSON.
"""

from __future__ import annotations

import ctypes
import functools
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from headrace.kernels.cpu.linear.linear import Arena, Runtime, runtime
from headrace.kernels.cpu.runtime.pointers import pointer

READ_BYTES = 512 << 20
ROUNDS = 500_000
ARITHMETIC = {"fp32 multiply-add": 0, "bf16 dot product": 1, "int8 dot product": 2}
"""Numbers of `Arithmetic` in limits.cpp."""
GPU_COPY_BYTES, GPU_MATRIX = 1 << 30, 8192


class ReadArgs(ctypes.Structure):
    """Mirror of `ReadArgs` in limits.cpp."""

    _fields_ = (("data", ctypes.c_void_p), ("bytes", ctypes.c_int64), ("sums", ctypes.c_void_p))


class ArithmeticArgs(ctypes.Structure):
    """Mirror of `ArithmeticArgs` in limits.cpp."""

    _fields_ = (
        ("rounds", ctypes.c_int64),
        ("results", ctypes.c_void_p),
        ("ones", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
    )


def samples_of(run: Callable[[], object], seconds: float, least: int = 5) -> list[float]:
    """Seconds of each run, after one warm-up run: as many as fit in `seconds`, but at least `least`."""
    run()
    samples: list[float] = []
    while len(samples) < least or sum(samples) < seconds:
        begin = time.perf_counter()
        run()
        samples.append(time.perf_counter() - begin)
    return samples


def limits(used: Runtime) -> dict[str, Any]:
    """Gigabytes per second of a streaming read, and gigaflops of each kind of instruction (2 per multiply-add)."""
    pool, dll, threads = used.pool, used.library.dll, used.pool.num_threads
    memory, address = Arena(chunk_bytes=0).take(READ_BYTES)
    ctypes.memset(address, 1, READ_BYTES)
    sums = torch.zeros(threads, dtype=torch.int64)
    read = ReadArgs(address, READ_BYTES, pointer(sums))
    found: dict[str, Any] = {
        "threads": threads,
        "read_gigabytes_per_s": READ_BYTES / min(samples_of(lambda: pool.run_op("hr_op_read", read), 1.0)) / 1e9,
    }
    del memory
    ones, results = torch.ones(64), torch.zeros(threads, 16)
    for name, kind in ARITHMETIC.items():
        per_round = dll.hr_arithmetic_per_round(kind)
        args = ArithmeticArgs(ROUNDS, pointer(results), pointer(ones), kind)
        best = min(samples_of(functools.partial(pool.run_op, "hr_op_arithmetic", args), 0.5))
        found[f"{name} gigaflops"] = 2 * per_round * ROUNDS * threads / best / 1e9
    return found


def gpu_limits() -> dict[str, Any]:
    """Limits of the first GPU: gigabytes per second of a copy, reads and writes together, and teraflops of bf16 matrix
    products."""
    source = torch.empty(GPU_COPY_BYTES, dtype=torch.uint8, device="cuda")
    goal = torch.empty_like(source)
    square = torch.randn(GPU_MATRIX, GPU_MATRIX, device="cuda").bfloat16()

    def timed(run: Callable[[], object]) -> float:
        def whole() -> None:
            run()
            torch.cuda.synchronize()

        return min(samples_of(whole, 0.3))

    return {
        "name": torch.cuda.get_device_name(),
        "copy_gigabytes_per_s": 2 * GPU_COPY_BYTES / timed(lambda: goal.copy_(source)) / 1e9,
        "bf16_matrix_teraflops": 2 * GPU_MATRIX**3 / timed(lambda: square @ square) / 1e12,
    }


def main() -> None:
    found = limits(runtime())
    if torch.cuda.is_available():
        found["GPU"] = gpu_limits()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
