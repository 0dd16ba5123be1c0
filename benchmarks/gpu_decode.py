"""Decoding on a GPU: dummy weights in the shape of Llama-3.1-8B, batches 1, 32 and 256 at a context of 1024 tokens.

    python benchmarks/gpu_decode.py --out results/gpu_decode.json [--batch 1] [--weights fp8] [--model NAME] [--dry]

A step's limit is the larger of two times: what it must read (weights once, every request's keys and values) at the
rate that copying reaches in this run, and what it must multiply at the rate that bf16 products reach. To reach: 85% of
it at batch 1, 80% at 32 and 256, and 1.6 times bf16's tokens per second with fp8 weights at batch 1 (whose compute
limit is left at bf16's rate); and under 50 us between consecutive graphs at batch 64 (`gap_us`: the time of a step
less the time that the device needs for the graph alone, replayed back to back).
"""

from __future__ import annotations

import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import gpu_common
import torch
from gpu_common import Feeder, cache_bytes, limits, weight_flops
from report import write_report

from headrace.executor.gpu_sampler import Choice

BATCHES = (1, 32, 64, 256)
REPLAYS = 50


def measure(
    folder: Path, arguments: Any, weights: str, batch: int, steps: int, context: int, found: dict[str, Any]
) -> dict[str, Any]:
    config = gpu_common.MODELS[arguments.model]
    quantization = {} if weights == "bf16" or arguments.dry else {"quantization": "fp8"}
    feeder = Feeder(
        folder,
        dry=arguments.dry,
        device=arguments.device,
        max_num_seqs=batch,
        context=context + 2 * steps + 64,
        max_num_batched_tokens=max(2048, batch),
        cudagraph_capture_sizes=() if arguments.dry else (batch,),
        **quantization,
    )
    capture_s = feeder.capture()
    feeder.enter(batch, context)
    samples_s = run_steps(feeder, steps)
    graph_s = replays_s(feeder, batch)
    breakdown_us = feeder.executor.steps.times.summary()
    layers, head = weight_flops(config)
    middle = context + steps
    read_bytes = layers * (1 if quantization else 2) + 2 * head + batch * cache_bytes(config, middle)
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    attention_flop = 4 * config["num_hidden_layers"] * config["num_attention_heads"] * head_dim * middle
    flop = batch * (2 * (layers + head) + attention_flop)
    limit_s = max(read_bytes / found["copy_bytes_s"], flop / found["bf16_flop_s"])
    median_s = statistics.median(samples_s)
    feeder.close()
    return {
        "weights": weights,
        "batch": batch,
        "context": context,
        "step_us": 1e6 * median_s,
        "tokens_s": batch / median_s,
        "limit_us": 1e6 * limit_s,
        "bound_by": "bandwidth" if read_bytes / found["copy_bytes_s"] >= limit_s else "compute",
        "share_of_limit": limit_s / median_s,
        "graph_us": 1e6 * statistics.median(graph_s) if graph_s else None,
        "gap_us": 1e6 * (median_s - statistics.median(graph_s)) if graph_s else None,
        "capture_s": capture_s,
        "graph_pool_bytes": feeder.reading.graph_bytes,
        "breakdown_us": breakdown_us,
        "samples_s": samples_s,
        "graph_samples_s": graph_s,
    }


def run_steps(feeder: Feeder, steps: int) -> list[float]:
    """Seconds from one result to the next, with a step started before the one before is read."""
    feeder.decode()
    for _ in range(8):
        feeder.decode()
        feeder.collect()
    feeder.executor.steps.times.steps.clear()
    samples_s, began_s = [], time.perf_counter()
    for _ in range(steps):
        feeder.decode()
        feeder.collect()
        now_s = time.perf_counter()
        samples_s.append(now_s - began_s)
        began_s = now_s
    feeder.collect()
    return samples_s


def replays_s(feeder: Feeder, batch: int) -> list[float]:
    """Seconds of the device for one graph, by events around replays back to back; empty where there are no graphs.

    The rows go on where they are, so this comes last.
    """
    runner = feeder.executor.steps
    graph = runner.graphs.find(batch, Choice.ARGMAX)
    if graph is None:
        return []
    samples = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(REPLAYS // 5):
            graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / 1e3 / (REPLAYS // 5))
    return samples


def main() -> None:
    parser = gpu_common.arguments(__doc__)
    parser.add_argument("--model", choices=list(gpu_common.MODELS), default="llama-8b")
    parser.add_argument("--batch", type=int, action="append", help="repeatable; default 1, 32, 64 and 256")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--weights", choices=["bf16", "fp8"], action="append", help="repeatable; default both")
    arguments = parser.parse_args()
    batches, steps, context = arguments.batch or BATCHES, arguments.steps, arguments.context
    if arguments.dry:
        arguments.model, batches, steps, context = "tiny", arguments.batch or (1, 4), min(steps, 20), 64
    found = limits(gpu_common.device_of(arguments.dry, arguments.device), arguments.dry)
    rows = []
    with gpu_common.model_folder(arguments.model) as folder:
        for weights, batch in itertools.product(arguments.weights or ("bf16", "fp8"), batches):
            row = measure(folder, arguments, weights, batch, steps, context, found)
            rows.append(row)
            gap = "" if row["gap_us"] is None else f", {row['gap_us']:.0f} us between graphs"
            print(
                f"{weights}, batch {batch:>4}: {row['step_us']:>8.0f} us a step, {row['tokens_s']:>8.0f} tok/s, "
                f"{row['share_of_limit']:.1%} of the {row['bound_by']} limit{gap}"
            )
    if arguments.out:
        write_report(arguments.out, "gpu_decode", {"model": arguments.model, "limits": found, "cases": rows})


if __name__ == "__main__":
    main()
