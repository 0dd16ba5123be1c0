"""Experts on the CPU: bytes of weights that a step reads, GB/s as a share of the same threads' read bandwidth in the
same run, and GFLOP/s as a share of the same instructions' peak, per weight type and number of rows.

One layer of the size of OLMoE-1B-7B. Each run routes its rows anew, so that experts come from memory and not from
caches; one row reads `top_k` experts, many rows read all.

    python benchmarks/kernel_moe.py --output benchmarks/results/kernel_moe.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from kernel_linear import FLOATS, arithmetic_of, random_rows
from report import write_report
from torch import Tensor

from headrace.kernels.cpu.experts.args import RouteArgs
from headrace.kernels.cpu.experts.moe import PackedExperts, route_args, route_scratch_bytes
from headrace.kernels.cpu.linear.limits import limits
from headrace.kernels.cpu.linear.linear import DTYPES, Arena, PackedLinear, Runtime, pack, runtime

NUM_EXPERTS, TOP_K, HIDDEN, INNER = 64, 8, 2048, 1024
TYPES = ("BF16", "Q8_0", "Q4_K")
ROWS = (1, 4, 16, 64, 512)


def make(type_name: str, used: Runtime) -> PackedExperts:
    arena = Arena()

    def matrix(rows: int, columns: int, gated: bool) -> PackedLinear:
        whole = torch.randn(rows, columns).to(FLOATS[type_name]) if type_name in FLOATS else None
        weight = whole if whole is not None else (type_name, random_rows(type_name, rows, columns))
        return pack(weight, gated=gated, arena=arena, runtime_=used)

    return PackedExperts(
        tuple(matrix(2 * INNER, HIDDEN, True) for _ in range(NUM_EXPERTS)),
        tuple(matrix(HIDDEN, INNER, False) for _ in range(NUM_EXPERTS)),
        "silu",
    )


class Layer:
    """Routing and experts for a number of rows, with new logits in each run."""

    def __init__(self, used: Runtime, experts: PackedExperts, num_rows: int) -> None:
        self._used, self._experts, self._num_rows = used, experts, num_rows
        dtype = torch.bfloat16 if experts.inner_dtype == torch.bfloat16 else torch.float32
        x, out = torch.randn(num_rows, HIDDEN).to(dtype), torch.empty(num_rows, HIDDEN)
        ids, weights = torch.empty(num_rows, TOP_K, dtype=torch.int32), torch.empty(num_rows, TOP_K)
        args, kept = experts.describe(TOP_K, num_rows)
        inner = torch.empty(args.pass_rows, INNER, dtype=experts.inner_dtype)
        args.x, args.x_stride, args.x_dtype = x.data_ptr(), HIDDEN, DTYPES[dtype]
        args.expert_ids, args.weights, args.inner = ids.data_ptr(), weights.data_ptr(), inner.data_ptr()
        args.out, args.out_stride, args.fixed_rows = out.data_ptr(), HIDDEN, num_rows
        self._args, self._ids, self._weights = args, ids, weights
        self._kept = (kept, x, out, inner)
        used.pool.reserve(*experts.scratch(args, num_rows))
        used.pool.reserve(0, route_scratch_bytes(NUM_EXPERTS))

    def _route(self, logits: Tensor) -> None:
        args: RouteArgs = route_args(NUM_EXPERTS, TOP_K, {"scoring": "softmax", "renormalise": True})
        args.logits, args.logits_stride = logits.data_ptr(), NUM_EXPERTS
        args.expert_ids, args.weights = self._ids.data_ptr(), self._weights.data_ptr()
        args.fixed_rows = self._num_rows
        self._used.pool.run_op("hr_op_route", args)

    def run(self) -> tuple[float, int]:
        """Seconds of the experts only, and the number of experts read."""
        self._route(torch.randn(self._num_rows, NUM_EXPERTS))
        before = int(self._experts.experts_read)
        begin = time.perf_counter()
        self._used.pool.run_op("hr_op_experts", self._args)
        return time.perf_counter() - begin, int(self._experts.experts_read) - before


def case(
    used: Runtime, measured: dict[str, Any], experts: PackedExperts, num_rows: int, seconds: float
) -> dict[str, Any]:
    layer = Layer(used, experts, num_rows)
    layer.run()
    samples: list[tuple[float, int]] = []
    while len(samples) < 5 or sum(sample for sample, _ in samples) < seconds:
        samples.append(layer.run())
    # Runs that read more experts take longer, so rates are compared, not times.
    best, num_read = max(samples, key=lambda sample: sample[1] / sample[0])
    num_bytes = num_read * experts.expert_bytes
    flops = 2 * num_rows * TOP_K * 3 * HIDDEN * INNER
    arithmetic = arithmetic_of(experts.gate_up[0].type_name, measured)
    return {
        "rows": num_rows,
        "experts_read": num_read,
        "bytes_read": num_bytes,
        "share_of_all_bytes": num_bytes / experts.nbytes,
        "best_s": best,
        "median_s": statistics.median(sample for sample, _ in samples),
        "gigabytes_per_s": num_bytes / best / 1e9,
        "share_of_read_limit": num_bytes / best / 1e9 / measured["read_gigabytes_per_s"],
        "gigaflops": flops / best / 1e9,
        "arithmetic": arithmetic,
        "share_of_arithmetic_limit": flops / best / 1e9 / measured[f"{arithmetic} gigaflops"],
        "samples": samples[:200],
    }


def show(name: str, result: dict[str, Any]) -> None:
    print(
        f"{name:6} {result['rows']:4} rows read {result['experts_read']:3} experts,"
        f" {result['bytes_read'] / 1e6:7.1f} MB ({result['share_of_all_bytes']:4.0%} of all)"
        f" in {result['best_s'] * 1e3:8.3f} ms:"
        f" {result['gigabytes_per_s']:6.1f} GB/s ({result['share_of_read_limit']:4.0%} of reading)"
        f" {result['gigaflops']:7.1f} GFLOP/s ({result['share_of_arithmetic_limit']:4.0%} of arithmetic)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the JSON goes; without it nothing is written")
    parser.add_argument("--types", nargs="+", choices=(*FLOATS, "Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K"), default=TYPES)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--seconds", type=float, default=2.0, help="how long each case is measured, at least 5 runs")
    asked = parser.parse_args()
    torch.manual_seed(0)
    used = runtime()
    measured = limits(used)
    print(", ".join(f"{name} {value:.1f}" for name, value in measured.items()))
    shape = {"num_experts": NUM_EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "inner": INNER}
    results: dict[str, Any] = {"limits": measured, "library": used.library.level, "shape": shape, "types": {}}
    for type_name in asked.types:
        experts = make(type_name, used)
        for num_rows in asked.rows:
            result = case(used, measured, experts, num_rows, asked.seconds)
            results["types"].setdefault(type_name, []).append(result)
            show(type_name, result)
        del experts
    if asked.output:
        write_report(asked.output, "kernel_moe", results)


if __name__ == "__main__":
    main()
