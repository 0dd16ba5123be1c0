"""Packed linear layers on the CPU: GB/s of weights as a share of the same threads' read bandwidth in the same run, and
GFLOP/s as a share of the same instructions' peak, per weight type and number of rows.

Measured twice: over each weight of the demo model alone (which stays in the L3 cache), and over a set of such weights
as large as the demo model in bf16, run as one program, so that every weight comes from memory. torch's own bf16 product
is measured too.

    python benchmarks/kernel_linear.py --output benchmarks/results/kernel_linear.json
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
from pathlib import Path
from typing import Any

import torch
from report import write_report
from torch import Tensor

from headrace.kernels.cpu.linear.limits import limits, samples_of
from headrace.kernels.cpu.linear.linear import (
    DTYPES,
    WEIGHT_TYPES,
    Arena,
    LinearArgs,
    PackedLinear,
    Runtime,
    pack,
    quantise,
    runtime,
)  # fmt: skip
from headrace.kernels.cpu.program.args import ProgramC, ProgramOp

SET_BYTES = 270_000_000
SHAPES = {"qkv": (960, 576), "attention out": (576, 576), "gate up": (3072, 576), "down": (576, 1536)}
HEAD = (49152, 576)
TYPES = ("BF16", "F16", "F32", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
ROWS = (1, 8, 16, 64, 512, 2048)
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def arithmetic_of(type_name: str, measured: dict[str, Any]) -> str:
    if type_name == "BF16" and measured["bf16 dot product gigaflops"]:
        return "bf16 dot product"
    return "fp32 multiply-add" if type_name in FLOATS else "int8 dot product"


def random_rows(type_name: str, n: int, k: int) -> Tensor:
    """GGUF rows of random bits: a product's time does not depend on them, as long as no scale is NaN."""
    kind = WEIGHT_TYPES[type_name]
    rows = torch.randint(0, 256, (n, k // kind.block_size, kind.block_bytes), dtype=torch.uint8)
    # Makes the exponents of fp16 fields small (every type has them within the first or last four bytes of a block).
    rows[:, :, 1:4:2] &= 0x2F
    rows[:, :, -1] &= 0x2F
    return rows.view(n, -1)


def make(type_name: str, n: int, k: int, arena: Arena) -> PackedLinear:
    if type_name in FLOATS:
        return pack(torch.randn(n, k).to(FLOATS[type_name]), arena=arena)
    k = -(-k // WEIGHT_TYPES[type_name].block_size) * WEIGHT_TYPES[type_name].block_size
    if type_name in ("Q8_0", "Q4_1"):
        return pack(quantise(torch.randn(n, k), 8 if type_name == "Q8_0" else 4), arena=arena)
    return pack((type_name, random_rows(type_name, n, k)), arena=arena)


class Pass:
    """Multiplies every weight of a list by so many rows, in one program."""

    def __init__(self, used: Runtime, weights: list[PackedLinear], rows: int) -> None:
        self.used, self.weights = used, weights
        x_dtype = torch.float32 if weights[0].type_name == "F32" else torch.bfloat16
        x = {weight.k: torch.randn(rows, weight.k).to(x_dtype) for weight in weights}
        out = {weight.n: torch.empty(rows, weight.n, dtype=x_dtype) for weight in weights}
        self.args = []
        for weight in weights:
            used.pool.reserve(*weight.scratch(rows))
            self.args.append(
                LinearArgs(
                    weight=weight.descriptor,
                    x=x[weight.k].data_ptr(),
                    x_stride=weight.k,
                    out=out[weight.n].data_ptr(),
                    out_stride=weight.n,
                    x_dtype=DTYPES[x_dtype],
                    out_dtype=DTYPES[x_dtype],
                    fixed_rows=rows,
                )
            )
        function = ctypes.cast(used.library.dll.hr_op_linear, ctypes.c_void_p).value
        self.ops = (ProgramOp * len(weights))(
            *(ProgramOp(function, ctypes.addressof(args), barrier_before=1) for args in self.args)
        )
        self.program = ProgramC(ops=ctypes.addressof(self.ops), first=0, end=len(weights), alone_rows=-1)
        self.step = (ctypes.c_char * used.library.dll.hr_sizeof_step())()
        self.kept = (x, out)

        self.function = used.library.dll.hr_program_run
        self.function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]

    def run(self) -> None:
        self.function(self.used.pool.handle, ctypes.byref(self.program), self.step)


def case(
    used: Runtime, measured: dict[str, Any], weights: list[PackedLinear], rows: int, seconds: float
) -> dict[str, Any]:
    samples = samples_of(Pass(used, weights, rows).run, seconds)
    best = min(samples)
    num_bytes = sum(weight.nbytes for weight in weights)
    flops = 2 * rows * sum(weight.n * weight.k for weight in weights)
    arithmetic = arithmetic_of(weights[0].type_name, measured)
    return {
        "rows": rows,
        "best_s": best,
        "median_s": statistics.median(samples),
        "gigabytes_per_s": num_bytes / best / 1e9,
        "share_of_read_limit": num_bytes / best / 1e9 / measured["read_gigabytes_per_s"],
        "gigaflops": flops / best / 1e9,
        "arithmetic": arithmetic,
        "share_of_arithmetic_limit": flops / best / 1e9 / measured[f"{arithmetic} gigaflops"],
        "samples_s": samples[:200],
    }


def torch_case(n: int, k: int, rows: int, copies: int, seconds: float) -> dict[str, Any]:
    """torch's bf16 linear over `copies` different weights in turn."""
    weights = [torch.randn(n, k).to(torch.bfloat16) for _ in range(copies)]
    x = torch.randn(rows, k).to(torch.bfloat16)
    samples = samples_of(lambda: [torch.nn.functional.linear(x, weight) for weight in weights], seconds)
    best = min(samples)
    return {
        "rows": rows,
        "best_s": best,
        "median_s": statistics.median(samples),
        "gigabytes_per_s": 2 * n * k * copies / best / 1e9,
        "gigaflops": 2 * rows * n * k * copies / best / 1e9,
        "samples_s": samples[:200],
    }


def show(name: str, result: dict[str, Any]) -> None:
    print(
        f"{name:28} {result['rows']:5} rows {result['best_s'] * 1e3:9.3f} ms"
        f" {result['gigabytes_per_s']:7.1f} GB/s ({result.get('share_of_read_limit', 0):4.0%} of reading)"
        f" {result['gigaflops']:8.1f} GFLOP/s ({result.get('share_of_arithmetic_limit', 0):4.0%} of arithmetic)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the JSON goes; without it nothing is written")
    parser.add_argument("--types", nargs="+", choices=TYPES, default=TYPES)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--seconds", type=float, default=0.5, help="how long each case is measured, at least 5 runs")
    parser.add_argument("--only-set", action="store_true", help="leave out the single shapes and torch")
    asked = parser.parse_args()
    torch.manual_seed(0)
    used = runtime()
    measured = limits(used)
    print(", ".join(f"{name} {value:.1f}" for name, value in measured.items()))
    results: dict[str, Any] = {"limits": measured, "library": used.library.level, "set": {}, "shapes": {}, "torch": {}}
    for type_name in asked.types:
        arena = Arena()
        one_set = [make(type_name, n, k, arena) for n, k in SHAPES.values()]
        copies = max(1, round(SET_BYTES / sum(weight.nbytes for weight in one_set)))
        weights = one_set + [make(type_name, n, k, arena) for _ in range(copies - 1) for n, k in SHAPES.values()]
        for rows in asked.rows:
            result = case(used, measured, weights, rows, asked.seconds)
            results["set"].setdefault(type_name, []).append(result)
            show(f"{type_name} set of {copies} layers", result)
        if asked.only_set:
            continue
        for name, weight in zip((*SHAPES, "head"), (*one_set, make(type_name, *HEAD, arena)), strict=True):
            for rows in asked.rows:
                result = case(used, measured, [weight], rows, asked.seconds / 4)
                results["shapes"].setdefault(type_name, {}).setdefault(name, []).append(result)
                show(f"{type_name} {name} {weight.n} x {weight.k}", result)
    if not asked.only_set:
        torch.set_num_threads(used.pool.num_threads)
        for name, (n, k) in SHAPES.items():
            for rows in asked.rows:
                result = torch_case(n, k, rows, 1 if rows > 16 else SET_BYTES // (2 * n * k), asked.seconds / 4)
                results["torch"].setdefault(name, []).append(result)
                show(f"torch BF16 {name}", result)
    if asked.output:
        write_report(asked.output, "kernel_linear", results)


if __name__ == "__main__":
    main()
