"""Each kernel of a decode and of a prefill step at the shapes of Llama-3.1-8B: microseconds, and share of its limit.

    python benchmarks/gpu_kernels.py --out results/gpu_kernels.json [--sweep] [--only attention] [--dry]

The kernels are those that the engine chooses. A kernel's limit is the longer of moving its bytes at the rate of
copying, and multiplying at the rate of matrix products (of fp8 where both operands are fp8), both measured in this run.
For prompts, torch's own attention (FlashAttention and cuDNN, on contiguous keys and values) is measured too. A sample
is a graph of calls on more sets of inputs than fit any cache, divided by their number, so it includes the time between
two kernels of a graph. --sweep also times attention with other tiles, and reports the rows of
`kernels/triton/configs.py` that are not the fastest here. --dry runs tiny shapes by Triton's interpreter.
"""

from __future__ import annotations

import itertools
import os
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import gpu_common
import torch
import torch.nn.functional as F
from gpu_common import Refused, attempt, limits, times_s
from gpu_shapes import LLAMA_8B, TINY, head_dim_of
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

CACHE_BYTES = 1 << 28
"""Several times the size of a GPU's L2 cache."""
MOST_SETS = 12
SAMPLES = 15
BLOCK_SIZE = 16
NO_BACKEND = re.compile("No available kernel|No viable backend")
"""The errors of torch's attention on GPUs and on CPUs when the one backend that is allowed does not support a call."""
BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


@dataclass(frozen=True)
class Kernel:
    """One op on one shape. `make` returns a call with its own inputs."""

    name: str
    shape: str
    num_bytes: float
    flop: float
    make: Callable[[], Callable[[], Any]]
    fp8: bool = False


@dataclass(frozen=True)
class Machine:
    device: torch.device
    found: dict[str, Any]
    dry: bool
    served: dict[str, str] = field(default_factory=dict)
    """The version of each op that was chosen last."""

    def random(self, *shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def choose(self, op: str, dtype: torch.dtype = BF16, **facts: Any) -> Callable[..., Any]:
        """The version that the engine would call; in a dry run Triton's, if there is one."""
        from headrace.kernels import ops

        known = {"device": self.device, "dtype": dtype, **facts}
        found = ops()[op]
        if self.dry:
            found = replace(found, versions=tuple(each for each in found.versions if each.name.startswith("triton")))
        choice = found.choose(**known)
        self.served[op] = choice.name
        return choice.function

    def samples_s(self, kernel: Kernel) -> list[float]:
        """Seconds per call."""
        if self.dry:
            return times_s(self.device, kernel.make(), 1, warm_up=0)
        from headrace.executor.gpu.hardware.cuda import CudaCapturer

        count = max(2, min(MOST_SETS, -(-CACHE_BYTES // int(kernel.num_bytes))))
        calls = [kernel.make() for _ in range(count)]
        times = max(1, 24 // count)  # enough calls that the graph's launch does not dominate

        def run() -> None:
            for call in calls * times:
                call()

        with torch.inference_mode():
            replay, _ = CudaCapturer(self.device).capture(run)
        return [sample / count / times for sample in times_s(self.device, replay, SAMPLES)]

    def measure(self, kernel: Kernel) -> dict[str, Any]:
        samples_s = self.samples_s(kernel)
        rate = self.found["fp8_flop_s"] if kernel.fp8 and self.found["fp8_flop_s"] else self.found["bf16_flop_s"]
        least_s = max(kernel.num_bytes / self.found["copy_bytes_s"], kernel.flop / rate)
        median_s = statistics.median(samples_s)
        return {
            "us": 1e6 * median_s,
            "limit_us": 1e6 * least_s,
            "share_of_limit": least_s / median_s,
            "samples_s": samples_s,
        }


def linears(machine: Machine, config: dict[str, Any], tokens: int) -> Iterator[Kernel]:
    from headrace.executor.gpu.kernels import to_fp8

    hidden, inner, size = config["hidden_size"], config["intermediate_size"], head_dim_of(config)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes = {
        "qkv": ((heads + 2 * kv_heads) * size, hidden),
        "output": (hidden, heads * size),
        "gate up": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (config["vocab_size"], hidden),
    }

    def make(shape: tuple[int, int], fp8: bool) -> Callable[[], Any]:
        weight, x = machine.random(*shape) * shape[1] ** -0.5, machine.random(tokens, shape[1])
        if fp8:
            packed = machine.choose("linear_fp8_dynamic", shape=shape)(*to_fp8(weight), None)
        else:
            packed = machine.choose("linear", shape=shape)(weight, None)
        return partial(packed.apply, x)

    for name, shape in shapes.items():
        rows = min(tokens, 256) if name == "head" else tokens
        for fp8 in (False, True):
            if (fp8 and name == "head") or (name == "head" and rows != tokens):
                continue
            passed = 2 * rows * (shape[0] + shape[1])
            num_bytes = shape[0] * shape[1] * (1 if fp8 else 2) + passed
            flop = 2 * rows * shape[0] * shape[1]
            kind = "fp8" if fp8 else "bf16"
            yield Kernel(f"linear {name} {kind}", f"{tokens} rows", num_bytes, flop, partial(make, shape, fp8), fp8)


def row_kernels(machine: Machine, config: dict[str, Any], tokens: int) -> Iterator[Kernel]:
    from headrace.kernels.reference.rotary_cache import LayerCache, Rotation

    hidden, inner, size = config["hidden_size"], config["intermediate_size"], head_dim_of(config)
    heads, kv_heads, shape = config["num_attention_heads"], config["num_key_value_heads"], f"{tokens} tokens"

    def norm() -> Callable[[], Any]:
        x, residual = machine.random(tokens, hidden), machine.random(tokens, hidden)
        weight = machine.random(hidden, dtype=FP32)
        return partial(machine.choose("rms_norm", size=hidden), x, residual, weight, 1e-5)

    def activation() -> Callable[[], Any]:
        return partial(machine.choose("activate_and_multiply", kind="silu"), machine.random(tokens, 2 * inner), "silu")

    def rotary() -> Callable[[], Any]:
        joined = machine.random(tokens, heads + 2 * kv_heads, size)
        query, key, value = joined.split((heads, kv_heads, kv_heads), dim=1)
        angles = machine.random(tokens, size // 2, dtype=FP32)
        batch, keys, values = paged(machine, (kv_heads, size), [BLOCK_SIZE] * tokens, 1, BF16)
        op = machine.choose("rotary_and_write", head_dim=size)
        return partial(op, query, key, value, Rotation(angles.cos(), angles.sin()), LayerCache(keys, values), batch)

    width = (heads + 2 * kv_heads) * size
    yield Kernel("norm with residual", shape, 8 * tokens * hidden, 0, norm)
    yield Kernel("activation", shape, 6 * tokens * inner, 0, activation)
    yield Kernel("rotary, cache write", shape, 4 * tokens * width, 0, rotary)


def choices(machine: Machine, config: dict[str, Any], rows: int) -> Iterator[Kernel]:
    from headrace.kernels.reference.sampling import DeviceDraws

    def make(may_draw: bool, may_truncate: bool) -> Callable[[], Any]:
        logits = machine.random(rows, config["vocab_size"], dtype=FP32) * 3
        of: dict[str, Any] = {"device": machine.device}
        draws = DeviceDraws(
            temperature=torch.full((rows,), 0.8 if may_draw else 0.0, **of),
            top_k=torch.full((rows,), 50 if may_truncate else 0, dtype=torch.int32, **of),
            top_p=torch.full((rows,), 0.9 if may_truncate else 1.0, dtype=torch.float64, **of),
            min_p=torch.zeros(rows, dtype=torch.float64, **of),
            seed=torch.arange(rows, **of),
            position=torch.arange(rows, **of),
            may_draw=may_draw,
            may_truncate=may_truncate,
        )
        op = machine.choose("choose_tokens", dtype=FP32, vocab_size=config["vocab_size"])
        return partial(op, logits, draws)

    num_bytes = 4 * rows * config["vocab_size"]
    for name, draw, truncate in (("greedy", False, False), ("drawn", True, False), ("top-k and top-p", True, True)):
        yield Kernel(f"choice, {name}", f"{rows} rows", num_bytes, 0, partial(make, draw, truncate))


def paged(
    machine: Machine, heads: tuple[int, int], contexts: Sequence[int], query_len: int, dtype: torch.dtype
) -> tuple[Any, Tensor, Tensor]:
    """A batch whose rows compute the last `query_len` tokens of their contexts, with blocks in random order; its cache.

    heads: number of key/value heads, and values of each.
    """
    from headrace.kernels.reference.attention import PagedBatch

    rows, device = len(contexts), machine.device
    blocks = [-(-context // BLOCK_SIZE) for context in contexts]
    tables, slots = torch.zeros(rows, max(blocks), dtype=torch.int32, device=device), []
    mixed = 1 + torch.randperm(sum(blocks), device=device)
    for table, own, context in zip(tables, mixed.split(blocks), contexts, strict=True):
        table[: len(own)] = own
        positions = torch.arange(context - query_len, context, device=device)
        slots.append(own[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE)
    cache = (sum(blocks) + 1, heads[0], BLOCK_SIZE, heads[1])
    batch = PagedBatch(
        query_start=torch.arange(rows + 1, dtype=torch.int32, device=device) * query_len,
        seq_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=tables,
        slot_mapping=torch.cat(slots),
        block_size=BLOCK_SIZE,
        max_query_len=query_len,
    )
    return batch, machine.random(*cache, dtype=dtype), machine.random(*cache, dtype=dtype)


def attention(
    machine: Machine, config: dict[str, Any], contexts: Sequence[int], query_len: int, stored: torch.dtype = BF16
) -> Kernel:
    from headrace.kernels.reference.attention import AttentionParams, CacheScales

    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], head_dim_of(config)
    rows = len(contexts)

    def make() -> Callable[[], Any]:
        batch, keys, values = paged(machine, (kv_heads, size), contexts, query_len, stored)
        query = machine.random(rows * query_len, heads, size)
        op = machine.choose("paged_attention", head_dim=size, num_heads=heads, num_kv_heads=kv_heads)
        return partial(op, query, keys, values, batch, AttentionParams(size**-0.5), CacheScales())

    cached = 2 * sum(contexts) * kv_heads * size * (1 if stored is FP8 else 2)
    pairs = query_len * sum(contexts) - rows * (query_len * (query_len - 1) // 2)
    name = "attention" if stored is BF16 else "attention, fp8 cache"
    num_bytes = cached + 4 * rows * query_len * heads * size
    shape = " + ".join(f"{count} x {query_len} of {context}" for context, count in Counter(contexts).items())
    return Kernel(name, shape, num_bytes, 4 * heads * size * pairs, make)


def library_attention(machine: Machine, config: dict[str, Any], prompt: int, backend: SDPBackend) -> Kernel:
    """torch's attention for one whole prompt, as a fallback to it would compute."""
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], head_dim_of(config)

    def make() -> Callable[[], Any]:
        query, key, value = (machine.random(1, count, prompt, size) for count in (heads, kv_heads, kv_heads))

        def call() -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

        try:
            call()
        except RuntimeError as error:
            if NO_BACKEND.match(str(error)):
                raise Refused(f"torch has no {backend.name} for {heads} heads of {kv_heads} keys' heads") from error
            raise
        return call

    num_bytes, pairs = 4 * prompt * (heads + kv_heads) * size, prompt * (prompt + 1) // 2
    name = f"attention, torch {backend.name.lower()}"
    return Kernel(name, f"1 x {prompt} of {prompt}", num_bytes, 4 * heads * size * pairs, make)


def kernels_of(machine: Machine, config: dict[str, Any]) -> Iterator[Kernel]:
    """Steps of 1, 32 and 256 decodes with contexts of 1024, a prompt of 8192, and 40 decodes beside one of 100,000."""
    batches, context, prompt = ((2,), 40, 24) if machine.dry else ((1, 32, 256), 1024, 8192)
    for rows in batches:
        yield from linears(machine, config, rows)
        yield from row_kernels(machine, config, rows)
        yield attention(machine, config, [context] * rows, 1)
        yield attention(machine, config, [context] * rows, 1, FP8)
        yield from choices(machine, config, rows)
    yield from linears(machine, config, prompt)
    yield from row_kernels(machine, config, prompt)
    yield attention(machine, config, [prompt], prompt)
    yield attention(machine, config, [prompt], prompt, FP8)
    for backend in (SDPBackend.MATH,) if machine.dry else (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        yield library_attention(machine, config, prompt, backend)
    yield attention(machine, config, [context] * 3 + [2 * context] if machine.dry else [context] * 40 + [100_000], 1)
    if not machine.dry:
        yield attention(machine, config, [32768], 1)


DECODE_SWEEP = ((32, 4, 3), (64, 4, 3), (64, 4, 5), (64, 8, 3), (128, 4, 3), (128, 8, 3))
"""(keys per iteration, warps, stages); a tile has 16 rows, of which Llama's groups of four heads use four."""
PREFILL_SWEEP = ((64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 5), (128, 128, 8, 3), (64, 128, 4, 3))
"""(rows of queries, keys, warps, stages)"""


def sweep(machine: Machine, config: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """Cases and their measurements: attention with the table's tiles first (no tiles), then with others."""
    from headrace.kernels.triton.configs import Tiles

    rows, context, prompt = ((2,), 40, 24) if machine.dry else ((1, 32, 256), 1024, 8192)
    decodes = [None, *(Tiles(16, *each) for each in (DECODE_SWEEP[:1] if machine.dry else DECODE_SWEEP))]
    prefills = [None, *(Tiles(*each) for each in (PREFILL_SWEEP[:1] if machine.dry else PREFILL_SWEEP))]
    shapes = [("decode_tiles", ([context] * count, 1), decodes) for count in rows]
    shapes += [("prefill_tiles", ([prompt], prompt), prefills)]
    for table, (contexts, query_len), tried in shapes:
        kernel = attention(machine, config, contexts, query_len)
        for tiles in tried:
            case = {"sweep": table, "shape": kernel.shape, "tiles": None if tiles is None else vars(tiles)}
            yield case, partial(with_tiles, machine, kernel, table, tiles)


def with_tiles(machine: Machine, kernel: Kernel, table: str, tiles: Any) -> dict[str, Any]:
    from headrace.kernels.triton import attention as launcher

    if tiles is None:
        return machine.measure(kernel)
    with mock.patch.object(launcher, table, return_value=tiles):
        return machine.measure(kernel)


def show_sweep(cases: list[dict[str, Any]]) -> None:
    """For each shape, the table's tiles and the fastest ones."""
    swept = [case for case in cases if "sweep" in case and "failed" not in case]
    for (table, shape), group in itertools.groupby(swept, lambda case: (case["sweep"], case["shape"])):
        found = list(group)
        best = min(found, key=lambda case: case["us"])
        own = next((case for case in found if case["tiles"] is None), best)
        print(
            f"{table} at {shape}: {own['us']:.1f} us as it is, {best['us']:.1f} us with {best['tiles'] or 'the same'}"
        )


def main() -> None:
    parser = gpu_common.arguments(__doc__)
    parser.add_argument("--sweep", action="store_true", help="attention with other tiles too")
    parser.add_argument("--only", default="", help="kernels whose names hold this")
    arguments = parser.parse_args()
    if arguments.dry:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read at the import of the kernels, below
    gpu_common.check_only(
        parser, arguments.only, (each.name for each in kernels_of(Machine(torch.device("cpu"), {}, True), TINY))
    )
    device, config = gpu_common.device_of(arguments.dry, arguments.device), TINY if arguments.dry else LLAMA_8B
    found = limits(device, arguments.dry)
    machine = Machine(device, found, arguments.dry)
    report = gpu_common.open_report(
        arguments, "gpu_kernels", {"model": "tiny" if arguments.dry else "llama-8b", "limits": found}
    )
    with torch.inference_mode():
        for kernel in kernels_of(machine, config):
            if arguments.only not in kernel.name:
                continue
            row = attempt(report, {"kernel": kernel.name, "shape": kernel.shape}, partial(machine.measure, kernel))
            if "us" in row:
                print(
                    f"{kernel.name:24} {kernel.shape:>18} {row['us']:10.1f} us {row['share_of_limit']:6.1%}", flush=True
                )
        if arguments.sweep and "attention".startswith(arguments.only):
            for case, measure in sweep(machine, config):
                attempt(report, case, measure)
    report.results["served"] = machine.served
    report.save()
    show_sweep(report.results["cases"])
    gpu_common.finish(report)


if __name__ == "__main__":
    main()
