"""Paged attention on the CPU: GB/s of keys and values in decode, GFLOP/s in prefill, as shares of this machine's
limits, which the same threads measure in the same run.

    python benchmarks/kernel_attention.py --output benchmarks/results/kernel_attention.json
"""

from __future__ import annotations

import argparse
import math
import mmap
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import write_report
from torch import Tensor

from headrace.executor.models.kv_cache import SCALED
from headrace.kernels.cpu import build
from headrace.kernels.cpu.attention.cache import best_layout
from headrace.kernels.cpu.linear.limits import limits
from headrace.kernels.cpu.linear.linear import Runtime
from headrace.kernels.cpu.ops import CpuOps
from headrace.kernels.cpu.runtime.threads import ThreadPool
from headrace.kernels.reference.attention import AttentionParams, CacheScales, PagedBatch

BLOCK_SIZE = 16
HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
"""Those of the demo model."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.int8, "fp8": torch.float8_e4m3fn}


def huge_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The kind of memory that holds an engine's cache."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def samples_of(run: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of `count` runs, after one warm-up run."""
    run()
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return found


def attention_case(
    ops: CpuOps, measured: dict[str, Any], num_seqs: int, query_len: int, context: int, cache: str, runs: int
) -> dict[str, Any]:
    """One call of attention over blocks in random order, stored and scaled as in an engine's program."""
    dtype, blocks_each = DTYPES[cache], -(-context // BLOCK_SIZE)
    shape = (num_seqs * blocks_each, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    keys, values = (huge_pages(shape, dtype) for _ in range(2))
    for part in (keys, values):
        part.copy_(torch.randn(shape) if dtype.is_floating_point else torch.randint(-127, 128, shape))
    scales = None
    if dtype in SCALED:
        scales = CacheScales(keys=torch.full(shape[:3], 0.02), values=torch.full(shape[:3], 0.02))
    layout = best_layout(BLOCK_SIZE, HEAD_DIM)
    tables = torch.randperm(num_seqs * blocks_each).int().view(num_seqs, blocks_each)
    batch = PagedBatch(
        torch.arange(num_seqs + 1, dtype=torch.int32) * query_len,
        torch.full((num_seqs,), context, dtype=torch.int32),
        tables,
        torch.zeros(num_seqs * query_len, dtype=torch.int64),
        BLOCK_SIZE,
    )
    query = torch.randn(num_seqs * query_len, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    params = AttentionParams(HEAD_DIM**-0.5)
    samples = samples_of(lambda: ops.paged_attention(query, keys, values, batch, params, scales, layout), runs)
    best = min(samples)
    read = num_seqs * context * KV_HEADS * HEAD_DIM * 2 * dtype.itemsize
    seen = num_seqs * sum(range(context - query_len + 1, context + 1))
    multiply_adds = 2 * seen * HEADS * HEAD_DIM
    dot_product = measured["bf16 dot product gigaflops"]
    arithmetic_limit = dot_product if dot_product and cache != "fp32" else measured["fp32 multiply-add gigaflops"]
    return {
        "case": f"{num_seqs} x {query_len} of {context}, {cache} cache",
        "best_s": best,
        "median_s": statistics.median(samples),
        "gigabytes_per_s": read / best / 1e9,
        "share_of_read_limit": read / best / 1e9 / measured["read_gigabytes_per_s"],
        "gigaflops": 2 * multiply_adds / best / 1e9,
        "share_of_arithmetic_limit": 2 * multiply_adds / best / 1e9 / arithmetic_limit,
        "samples_s": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "kernel_attention.json")
    options = parser.parse_args()
    torch.manual_seed(0)
    library = build.build()
    runtime = Runtime(library, ThreadPool(library, options.threads))
    ops, measured = CpuOps(runtime), limits(runtime)
    print({name: round(value, 1) for name, value in measured.items()})
    attention = []
    for cache in DTYPES:
        for num_seqs, query_len, context in ((1, 1, 256), (1, 1, 8192), (64, 1, 1024), (1, 1024, 1024), (1, 256, 4096)):
            runs = max(3, options.runs // (4 if query_len > 1 or num_seqs > 1 else 1))
            found = attention_case(ops, measured, num_seqs, query_len, context, cache, runs)
            attention.append(found)
            print(
                f"{found['case']:32} {found['best_s'] * 1e6:9.1f} us {found['gigabytes_per_s']:6.1f} GB/s "
                f"({found['share_of_read_limit']:.0%}) {found['gigaflops']:7.1f} GFLOP/s "
                f"({found['share_of_arithmetic_limit']:.0%})"
            )
    results = {
        "threads": runtime.pool.num_threads,
        "level": library.level,
        "limits": measured,
        "attention": attention,
    }
    write_report(options.output, "kernel_attention", results)


if __name__ == "__main__":
    main()
