"""Prefill on a GPU: one prompt of 8192 tokens in one step, dummy weights in the shape of Llama-3.1-8B in bf16.

    python benchmarks/gpu_prefill.py --out results/gpu_prefill.json [--tokens 8192] [--weights bf16] [--dry]

Reports the share of the rate of bf16 products measured in this run, counting the products of the layers' matrices and
of attention under its causal mask. Target: 65%. A sample is from the step's plan to its token on the host.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import gpu_common
from gpu_common import Feeder, attempt, limits, profile_us, rates_of
from gpu_ledger import Step, lines, step_flop
from gpu_shapes import MODELS


def measure(folder: Path, arguments: Any, weights: str, tokens: int, found: dict[str, Any]) -> dict[str, Any]:
    config, options = MODELS[arguments.model], {"quantization": "fp8"} if weights == "fp8" else {}
    feeder = Feeder(
        folder,
        dry=arguments.dry,
        device=arguments.device,
        max_num_seqs=1,
        context=tokens + 64,
        max_num_batched_tokens=tokens,
        enforce_eager=True,
        **options,
    )

    def prompt() -> None:
        feeder.enter([tokens])
        feeder.release()

    samples_s = []
    for index in range(arguments.repeats + 2):
        began_s = time.perf_counter()
        prompt()
        if index >= 2:
            samples_s.append(time.perf_counter() - began_s)
    measured_us = profile_us(feeder.device, prompt, 2)
    feeder.close()
    step = Step(1, tokens, tokens, weight_bytes=1 if options else 2)
    flop, median_s = step_flop(config, step), statistics.median(samples_s)
    account = lines(config, step, rates_of(found), measured_us)
    print(*account, sep="\n")
    return {
        "step_s": median_s,
        "tokens_s": tokens / median_s,
        "flop": flop,
        "share_of_matrix_rate": flop / median_s / found["bf16_flop_s"],
        "device_us_by_phase": measured_us,
        "account": account,
        "samples_s": samples_s,
    }


def main() -> None:
    parser = gpu_common.arguments(__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="llama-8b")
    parser.add_argument("--tokens", type=gpu_common.positive, action="append", help="repeatable; default 8192")
    parser.add_argument("--weights", choices=["bf16", "fp8"], action="append", help="repeatable; default bf16")
    parser.add_argument("--repeats", type=gpu_common.positive, default=10)
    arguments = parser.parse_args()
    lengths, kinds = arguments.tokens or [8192], arguments.weights or ["bf16"]
    if arguments.dry:
        arguments.model, arguments.repeats, lengths, kinds = "tiny", 2, [256], ["bf16"]
    found = limits(gpu_common.device_of(arguments.dry, arguments.device), arguments.dry)
    report = gpu_common.open_report(arguments, "gpu_prefill", {"model": arguments.model, "limits": found})
    with gpu_common.model_folder(arguments.model) as folder:
        for weights in kinds:
            for tokens in lengths:
                case = {"weights": weights, "tokens": tokens}
                row = attempt(report, case, partial(measure, folder, arguments, weights, tokens, found))
                if "failed" not in row:
                    print(
                        f"{weights}, {tokens} tokens: {1e3 * row['step_s']:.1f} ms, {row['tokens_s']:.0f} tok/s, "
                        f"{row['share_of_matrix_rate']:.1%} of the matrix rate"
                    )
    gpu_common.finish(report)


if __name__ == "__main__":
    main()
