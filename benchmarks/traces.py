"""What traces cost a server: processor time per streamed chat with and without them.

    python benchmarks/traces.py [--rounds 20] [--model FOLDER]

The nearly free model of `http_overhead.py` answers 64 streams at a time with 128 tokens each, so that the servers' own
time is what is measured: of a model of use the share is far smaller. Processor time is that of the server's processes,
threads that export included; the collector, which takes what comes by OTLP over HTTP and keeps nothing, is this
process.

Two servers run, one with traces and one without. The first is loaded with requests whose caller samples its trace and
with such whose caller does not, in turn: two processes of one program differ by some percent by their memory layout,
so what a trace costs is told by one process. What is left of a trace that is not wanted is told by both.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from http_overhead import ROOT, free_port, make_model, processor_seconds, program, wait_ready
from report import write_report

STREAMS, REQUESTS, OUTPUT_TOKENS = 64, 256, 128
CHAT = {"messages": [{"role": "user", "content": "How warm is it in Zürich?"}]}
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"
SENT_AFTER_S = 0.5
"""A span waits for that long at most until it is sent, and the last ones are waited for."""
SIDES = {"off": None, "not sampled": CALLER + "00", "sampled": CALLER + "01"}
"""What `traceparent` is sent: to the server without traces, or to the one with them."""


class Collector(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    received_bytes = 0

    def do_POST(self) -> None:
        type(self).received_bytes += len(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""


@contextmanager
def collector() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
        server.shutdown()


def start(name: str, model: Path, work: Path, stack: ExitStack, *more: str) -> str:
    """The address of a server."""
    port, log = free_port(), work / f"{name}.log"
    command = [sys.executable, "-m", "headrace", "serve", str(model), "--max-model-len", "2048", "--port", str(port)]
    delay_ms = str(int(1000 * SENT_AFTER_S))
    environment = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": delay_ms}
    process = stack.enter_context(program([*command, *more], log, environment, work))
    wait_ready(process, url := f"http://127.0.0.1:{port}", log)
    return url


def us_per_request(url: str, model: Path, traceparent: str | None) -> tuple[float, float]:
    """Of all processes, and of that which answers HTTP."""
    headers = {} if traceparent is None else {"traceparent": traceparent}
    numbers = map(str, (STREAMS, REQUESTS, 0, OUTPUT_TOKENS))
    command = [sys.executable, str(ROOT / "benchmarks/http_load.py"), url, str(model), *numbers, json.dumps(CHAT)]
    before = list(processor_seconds(url).values())
    done = subprocess.run([*command, json.dumps(headers)], capture_output=True, text=True, timeout=300, check=False)
    time.sleep(2 * SENT_AFTER_S)
    http_s, *more_s = (after - at for after, at in zip(processor_seconds(url).values(), before, strict=True))
    if done.returncode or json.loads(done.stdout.splitlines()[-1])["done"] != REQUESTS:
        raise SystemExit(f"the load on {url} failed:\n{done.stdout[-1000:]}{done.stderr[-3000:]}")
    return 1e6 * (http_s + sum(more_s)) / REQUESTS, 1e6 * http_s / REQUESTS


def measure(urls: dict[str, str], model: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Microseconds per request of each round, by side: of all processes, and of that which answers HTTP."""
    spent: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for number in range(rounds + 1):
        for side in list(SIDES)[:: 1 if number % 2 else -1]:
            took_us = us_per_request(urls[side], model, SIDES[side])
            if number:  # the first warms up
                spent[side].append(took_us)
        if number:
            print(
                " ".join(
                    f"{side}: {values[-1][0]:.0f} us ({values[-1][1]:.0f} for HTTP)" for side, values in spent.items()
                ),
                flush=True,
            )
    return spent


def more(spent: dict[str, list[tuple[float, float]]], side: str, than: str) -> dict[str, float]:
    """What a side costs beside another over the rounds, of all processes' time."""
    pairs = [(one[0], other[0]) for one, other in zip(spent[side], spent[than], strict=True)]
    more_us = [one - other for one, other in pairs]
    shares = [one / other - 1 for one, other in pairs]
    error = statistics.stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else float("nan")
    return {
        "median_us": statistics.median(more_us),
        "median": statistics.median(shares),
        "mean": statistics.mean(shares),
        "standard_error_of_mean": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--model", type=Path, help="a folder that http_overhead.py --keep-model wrote")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "traces.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-traces-") as folder, ExitStack() as stack:
        work = Path(folder)
        model = (arguments.model or work / "model").resolve()
        if arguments.model is None:
            make_model(model)
        endpoint = stack.enter_context(collector())
        traced = start("traced", model, work, stack, "--otlp-traces-endpoint", endpoint)
        urls = {"off": start("off", model, work, stack), "not sampled": traced, "sampled": traced}
        spent = measure(urls, model, arguments.rounds)
    if not Collector.received_bytes:
        raise SystemExit("the collector got no spans")
    found = {"sampled": more(spent, "sampled", "not sampled"), "not sampled": more(spent, "not sampled", "off")}
    for side, share in found.items():
        print(
            f"{side}: {share['median_us']:+.0f} us and {share['median']:+.2%} in the median, "
            f"{share['mean']:+.2%} in the mean, +- {share['standard_error_of_mean']:.2%}"
        )
    sizes = {"streams": STREAMS, "requests": REQUESTS, "output_tokens": OUTPUT_TOKENS, "cores": os.cpu_count()}
    write_report(arguments.out, "traces", {**sizes, "cpu_us_per_request": spent, "more": found})


if __name__ == "__main__":
    main()
