"""Decoding on a GPU: dummy weights in the shape of Llama-3.1-8B, batches 1, 32, 64 and 256 at a context of 1024 tokens.

    python benchmarks/gpu_decode.py --out results/gpu_decode.json [--batch 1] [--weights fp8] [--model NAME]
        [--launch-early] [--beside 100000] [--dry]

A step's limit is the larger of two times: reading its bytes (weights once, every request's keys and values) at the rate
of copying, and multiplying at the rate of bf16 products, both measured in this run. Targets: 85% of the limit at batch
1, 80% at 32 and 256; 1.6 times bf16's tokens per second with fp8 weights at batch 1; and under 50 us between
consecutive graphs at batch 64. The latter is `gap_us`: by the device's clock, from the end of a step's graph to the
begin of the next one's. Prompts end so that the median step has the named context; each sample is from one result to
the next with two steps in flight. --beside adds one row of another context to each batch, as when one long request
decodes among short ones. After all timing, a profile of a few steps of each batch is compared with `gpu_ledger.py`'s
prediction. The profile comes last because the first profile in a process makes its launches slower until the process
ends (pytorch/pytorch#144455).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gpu_common
import msgspec
from gpu_common import Feeder, attempt, limits, profile_us, rates_of
from gpu_ledger import Step, limit, lines, step_flop
from gpu_shapes import MODELS
from report import Report

from headrace.executor.gpu.device_state import Mark
from headrace.executor.gpu.graphs import DecodeGraphs
from headrace.executor.gpu.sampler import StepEnding

BATCHES = (1, 32, 64, 256)
WARM_UP = 8
PROFILED_STEPS = 5


def measure(
    feeder: Feeder, config: dict[str, Any], contexts: list[int], weight_bytes: float, steps: int, found: dict[str, Any]
) -> dict[str, Any]:
    rates, batch = rates_of(found), len(contexts)
    step = Step(batch, round(statistics.mean(contexts)), weight_bytes=weight_bytes)
    feeder.enter([context - WARM_UP - steps // 2 for context in contexts])
    graphs = feeder.executor.steps.graphs
    with timed_replays(graphs, batch, feeder.device_side.mark) as marks:
        samples_s = run_steps(feeder, steps)
    graph_s, gaps_s = between(marks)
    least_s, bound_by = limit(config, step, rates)
    median_s = statistics.median(samples_s)
    account = lines(config, step, rates, {})
    print(*account, sep="\n")
    return {
        "step_us": 1e6 * median_s,
        "tokens_s": batch / median_s,
        "limit_us": 1e6 * least_s,
        "bound_by": bound_by,
        "share_of_limit": least_s / median_s,
        "flop": step_flop(config, step),
        "graph_us": 1e6 * statistics.median(graph_s) if graph_s else None,
        "gap_us": 1e6 * statistics.median(gaps_s) if gaps_s else None,
        "why_eager": graphs.why_eager,
        "host_us_by_phase": feeder.executor.steps.times.summary(),
        "device_us_by_phase": {},
        "account": account,
        "samples_s": samples_s,
        "graph_samples_s": graph_s,
        "gap_samples_s": gaps_s,
    }


@contextlib.contextmanager
def timed_replays(graphs: DecodeGraphs, batch: int, mark: Callable[[], Mark]) -> Iterator[list[tuple[Mark, Mark]]]:
    """Within the context, marks the begin and end of each replay of that batch's graph; no marks without a graph."""
    marks: list[tuple[Mark, Mark]] = []
    key = graphs.key_for(batch, StepEnding.ARGMAX)
    graph = graphs._graphs.get(key) if key is not None else None
    if graph is None:
        yield marks
        return

    def replay() -> None:
        marks.append((mark(), mark()))
        marks[-1][0].record()
        graph.replay()
        marks[-1][1].record()

    graphs._graphs[graph.key] = dataclasses.replace(graph, replay=replay)
    try:
        yield marks
    finally:
        graphs._graphs[graph.key] = graph


def between(marks: Sequence[tuple[Mark, Mark]]) -> tuple[list[float], list[float]]:
    """Seconds of each replay, and from each one's end to the next one's begin. All marks must have passed."""
    kept = marks[WARM_UP:]
    gaps_s = [begin.seconds_since(end) for (_, end), (begin, _) in itertools.pairwise(kept)]
    return [end.seconds_since(begin) for begin, end in kept], gaps_s


def run_steps(feeder: Feeder, steps: int) -> list[float]:
    """Seconds from one result to the next; each step is started before the previous result is read."""
    feeder.decode()
    for _ in range(WARM_UP):
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


def profile(
    feeder: Feeder, config: dict[str, Any], contexts: list[int], weight_bytes: float, found: dict[str, Any]
) -> dict[str, Any]:
    """The device's time by phase, compared with the prediction."""
    feeder.enter([max(1, context - WARM_UP - PROFILED_STEPS // 2) for context in contexts])
    for _ in range(WARM_UP):
        one_step(feeder)
    measured_us = profile_us(feeder.device, partial(one_step, feeder), PROFILED_STEPS)
    step = Step(len(contexts), round(statistics.mean(contexts)), weight_bytes=weight_bytes)
    account = lines(config, step, rates_of(found), measured_us)
    print(*account, sep="\n")
    return {"device_us_by_phase": measured_us, "account": account}


def one_step(feeder: Feeder) -> None:
    feeder.decode()
    feeder.collect()


def show(row: dict[str, Any]) -> None:
    if "failed" in row:
        return
    gap = "" if row["gap_us"] is None else f", {row['gap_us']:.1f} us between graphs"
    eager = f"; no graph: {row['why_eager']}" if row["why_eager"] else ""
    print(
        f"{row['weights']}, batch {row['batch']:>4}: {row['step_us']:>8.0f} us a step, {row['tokens_s']:>8.0f} tok/s, "
        f"{row['share_of_limit']:.1%} of the {row['bound_by']} limit{gap}{eager}",
        flush=True,
    )


def batches_of(arguments: argparse.Namespace) -> list[list[int]]:
    """The contexts of each batch's rows."""
    return [[arguments.context] * batch + ([arguments.beside] if arguments.beside else []) for batch in arguments.batch]


@contextlib.contextmanager
def opened(folder: Path, arguments: argparse.Namespace, weights: str) -> Iterator[Feeder]:
    """An executor for the model. Its cache leaves room for the next weights' executor in any case."""
    batches, room = batches_of(arguments), arguments.steps + PROFILED_STEPS + 64
    most = max(batches, key=len)
    feeder = Feeder(
        folder,
        dry=arguments.dry,
        device=arguments.device,
        max_num_seqs=len(most),
        context=max(most) + room,
        max_num_batched_tokens=max(8192, len(most)),
        num_gpu_blocks_override=gpu_common.blocks_for([context + room for context in most]),
        cudagraph_capture_sizes=() if arguments.dry else tuple(sorted(map(len, batches))),
        **({} if weights == "bf16" or arguments.dry else {"quantization": "fp8"}),
    )
    with contextlib.closing(feeder):
        yield feeder


def bytes_of_weight(arguments: argparse.Namespace, weights: str) -> int:
    return 2 if weights == "bf16" or arguments.dry else 1


def measure_all(folder: Path, arguments: argparse.Namespace, report: Report, weights: str) -> None:
    config, found = MODELS[arguments.model], report.results["limits"]
    began_s = time.perf_counter()
    with opened(folder, arguments, weights) as feeder:
        loaded_s = time.perf_counter() - began_s
        capture_s = feeder.capture()
        report.results[weights] = {
            "load_s": loaded_s,
            "capture_s": capture_s,
            "graph_pool_bytes": feeder.executor.steps.graphs.pool_bytes,
            "reading": msgspec.to_builtins(feeder.reading),
        }
        print(f"{weights}: ready after {loaded_s:.1f} s, graphs after {capture_s:.1f} s more", flush=True)
        for contexts in batches_of(arguments):
            case = {"weights": weights, "batch": len(contexts), "context": arguments.context} | (
                {"beside": arguments.beside} if arguments.beside else {}
            )
            weight_bytes = bytes_of_weight(arguments, weights)
            call = partial(measure, feeder, config, contexts, weight_bytes, arguments.steps, found)
            show(attempt(report, case, call))
            feeder.release()


def profile_all(folder: Path, arguments: argparse.Namespace, report: Report, weights: str) -> None:
    """Adds profiles to the measured cases."""
    config, found = MODELS[arguments.model], report.results["limits"]
    with opened(folder, arguments, weights) as feeder:
        feeder.capture()
        for contexts in batches_of(arguments):
            for case in report.results["cases"]:
                if (case["weights"], case.get("batch")) == (weights, len(contexts)) and "failed" not in case:
                    case |= profile(feeder, config, contexts, bytes_of_weight(arguments, weights), found)
                    report.save()
                    feeder.release()


def main() -> None:
    parser = gpu_common.arguments(__doc__)
    parser.add_argument("--model", choices=list(MODELS), default="llama-8b")
    parser.add_argument(
        "--batch", type=gpu_common.positive, action="append", help="repeatable; default 1, 32, 64 and 256"
    )
    parser.add_argument("--context", type=gpu_common.positive, default=1024)
    parser.add_argument("--beside", type=gpu_common.positive, help="context of one more row in each batch")
    parser.add_argument("--steps", type=gpu_common.positive, default=128)
    parser.add_argument("--weights", choices=["bf16", "fp8"], action="append", help="repeatable; default both")
    parser.add_argument("--launch-early", action="store_true", help="small linear kernels with HEADRACE_PDL=1")
    arguments = parser.parse_args()
    if arguments.launch_early:
        os.environ["HEADRACE_PDL"] = "1"
    arguments.batch = arguments.batch or list(BATCHES)
    if arguments.dry:
        arguments.model, arguments.batch, arguments.steps, arguments.context = "tiny", [1, 4], 12, 64
        arguments.beside = arguments.beside and 256
    least = WARM_UP + arguments.steps // 2
    for name in ("context", "beside"):
        if (context := getattr(arguments, name)) is not None and context <= least:
            parser.error(f"--{name} {context} leaves no prompt: {arguments.steps} steps need more than {least}")
    device, kinds = gpu_common.device_of(arguments.dry, arguments.device), arguments.weights or ("bf16", "fp8")
    found = limits(device, arguments.dry)
    report = gpu_common.open_report(arguments, "gpu_decode", {"model": arguments.model, "limits": found})
    with gpu_common.model_folder(arguments.model) as folder:
        for weights in kinds:
            try:
                measure_all(folder, arguments, report, weights)
            except Exception as error:
                traceback.print_exc()
                report.add_case({"weights": weights, "failed": f"{type(error).__name__}: {error}"[:2000]})
        for weights in kinds if device.type == "cuda" else ():
            try:
                profile_all(folder, arguments, report, weights)
            except Exception:  # a refinement must not cost the other figures
                traceback.print_exc()
    gpu_common.finish(report)


if __name__ == "__main__":
    main()
