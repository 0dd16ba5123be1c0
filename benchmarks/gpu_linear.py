"""Linear layers of few rows on a GPU: which kernel is the fastest for which shape, type and number of rows.

    python benchmarks/gpu_linear.py --out results/gpu_linear.json [--sweep] [--budget-s 65] [--only "down fp8"] [--dry]

Every matrix of the layers of Llama-3.1-8B and Qwen3-0.6B, in bf16, fp8, int8 and int4 (groups of 32), with 1 to 256
rows: by torch (F.linear, and _scaled_mm with the rounding of its inputs, without and with `use_fast_accum`: "torch
fast"), by the small kernel, by the tile kernel, and by the small kernel fused with the adjacent norm, activation or
addition ("fused"; the others are timed without them). A sample is a graph of calls on more weights than fit any cache,
divided by their number. For each, prints the best, and the share of its limit: the longer of moving its bytes at the
rate of copying, and multiplying at the rate of bf16 products, both measured in this run. The results are meant to
settle the table in `kernels/triton/configs.py`: MOST_SMALL_ROWS, `small_tiles`, `matrix_tiles`, `least_scaled_mm_rows`.
--sweep times other tiles too. Cases for which the budget leaves no time are skipped: fewer rows and Llama come first.
--dry runs tiny shapes by Triton's interpreter.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gpu_common
import torch
import torch.nn.functional as F
from gpu_common import attempt, limits, times_s
from gpu_shapes import LLAMA_8B, QWEN3_06B, TINY, head_dim_of
from torch import Tensor

CACHE_BYTES = 1 << 28
"""Several times the size of a GPU's L2 cache."""
SAMPLES = 10
ROWS = (1, 2, 4, 8, 16, 32, 64, 256)
TYPES = ("bf16", "fp8", "int8", "int4")
GROUP = 32
MOST_SMALL = 8
SMALL_SWEEP = tuple(itertools.product((2, 4, 8, 16), (2, 4, 8)))
"""(columns of a program, warps)"""
TILE_SWEEP = tuple(itertools.product((16, 32, 64), (64, 128, 256), (1, 2, 4, 8)))
"""(rows of the weight, inputs, splits)"""


DRY: dict[str, Any] = {
    **TINY,
    **{"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1},
    "vocab_size": 24,
}
Call = Callable[[Any, Tensor], Any]
"""A function of a packed layer and x."""


@dataclass(frozen=True)
class Matrix:
    model: str
    name: str
    shape: tuple[int, int]
    """(out, in)"""


def matrices(model: str, config: dict[str, Any]) -> Iterator[Matrix]:
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], head_dim_of(config)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    yield Matrix(model, "gate up", (2 * inner, hidden))
    yield Matrix(model, "down", (hidden, inner))
    yield Matrix(model, "qkv", ((heads + 2 * kv_heads) * size, hidden))
    yield Matrix(model, "output", (hidden, heads * size))
    yield Matrix(model, "head", (config["vocab_size"], hidden))


def measured(model: str, config: dict[str, Any]) -> Iterator[tuple[Matrix, str]]:
    """Each matrix in each type that it is stored in; the head is not quantised."""
    for matrix, kind in itertools.product(matrices(model, config), TYPES):
        if matrix.name != "head" or kind == "bf16":
            yield matrix, kind


@dataclass(frozen=True)
class Bench:
    device: torch.device
    found: dict[str, Any]
    dry: bool
    ends_s: float
    """After this time of time.monotonic() no case is started."""

    def packed(self, matrix: Matrix, kind: str) -> list[Any]:
        """Copies of the matrix, packed as the engine does, that together exceed any cache."""
        from headrace.executor.gpu.kernels import to_fp8, to_int4, to_int8
        from headrace.kernels.triton import linear

        made: list[Any] = []
        num_bytes = matrix.shape[0] * matrix.shape[1] * {"bf16": 2.0, "fp8": 1.0, "int8": 1.0625, "int4": 0.625}[kind]
        for _ in range(1 if self.dry else max(2, min(64, -(-CACHE_BYTES // int(num_bytes))))):
            weight = torch.randn(matrix.shape, device=self.device, dtype=torch.bfloat16) * matrix.shape[1] ** -0.5
            if kind == "bf16":
                made.append(linear.linear(weight, None))
            elif kind == "fp8":
                made.append(linear.linear_fp8_dynamic(*to_fp8(weight), None))
            elif kind == "int8":
                made.append(linear.linear_int8(*to_int8(weight, GROUP), None))
            else:
                made.append(linear.linear_int4(*to_int4(weight, GROUP), None))
        return made

    def samples_s(self, calls: list[Callable[[], Any]]) -> list[float]:
        """Seconds per call."""
        if self.dry:
            return times_s(self.device, calls[0], 1, warm_up=0)
        from headrace.executor.gpu.hardware.cuda import CudaCapturer

        times = max(1, 16 // len(calls))

        def run() -> None:
            for call in calls * times:
                call()

        replay, _ = CudaCapturer(self.device).capture(run)
        return [sample / len(calls) / times for sample in times_s(self.device, replay, SAMPLES)]

    def compile(self, layer: Any, listed: list[tuple[dict[str, Any], Call]]) -> None:
        """Calls each once, in parallel, so that its kernels are compiled. Failures are ignored, since they will
        recur."""

        def once(case: dict[str, Any], call: Call) -> None:
            with contextlib.suppress(Exception), torch.inference_mode():
                x = torch.randn(case["rows"], layer._packed.in_features, device=self.device, dtype=torch.bfloat16)
                call(layer, x)

        if not self.dry:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(once, *zip(*listed, strict=True)))
            gpu_common.synchronize(self.device)

    def time(self, layers: list[Any], rows: int, call: Call) -> dict[str, Any]:
        packed = layers[0]._packed
        out_features, in_features = len(packed.codes), packed.in_features
        x = torch.randn(rows, in_features, device=self.device, dtype=torch.bfloat16)
        samples_s = self.samples_s([partial(call, layer, x) for layer in layers])
        stored = [part for part in (packed.codes, packed.scales, packed.shifts) if part is not None]
        num_bytes = sum(part.nbytes for part in stored) + 2 * rows * (in_features + out_features)
        flop = 2 * rows * in_features * out_features
        least_s = max(num_bytes / self.found["copy_bytes_s"], flop / self.found["bf16_flop_s"])
        median_s = statistics.median(samples_s)
        return {"us": 1e6 * median_s, "share_of_limit": least_s / median_s, "samples_s": samples_s}


def ways(matrix: Matrix, kind: str, rows: int, device: torch.device) -> Iterator[tuple[str, Call]]:
    """The ways to multiply a layer, by name."""
    from headrace.kernels.triton.linear import ScaledLinear
    from headrace.kernels.triton.linear_small import Around

    scaled = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)
    if kind == "bf16":
        yield "torch", lambda layer, x: F.linear(x, layer.weight, layer.bias)
    elif kind == "fp8" and scaled:
        yield "torch", ScaledLinear.apply_scaled
        yield "torch fast", scaled_fast
    if rows <= MOST_SMALL:
        yield "small", lambda layer, x: layer._apply_small(x)
        in_features = matrix.shape[1]
        norm = torch.ones(in_features, device=device), 1e-5
        residual = torch.randn(rows, matrix.shape[0], device=device, dtype=torch.bfloat16)
        around = {
            "qkv": Around(norm),
            "gate up": Around(norm, "silu"),
            "output": Around(residual=residual),
            "down": Around(residual=residual),
        }
        if matrix.name in around:
            yield "fused", lambda layer, x: layer._apply_small(x, around[matrix.name])
    if kind != "bf16":
        yield "tile", in_tiles


def scaled_fast(layer: Any, x: Tensor) -> Tensor:
    """Like `ScaledLinear.apply_scaled`, but sums keep only the tensor cores' own precision (some 14 bits)."""
    from headrace.kernels.triton.linear import round_tokens

    codes, scales = round_tokens(x)
    of: dict[str, Any] = {"scale_b": layer.scales.view(1, -1), "out_dtype": x.dtype, "use_fast_accum": True}
    product: Tensor = torch._scaled_mm(codes, layer.codes.t(), scale_a=scales, **of)
    return product


def in_small_tiles(layer: Any, x: Tensor, tiles: Any) -> Tensor:
    from headrace.kernels.triton.linear_small import multiply_small

    return multiply_small(x, layer._packed, tiles)


def in_tiles(layer: Any, x: Tensor, tiles: Any = None) -> Tensor:
    from headrace.kernels.triton import linear

    if isinstance(layer, linear.ScaledLinear):
        return layer.apply_tiled(x, tiles)
    return linear.multiply(x, layer._packed, tiles or layer._tiles(x))


def swept(layer: Any, kind: str, rows: int) -> Iterator[tuple[dict[str, Any], Call]]:
    """Other tiles, and the functions that multiply with them."""
    from headrace.kernels.triton.configs import SmallTiles, matrix_tiles

    if rows <= MOST_SMALL:
        for columns, num_warps in SMALL_SWEEP:
            if columns * rows <= 32:
                small = SmallTiles(columns, num_warps)
                yield {"way": "small", "tiles": vars(small)}, partial(in_small_tiles, tiles=small)
    if kind != "bf16" and 1 < rows <= 64:
        shape = len(layer._packed.codes), layer._packed.in_features
        own = matrix_tiles(layer._device, rows, 2, shape, kind == "int4")
        for block_n, block_k, splits in TILE_SWEEP:
            if kind != "int4" or block_k == 128:
                tiles = replace(own, block_n=block_n, block_k=block_k, splits=splits)
                yield {"way": "tile", "tiles": vars(tiles)}, partial(in_tiles, tiles=tiles)


def cases(bench: Bench, models: dict[str, dict[str, Any]], rows_of: tuple[int, ...], arguments: Any) -> Iterator[Any]:
    """(case, its measurement), fewer rows first."""
    for model, config in models.items():
        for few in (True, False):
            for matrix, kind in measured(model, config):
                if arguments.only not in f"{matrix.name} {kind}":
                    continue
                if time.monotonic() > bench.ends_s:
                    return
                layers = bench.packed(matrix, kind)
                listed: list[tuple[dict[str, Any], Call]] = []
                for rows in (each for each in rows_of if (each <= 2) == few):
                    head: dict[str, Any] = {
                        "model": model,
                        "matrix": matrix.name,
                        "shape": matrix.shape,
                        "type": kind,
                        "rows": rows,
                    }
                    listed += [(head | {"way": way}, call) for way, call in ways(matrix, kind, rows, bench.device)]
                    if arguments.sweep:
                        listed += [(head | other, call) for other, call in swept(layers[0], kind, rows)]
                bench.compile(layers[0], listed)
                for case, call in listed:
                    if time.monotonic() > bench.ends_s:
                        return
                    yield case, partial(bench.time, layers, case["rows"], call)


def show(found: list[dict[str, Any]]) -> None:
    """A line for each shape, type and number of rows: the share of every way, and the best of each in the sweep."""
    good = [case for case in found if "failed" not in case]
    key = ("model", "matrix", "type", "rows")
    for which, group in itertools.groupby(good, lambda case: tuple(case[name] for name in key)):
        each = list(group)
        own = {case["way"]: case for case in each if "tiles" not in case}
        told = [f"{way} {case['us']:.1f} us {case['share_of_limit']:.0%}" for way, case in own.items()]
        alone = {way: case for way, case in own.items() if way != "fused"}
        best = min(alone, key=lambda way: alone[way]["us"])
        for way in ("small", "tile"):
            tried = [case for case in each if case["way"] == way and "tiles" in case]
            if tried and way in own:
                first = min(tried, key=lambda case: case["us"])
                if first["us"] < 0.97 * own[way]["us"]:
                    told.append(f"{way} with {first['tiles']} {first['us']:.1f} us {first['share_of_limit']:.0%}")
        print(f"{which[0]} {which[1]:8} {which[2]:4} {which[3]:3} rows: best {best:5} | {', '.join(told)}", flush=True)


def main() -> None:
    parser = gpu_common.arguments(__doc__)
    parser.add_argument("--sweep", action="store_true", help="other tiles too; give it a budget")
    parser.add_argument("--budget-s", type=float, default=65.0, help="seconds after which nothing more is begun")
    parser.add_argument("--only", default="", help="matrices whose name and type hold this, such as 'down fp8'")
    arguments = parser.parse_args()
    names = (f"{matrix.name} {kind}" for matrix, kind in measured("tiny", DRY))
    gpu_common.check_only(parser, arguments.only, names)
    ends_s = time.monotonic() + arguments.budget_s
    if arguments.dry:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read at the import of the kernels, below
    device = gpu_common.device_of(arguments.dry, arguments.device)
    found = limits(device, arguments.dry)
    models = {"tiny": DRY} if arguments.dry else {"llama-8b": LLAMA_8B, "qwen3-0.6b": QWEN3_06B}
    bench = Bench(device, found, arguments.dry, ends_s)
    report = gpu_common.open_report(arguments, "gpu_linear", {"limits": found, "sweep": arguments.sweep})
    with torch.inference_mode():
        for case, measure in cases(bench, models, (1, 3) if arguments.dry else ROWS, arguments):
            attempt(report, case, measure)
    show(report.results["cases"])
    if time.monotonic() > bench.ends_s:
        print(f"the rest was skipped after {arguments.budget_s:.0f} s")
    gpu_common.finish(report)


if __name__ == "__main__":
    main()
