"""Runs `vllm bench serve` and `headrace bench serve` alternately against one running server: do their results agree?

    python benchmarks/agreement.py --peers PEERS --model FOLDER

PEERS is where `../shared/peers/setup.sh` installed vLLM. The server is Headrace's. Both clients send random prompts of
the same lengths at the same concurrency. Prints the ratio of medians over the rounds, writes results/agreement.json,
and fails (status 1) where throughput, time to first token or inter-token latency differ by more than 5%.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from report import write_report

from headrace.frontend.bench.results.metrics import columns, number
from headrace.frontend.bench.traffic.child_server import running

RESULTS = Path(__file__).parent / "results" / "agreement.json"
FIGURES = ("request_throughput", "output_throughput", "median_ttft_ms", "median_itl_ms", "median_tpot_ms")
JUDGED = ("request_throughput", "output_throughput", "median_ttft_ms", "median_itl_ms")
LIMIT = 0.05
START_TIMEOUT_S = 120.0
RUN_TIMEOUT_S = 120.0


def run(command: list[str], result: Path) -> dict[str, float]:
    """The figures of one run."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=result.parent, env=environment, timeout=RUN_TIMEOUT_S, check=False
    )
    if done.returncode or not result.exists():
        raise SystemExit(
            f"{' '.join(command)} failed with status {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    record: dict[str, Any] = json.loads(result.read_text())
    figures = record.get("results", record)
    if figures["failed"]:
        raise SystemExit(f"{figures['failed']} requests failed in {' '.join(command)}")
    return {name: figures[name] for name in FIGURES}


def sitting(arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """The figures of every round, by client."""
    samples: dict[str, list[dict[str, float]]] = {"headrace": [], "vllm": []}
    model = str(arguments.model)
    ours = [sys.executable, "-m", "headrace"]
    load = ["--model", "m", "--tokenizer", model, "--dataset-name", "random", "--num-warmups", "8", "--ignore-eos"]
    load += ["--random-input-len", str(arguments.input_len), "--random-output-len", str(arguments.output_len)]
    load += ["--num-prompts", str(arguments.num_prompts), "--max-concurrency", str(arguments.max_concurrency)]
    serve = [*ours, "serve", model, "--served-model-name", "m", "--port", "0", "--no-enable-prefix-caching"]
    with tempfile.TemporaryDirectory() as name, running(serve) as server:
        line = server.wait_line("ready: http", START_TIMEOUT_S)
        url = next(word for word in line.split() if word.startswith("http")).removesuffix("/v1")
        for number_of_round in range(arguments.rounds):
            result = Path(name) / f"{number_of_round}.json"
            common = [*load, "--base-url", url, "--seed", str(number_of_round)]
            commands = {
                "headrace": [*ours, "bench", "serve", *common, "--no-machine-probe", "--output-json", str(result)],
                "vllm": [
                    *(str(arguments.peers / "vllm/bin/vllm"), "bench", "serve", "--backend", "openai", *common),
                    *("--save-result", "--result-dir", name, "--result-filename", result.name),
                ],
            }
            for client in ("headrace", "vllm") if number_of_round % 2 else ("vllm", "headrace"):
                samples[client].append(run(commands[client], result))
                result.unlink()
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="a folder with tokenizer.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--max-concurrency", type=int, default=8)
    arguments = parser.parse_args()
    arguments.peers, arguments.model = arguments.peers.resolve(), arguments.model.resolve()
    samples = sitting(arguments)
    medians = {
        client: {f: statistics.median(run[f] for run in runs) for f in FIGURES} for client, runs in samples.items()
    }
    ratios = {name: medians["headrace"][name] / medians["vllm"][name] for name in FIGURES}
    rows = [["median of rounds", "headrace bench serve", "vllm bench serve", "ratio"]]
    for name in FIGURES:
        rows.append([name, number(medians["headrace"][name]), number(medians["vllm"][name]), f"{ratios[name]:.3f}"])
    print(columns(rows, indent=0))
    shape = {name: value for name, value in vars(arguments).items() if name not in ("peers", "model")}
    write_report(RESULTS, "agreement", {"asked": shape, "ratios": ratios, "medians": medians, "samples": samples})
    return int(any(abs(ratios[name] - 1) > LIMIT for name in JUDGED))


if __name__ == "__main__":
    sys.exit(main())
