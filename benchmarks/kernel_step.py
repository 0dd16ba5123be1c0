"""Where a step with the demo model's shapes (random bf16 weights) spends its time, op by op, and the share of its limit
that each op reaches: reading weights, keys and values once, or the arithmetic, whichever takes longer. Memory bandwidth
is measured between the steps, by the same threads, since it varies from second to second on a shared machine.

    python benchmarks/kernel_step.py --output benchmarks/results/kernel_step.json
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import write_report

from headrace.kernels.cpu import build
from headrace.kernels.cpu.linear.limits import READ_BYTES, ReadArgs, limits
from headrace.kernels.cpu.linear.linear import Arena, Runtime, pack
from headrace.kernels.cpu.program.parts import AttentionLayer, LayerCache, Norm, Rotary
from headrace.kernels.cpu.program.program import Builder
from headrace.kernels.cpu.program.run import Program, ProgramStep
from headrace.kernels.cpu.runtime.threads import ThreadPool

BLOCK_SIZE = 16
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 576, 1536, 9, 3, 64, 49152, 30
MAX_LOGITS = 64
LINEARS = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "output": (HIDDEN, HEADS * HEAD_DIM),
    "gate up": (2 * INTERMEDIATE, HIDDEN),
    "down": (HIDDEN, INTERMEDIATE),
}
CASES = {
    "decode_1": (1, 1, 144),
    "decode_1, long": (1, 1, 1000),
    "decode_8": (8, 1, 48),
    "decode_64": (64, 1, 200),
    "prefill_1024": (1, 1024, 1024),
    "prefill_16 x 128": (16, 128, 128),
}
"""(sequences, tokens that each computes, context)"""


def demo_program(runtime: Runtime, max_tokens: int, num_blocks: int) -> Program:
    """A program of the demo model's shapes with random bf16 weights, including greedy sampling."""
    arena, inner = Arena(), torch.bfloat16

    def weight(rows: int, columns: int, gated: bool = False) -> Any:
        values = (torch.randn(rows, columns) * columns**-0.5).to(torch.bfloat16)
        return pack(values, gated=gated, arena=arena, runtime_=runtime)

    builder = Builder(runtime, max_tokens=max_tokens, max_logits=MAX_LOGITS)
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    hidden, normed = builder.buffer(HIDDEN, torch.float32), builder.buffer(HIDDEN, inner, own=True)
    qkv, attended = builder.buffer(width, torch.float32), builder.buffer(HEADS * HEAD_DIM, inner)
    activated = builder.buffer(INTERMEDIATE, inner)
    angles = torch.arange(2048)[:, None] / 10000 ** (torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    norm, rotary = Norm("rms", 1e-5, torch.ones(HIDDEN)), Rotary(angles.cos(), angles.sin())
    table = weight(VOCAB, HIDDEN)
    builder.embedding(table, hidden)
    wanted, last = builder.buffer(HIDDEN, torch.float32, "logits"), builder.buffer(HIDDEN, inner, "logits")
    for layer in range(LAYERS):
        keys, values = torch.zeros(2, num_blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=inner).unbind(0)
        builder.norm(hidden, normed, norm)
        builder.linear(weight(width, HIDDEN), normed, qkv)
        attention = AttentionLayer(HEADS, LayerCache(keys, values), HEAD_DIM**-0.5, rotary)
        builder.write_cache(qkv, attention)
        is_last = layer == LAYERS - 1
        if is_last:
            builder.gather(hidden, wanted)
        builder.attend(qkv, attended, attention, only_logits=is_last)
        if is_last:  # the rest is only for rows whose logits are needed, as in `executor/cpu/program.py`
            attended, all_attended = builder.buffer(HEADS * HEAD_DIM, inner, "logits", own=True), attended
            builder.gather(all_attended, attended)
            hidden, normed, activated = wanted, normed.of_logits(MAX_LOGITS), activated.of_logits(MAX_LOGITS)
        builder.linear(weight(HIDDEN, HEADS * HEAD_DIM), attended, hidden, residual=hidden)
        builder.norm(hidden, normed, norm)
        builder.linear(weight(2 * INTERMEDIATE, HIDDEN, gated=True), normed, activated, activation="silu")
        builder.linear(weight(HIDDEN, INTERMEDIATE), activated, hidden, residual=hidden)
    logits = builder.buffer(VOCAB, torch.float32, "logits")
    builder.norm(hidden, last, norm)
    builder.linear(table, last, logits)
    builder.sample(logits)
    program = builder.build(logits)
    for names in program.names:
        labels = iter([*list(LINEARS) * LAYERS, "head"])
        names[:] = [f"linear {next(labels)}" if name == "linear" else name for name in names]
    return program


def step_arrays(num_seqs: int, query_len: int, context: int) -> ProgramStep:
    """Every sequence computes the last `query_len` tokens of its context."""
    tables = np.random.default_rng(0).permutation(num_seqs * -(-context // BLOCK_SIZE)).astype(np.int32)
    tables = tables.reshape(num_seqs, -1)
    positions = np.arange(context - query_len, context, dtype=np.int32)
    slots = tables[:, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = np.arange(num_seqs + 1, dtype=np.int32) * query_len
    return ProgramStep(
        token_ids=np.arange(num_seqs * query_len, dtype=np.int32) % VOCAB,
        positions=np.tile(positions, num_seqs),
        slot_mapping=slots.reshape(-1),
        query_start=starts,
        seq_lens=np.full(num_seqs, context, np.int32),
        block_tables=tables,
        logits_rows=starts[1:] - 1,
    )


@dataclasses.dataclass(frozen=True)
class Work:
    """The bytes that an op must read, and the operations that it must compute."""

    num_bytes: float
    flops: float

    def least_s(self, bytes_per_s: float, flops_per_s: float) -> float:
        return max(self.num_bytes / bytes_per_s, self.flops / flops_per_s)


def work_of(num_seqs: int, query_len: int, context: int) -> dict[str, Work]:
    """The work of the expensive ops by their names in the program, summed over the layers.

    In the last layer only queries, keys and values are computed for all tokens.
    """
    rows = dict.fromkeys(LINEARS, num_seqs * ((LAYERS - 1) * query_len + 1)) | {"qkv": num_seqs * LAYERS * query_len}
    found = {f"linear {name}": Work(2 * LAYERS * n * k, 2 * rows[name] * n * k) for name, (n, k) in LINEARS.items()}
    found["linear head"] = Work(2 * VOCAB * HIDDEN, 2 * num_seqs * VOCAB * HIDDEN)
    seen = num_seqs * sum(range(context - query_len + 1, context + 1))  # pairs of a query and a key
    cached = num_seqs * context * KV_HEADS * HEAD_DIM * 2 * 2
    found["attention"] = Work(LAYERS * cached, 4 * ((LAYERS - 1) * seen + num_seqs * context) * HEADS * HEAD_DIM)
    return found


class ReadProbe:
    """Measures how fast the pool's threads read memory at this moment."""

    def __init__(self, runtime: Runtime) -> None:
        self._pool = runtime.pool
        self._memory, address = Arena(chunk_bytes=0).take(READ_BYTES)
        ctypes.memset(address, 1, READ_BYTES)
        self._sums = torch.zeros(runtime.pool.num_threads, dtype=torch.int64)
        self._args = ReadArgs(address, READ_BYTES, self._sums.data_ptr())

    def bytes_per_s(self) -> float:
        begin = time.perf_counter()
        self._pool.run_op("hr_op_read", self._args)
        return READ_BYTES / (time.perf_counter() - begin)


def step_case(
    program: Program, probe: ReadProbe, measured: dict[str, Any], shape: tuple[int, int, int], runs: int
) -> dict[str, Any]:
    arrays, work = step_arrays(*shape), work_of(*shape)
    program.run(arrays)
    samples, rates, profiles = [], [], []
    for _ in range(runs):
        rates.append(probe.bytes_per_s())
        begin = time.perf_counter()
        program.run(arrays)
        samples.append(time.perf_counter() - begin)
        profiles.append(program.profile(arrays, 1))
    # The fastest profiled run is the least disturbed by other processes.
    profile = min(profiles, key=lambda found: found.seconds)
    flops_per_s = 1e9 * (measured["bf16 dot product gigaflops"] or measured["fp32 multiply-add gigaflops"])
    whole = Work(sum(w.num_bytes for w in work.values()), sum(w.flops for w in work.values()))
    best_rate = max(rates)
    return {
        "sequences": shape[0],
        "tokens_each": shape[1],
        "context": shape[2],
        "best_s": min(samples),
        "median_s": statistics.median(samples),
        "best_read_gigabytes_per_s": best_rate / 1e9,
        "share_of_limit": whole.least_s(best_rate, flops_per_s) / min(samples),
        "working_s": profile.working_s,
        "waiting_s": profile.waiting_s,
        "share_outside_ops": profile.share_outside,
        "share_of_limit_by_op": {
            name: work[name].least_s(best_rate, flops_per_s) / spent
            for name, spent in profile.working_s.items()
            if name in work
        },
        "barriers": program.num_barriers,
        "samples_s": samples,
        "read_samples_bytes_per_s": rates,
    }


def show(name: str, found: dict[str, Any]) -> None:
    print(
        f"{name:18} {found['best_s'] * 1e3:8.2f} ms, {found['share_of_limit']:.0%} of the limit; reading "
        f"{found['best_read_gigabytes_per_s']:.0f} GB/s; {found['share_outside_ops']:.1%} outside ops; ms:"
    )
    shares = found["share_of_limit_by_op"]
    for op, spent in found["working_s"].items():
        print(
            f"    {op:18} {spent * 1e3:8.3f} {shares[op]:6.0%}" if op in shares else f"    {op:18} {spent * 1e3:8.3f}"
        )
    print(f"    {'waiting':18} {found['waiting_s'] * 1e3:8.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--case", action="append", choices=list(CASES), help="repeatable")
    parser.add_argument("--output", type=Path, help="where the JSON goes; without it nothing is written")
    options = parser.parse_args()
    torch.manual_seed(0)
    library = build.build()
    runtime = Runtime(library, ThreadPool(library, options.threads))
    measured, probe = limits(runtime), ReadProbe(runtime)
    program = demo_program(runtime, 2048, 64 * 256 // BLOCK_SIZE)
    steps = {}
    for name, shape in CASES.items():
        if options.case and name not in options.case:
            continue
        runs = max(3, options.runs // (1 if shape[0] * shape[1] <= 8 else 4))
        steps[name] = step_case(program, probe, measured, shape, runs)
        show(name, steps[name])
    if options.output:
        results = {"threads": runtime.pool.num_threads, "level": library.level, "limits": measured, "steps": steps}
        write_report(options.output, "kernel_step", results)


if __name__ == "__main__":
    main()
