"""Prefill on a GPU: one prompt of 8192 tokens in one step, dummy weights in the shape of Llama-3.1-8B in bf16.

    python benchmarks/gpu_prefill.py --out results/gpu_prefill.json [--tokens 8192] [--dry]

The share is of the rate that bf16 products reach in this run, counting the products of the layers' matrices and of
attention under its causal mask; to reach: 65%.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import gpu_common
from gpu_common import Feeder, limits, weight_flops
from report import write_report


def measure(folder: Path, arguments: Any, tokens: int, repeats: int, found: dict[str, Any]) -> dict[str, Any]:
    config = gpu_common.MODELS[arguments.model]
    feeder = Feeder(
        folder,
        dry=arguments.dry,
        device=arguments.device,
        max_num_seqs=1,
        context=tokens + 64,
        max_num_batched_tokens=tokens,
        enforce_eager=True,
    )
    samples_s = []
    for index in range(repeats + 2):
        began_s = time.perf_counter()
        feeder.enter(1, tokens)
        if index >= 2:
            samples_s.append(time.perf_counter() - began_s)
        feeder.release()
    feeder.close()
    layers, head = weight_flops(config)
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    attention = 2 * config["num_hidden_layers"] * config["num_attention_heads"] * head_dim * tokens * (tokens + 1)
    flop = 2 * tokens * layers + 2 * head + attention  # the head sees the last token alone
    median_s = statistics.median(samples_s)
    return {
        "tokens": tokens,
        "step_s": median_s,
        "tokens_s": tokens / median_s,
        "flop": flop,
        "share_of_matrix_rate": flop / median_s / found["bf16_flop_s"],
        "samples_s": samples_s,
    }


def main() -> None:
    parser = gpu_common.arguments(__doc__)
    parser.add_argument("--model", choices=list(gpu_common.MODELS), default="llama-8b")
    parser.add_argument("--tokens", type=int, action="append", help="repeatable; default 8192")
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    lengths = arguments.tokens or [8192]
    if arguments.dry:
        arguments.model, lengths = "tiny", [256]
    found = limits(gpu_common.device_of(arguments.dry, arguments.device), arguments.dry)
    rows = []
    with gpu_common.model_folder(arguments.model) as folder:
        for tokens in lengths:
            rows.append(measure(folder, arguments, tokens, 2 if arguments.dry else arguments.repeats, found))
            print(
                f"{tokens} tokens: {1e3 * rows[-1]['step_s']:.1f} ms, {rows[-1]['tokens_s']:.0f} tok/s, "
                f"{rows[-1]['share_of_matrix_rate']:.1%} of the matrix rate"
            )
    if arguments.out:
        write_report(arguments.out, "gpu_prefill", {"model": arguments.model, "limits": found, "cases": rows})


if __name__ == "__main__":
    main()
