"""Predicts a step's cost: bytes and products of each phase, its least time at given limits, and its launches.

    python benchmarks/gpu_ledger.py

prints the cases of `gpu_decode.py` and `gpu_prefill.py` for the published limits of an H200, and which of their targets
the step cannot meet as it is built, even if each kernel reached its limit. Those scripts print the same for the limits
that they measure, beside a profile. A phase's least time is the larger of moving its bytes (weights, keys, values and
activations, once) at the rate of copying, and multiplying at the rate of products, plus a launch per kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpu_shapes import LLAMA_8B, cache_bytes, head_dim_of, weight_elements

from headrace.kernels.triton.configs import most_small_rows

LAUNCH_S = 1.3e-6
"""Seconds between consecutive kernels of a graph that have little to do; `gpu_common.limits` measures it on a GPU."""
NAMES = (  # the first whose part occurs in a kernel's name gives the phase
    ("attention", ("attend_kernel", "combine_kernel")),
    ("rounding to fp8", ("round_tokens",)),
    ("norms", ("norm_kernel",)),
    ("rotary, cache write", ("rotary_cache",)),
    ("activation", ("activat",)),
    ("choice of tokens", ("chunk_kernel", "pick_kernel", "part_kernel", "threshold_kernel")),
    ("matrices", ("gemm", "gemv", "nvjet", "cutlass", "xmma", "cublas", "splitk", "linear", "product")),
)
"""cuBLAS names its kernels by their construction, so a profile counts the head's product among the matrices."""


@dataclass(frozen=True)
class Rates:
    copy_bytes_s: float
    flop_s: float
    launch_s: float = LAUNCH_S


@dataclass(frozen=True)
class Step:
    """Rows that each compute the last `query_len` of `context` tokens."""

    rows: int
    context: int
    query_len: int = 1
    weight_bytes: float = 2
    """Bytes of a weight of the layers' matrices; the head's take 2."""
    cache_bytes: float = 2

    @property
    def tokens(self) -> int:
        return self.rows * self.query_len

    @property
    def is_fused(self) -> bool:
        """Whether norms, activation, rounding and addition are fused into the matrices' kernels."""
        return self.tokens <= most_small_rows(int(8 * self.weight_bytes), rounds_input=self.weight_bytes < 2)

    @property
    def pairs(self) -> int:
        """The number of pairs of a query and a key that it attends to."""
        return self.rows * (self.query_len * self.context - self.query_len * (self.query_len - 1) // 2)


@dataclass(frozen=True)
class Phase:
    name: str
    launches: int
    num_bytes: float
    flop: float

    def predicted_s(self, rates: Rates) -> float:
        return max(self.num_bytes / rates.copy_bytes_s, self.flop / rates.flop_s) + self.launches * rates.launch_s


def phases(config: dict[str, Any], step: Step) -> list[Phase]:
    """The phases of a decoder step of a dense gated model, in bf16 or with fp8 matrices."""
    hidden, layers, inner = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
    heads, kv_heads, size = config["num_attention_heads"], config["num_key_value_heads"], head_dim_of(config)
    tokens, width = step.tokens, (heads + 2 * kv_heads) * size
    elements, head = weight_elements(config)
    inputs = layers * (hidden + heads * size + hidden + inner)  # of a token, to the four matrices of each layer
    outputs = layers * (width + hidden + 2 * inner + hidden)
    fp8, split = step.weight_bytes < 2, step.query_len > 1 or step.rows * kv_heads <= 132
    cached = cache_bytes(config, step.rows * step.context, step.cache_bytes)
    queries = 2 * layers * heads * size * tokens
    moved = elements * step.weight_bytes + tokens * (inputs * (1 if fp8 else 2) + 2 * outputs)
    logits = 4 * step.rows * config["vocab_size"]
    norms = 1 if step.is_fused else 2 * layers + 1
    found = [
        Phase("inputs, embedding", 20, 4 * tokens * hidden, 0),
        Phase("norms", norms, norms * 8 * tokens * hidden, 0),
        Phase("matrices", 4 * layers + 1, moved + 2 * head + logits, 2 * tokens * elements + 2 * step.rows * head),
        Phase("rotary, cache write", layers, 4 * layers * tokens * width, 0),
        Phase("attention", layers * (2 if split else 1), cached + 2 * queries, attention_flop(config, step)),
        Phase("choice of tokens", 5, 2 * logits, 0),
    ]
    if step.is_fused:
        return found
    rounding = [Phase("rounding to fp8", 4 * layers, 3 * tokens * inputs, 0)] if fp8 else []
    return [*found, *rounding, Phase("activation", layers, 6 * layers * tokens * inner, 0)]


def attention_flop(config: dict[str, Any], step: Step) -> float:
    return 4 * config["num_hidden_layers"] * config["num_attention_heads"] * head_dim_of(config) * step.pairs


def step_flop(config: dict[str, Any], step: Step) -> float:
    """FLOP of the layers' matrices, of the head for each row's last token, and of attention under its mask."""
    elements, head = weight_elements(config)
    return 2 * step.tokens * elements + 2 * step.rows * head + attention_flop(config, step)


def limit(config: dict[str, Any], step: Step, rates: Rates) -> tuple[float, str]:
    """The least seconds of any step, and the bound: weights, keys and values read once, or all products."""
    elements, head = weight_elements(config)
    cached = cache_bytes(config, step.rows * step.context, step.cache_bytes)
    reading_s = (elements * step.weight_bytes + 2 * head + cached) / rates.copy_bytes_s
    multiplying_s = step_flop(config, step) / rates.flop_s
    return max(reading_s, multiplying_s), "bandwidth" if reading_s >= multiplying_s else "compute"


def phase_of(kernel: str) -> str:
    """The phase that a profile's kernel belongs to; kernels that are neither ours nor cuBLAS's are torch's own."""
    lowered = kernel.lower()
    return next((name for name, parts in NAMES if any(part in lowered for part in parts)), "inputs, embedding")


def lines(config: dict[str, Any], step: Step, rates: Rates, measured_us: dict[str, float] | None = None) -> list[str]:
    """A line for each phase: predicted microseconds and, with a profile, measured ones."""
    found = measured_us or {}
    shown = [
        f"    {phase.name:20} {1e6 * phase.predicted_s(rates):9.1f} us on paper ({phase.launches:3} launches)"
        + (f" {found[phase.name]:9.1f} us measured" if phase.name in found else "")
        for phase in phases(config, step)
    ]
    total_s = sum(phase.predicted_s(rates) for phase in phases(config, step))
    least_s, bound_by = limit(config, step, rates)
    total = f"    {'all':20} {1e6 * total_s:9.1f} us on paper, {least_s / total_s:.1%} of the {bound_by} limit"
    return [*shown, total + (f" {sum(found.values()):9.1f} us measured" if found else "")]


CASES = (  # name, step, target share of its limit
    ("decode, batch 1, bf16", Step(1, 1024), 0.85),
    ("decode, batch 1, fp8", Step(1, 1024, weight_bytes=1), None),
    ("decode, batch 32, bf16", Step(32, 1024), 0.80),
    ("decode, batch 256, bf16", Step(256, 1024), 0.80),
    ("prefill of 8192", Step(1, 8192, 8192), 0.65),
)


def main() -> None:
    rates, totals_s = Rates(4.3e12, 788e12), {}
    for name, step, target in CASES:
        totals_s[name] = sum(phase.predicted_s(rates) for phase in phases(LLAMA_8B, step))
        share = limit(LLAMA_8B, step, rates)[0] / totals_s[name]
        judged = "" if target is None else f"; {target:.0%} to reach" + ("" if share > target else ": NOT on paper")
        print(f"{name}: {share:.1%} of its limit{judged}", *lines(LLAMA_8B, step, rates), sep="\n")
    ratio = totals_s["decode, batch 1, bf16"] / totals_s["decode, batch 1, fp8"]
    print(f"fp8 is {ratio:.2f} times bf16 at batch 1; 1.6 to reach" + ("" if ratio > 1.6 else ": NOT on paper"))


if __name__ == "__main__":
    main()
