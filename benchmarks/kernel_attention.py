"""Paged attention on the CPU: GB/s of keys and values in decode, GFLOP/s in prefill, as shares of what this machine
can do, measured by the same threads in the same run. And where a whole decode step of the demo model's shapes (random
bf16 weights) spends its time.

    python benchmarks/kernel_attention.py --output benchmarks/results/kernel_attention.json
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernel_linear import limits
from report import write_report

from headrace.kernels.cpu import build
from headrace.kernels.cpu.linear import Arena, Runtime, pack
from headrace.kernels.cpu.ops import CpuOps
from headrace.kernels.cpu.program import Builder
from headrace.kernels.cpu.program_parts import Attention, LayerCache, Norm, Rotary, SamplingColumns
from headrace.kernels.cpu.program_run import Program, StepArrays
from headrace.kernels.cpu.threads import Pool
from headrace.kernels.reference_attention import AttentionParams, PagedBatch

BLOCK_SIZE = 16
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 576, 1536, 9, 3, 64, 49152, 30
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.int8}


def samples_of(run: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of `count` runs, after one that does not count."""
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
    """One call of attention over blocks that lie in random order."""
    dtype, blocks_each = DTYPES[cache], -(-context // BLOCK_SIZE)
    shape = (num_seqs * blocks_each, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    keys, values = (
        torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(-127, 128, shape, dtype=dtype)
        for _ in range(2)
    )
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
    samples = samples_of(lambda: ops.paged_attention(query, keys, values, batch, params), runs)
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


def demo_program(runtime: Runtime, max_tokens: int, num_blocks: int) -> tuple[Program, SamplingColumns]:
    """A program of the demo model's shapes over random bf16 weights, greedy sampling included."""
    arena, inner = Arena(), torch.bfloat16

    def weight(rows: int, columns: int, gated: bool = False) -> Any:
        values = (torch.randn(rows, columns) * columns**-0.5).to(torch.bfloat16)
        return pack(values, gated=gated, arena=arena, runtime_=runtime)

    builder = Builder(runtime, max_tokens=max_tokens, max_logits=64)
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    hidden, normed = builder.buffer(HIDDEN, torch.float32), builder.buffer(HIDDEN, inner, own=True)
    qkv, attended = builder.buffer(width, torch.float32), builder.buffer(HEADS * HEAD_DIM, inner)
    activated = builder.buffer(INTERMEDIATE, inner)
    angles = torch.arange(2048)[:, None] / 10000 ** (torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    norm, rotary = Norm("rms", 1e-5, torch.ones(HIDDEN)), Rotary(angles.cos(), angles.sin())
    table = weight(VOCAB, HIDDEN)
    builder.embedding(table, hidden)
    for _ in range(LAYERS):
        keys, values = torch.zeros(2, num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=inner).unbind(0)
        builder.norm(hidden, normed, norm)
        builder.linear(weight(width, HIDDEN), normed, qkv)
        builder.attention(qkv, attended, Attention(HEADS, LayerCache(keys, values), HEAD_DIM**-0.5, rotary))
        builder.linear(weight(HIDDEN, HEADS * HEAD_DIM), attended, hidden, residual=hidden)
        builder.norm(hidden, normed, norm)
        builder.linear(weight(2 * INTERMEDIATE, HIDDEN, gated=True), normed, activated, activation="silu")
        builder.linear(weight(HIDDEN, INTERMEDIATE), activated, hidden, residual=hidden)
    builder.start_of_logits()
    last, logits = builder.buffer(HIDDEN, inner, "logits"), builder.buffer(VOCAB, torch.float32, "logits")
    builder.norm(hidden, last, norm)
    builder.linear(table, last, logits)
    columns = builder.sample(logits)
    return builder.build(logits), columns


def step_arrays(num_seqs: int, query_len: int, context: int) -> StepArrays:
    """Every sequence computes the last `query_len` tokens of its context."""
    tables = np.random.default_rng(0).permutation(num_seqs * -(-context // BLOCK_SIZE)).astype(np.int32)
    tables = tables.reshape(num_seqs, -1)
    positions = np.arange(context - query_len, context, dtype=np.int32)
    slots = tables[:, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = np.arange(num_seqs + 1, dtype=np.int32) * query_len
    return StepArrays(
        token_ids=np.arange(num_seqs * query_len, dtype=np.int32) % VOCAB,
        positions=np.tile(positions, num_seqs),
        slot_mapping=slots.reshape(-1),
        query_start=starts,
        seq_lens=np.full(num_seqs, context, np.int32),
        block_tables=tables,
        logits_rows=starts[1:] - 1,
    )


def step_case(program: Program, num_seqs: int, query_len: int, context: int, runs: int) -> dict[str, Any]:
    arrays = step_arrays(num_seqs, query_len, context)
    samples = samples_of(lambda: program.run(arrays), runs)
    # The least disturbed of the profiled runs says where the time goes when the machine is ours.
    profile = min((program.profile(arrays, 1) for _ in range(runs)), key=lambda found: found.seconds)
    return {
        "case": f"{num_seqs} x {query_len} of {context}",
        "best_s": min(samples),
        "median_s": statistics.median(samples),
        "profile": dataclasses.asdict(profile),
        "share_outside_ops": profile.share_outside,
        "barriers": program.num_barriers,
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
    runtime = Runtime(library, Pool(library, options.threads))
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
    program, _ = demo_program(runtime, 1024, 64 * 256 // BLOCK_SIZE)
    steps = []
    for num_seqs, query_len, context in ((1, 1, 128), (1, 1, 1000), (8, 1, 192), (64, 1, 192), (1, 1024, 1024)):
        runs = max(3, options.runs // (1 if num_seqs * query_len <= 8 else 5))
        found = step_case(program, num_seqs, query_len, context, runs)
        steps.append(found)
        parts = ", ".join(f"{name} {spent * 1e3:.3f}" for name, spent in found["profile"]["working_s"].items())
        print(
            f"step {found['case']:20} {found['best_s'] * 1e3:8.2f} ms; {found['share_outside_ops']:.1%} outside ops; "
            f"ms: {parts}, waiting {found['profile']['waiting_s'] * 1e3:.3f}"
        )
    results = {
        "threads": runtime.pool.num_threads,
        "level": library.level,
        "limits": measured,
        "attention": attention,
        "steps": steps,
    }
    write_report(options.output, "kernel_attention", results)


if __name__ == "__main__":
    main()
