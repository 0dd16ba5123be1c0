"""What a server costs before and while it serves nothing: seconds to the first token by phase, and memory by process.

    python benchmarks/startup.py --gguf FILE.gguf [--repeats 5] [--peers PEERS]

Each start is a new process of `headrace serve`, sent one request for one token as soon as it listens; the caches are
warm. Beside the seconds, which other work lengthens, stands the processor time of all its processes, which
it hardly changes. Memory is the proportional set size, of which each page that processes share counts in parts;
anonymous memory is what is not mapped from a file. llama.cpp's server (llama-cpp-python in PEERS/llamacpp, as
`benchmarks/peers.py` installs it) starts alternately with ours.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from report import write_report

RESULTS = Path(__file__).parent / "results" / "startup.json"
LIMIT_S = 300.0
PHASE = re.compile(r"\[ *([\d.]+) s\] (.+)$", re.MULTILINE)
MIB = 1 << 20


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(command: list[str], port: int) -> dict[str, Any]:
    """One start of a server, until its first token and a moment of rest."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each start compiles all sources anew
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory() as folder:
        began_s = time.monotonic()
        program = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder, start_new_session=True)
        try:
            first_token_s = wait_for_token(program, port) - began_s
            time.sleep(3.0)  # for what is freed once the server is idle
            processes = [psutil.Process(program.pid), *psutil.Process(program.pid).children(recursive=True)]
            found = [state_of(process) for process in processes]
        finally:
            program.send_signal(signal.SIGINT)
            program.wait(60)
        log.seek(0)
        said = log.read().decode(errors="replace")
    phases = {name: float(seconds) for seconds, name in PHASE.findall(said)}
    return {"first_token_s": first_token_s, "phases": phases, "processes": found}


def wait_for_token(program: subprocess.Popen[bytes], port: int) -> float:
    """When the first token of the first request came."""
    body = json.dumps({"prompt": "The sky is", "max_tokens": 1, "temperature": 0}).encode()
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s:
        if program.poll() is not None:
            raise SystemExit(f"the server ended with status {program.returncode}")
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                answer.read()
                return time.monotonic()
        except OSError:
            time.sleep(0.02)
    raise SystemExit("the server was not ready in time")


def state_of(process: psutil.Process) -> dict[str, Any]:
    sizes = dict(re.findall(r"^(\w+): +(\d+) kB$", Path(f"/proc/{process.pid}/smaps_rollup").read_text(), re.MULTILINE))
    return {
        "process": " ".join(process.cmdline()[1:5])[:60] or process.name(),
        "cpu_s": sum(process.cpu_times()[:2]),
        **{f"{name.lower()}_mib": int(sizes[name]) * 1024 / MIB for name in ("Rss", "Pss", "Anonymous")},
    }


def commands(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """By server; {port} stands for the port."""
    found = {"headrace": [sys.executable, "-m", "headrace", "serve", str(arguments.gguf), "--port", "{port}"]}
    python = arguments.peers / "llamacpp" / "bin" / "python" if arguments.peers else None
    if python is not None and python.exists():
        found["llama.cpp"] = [str(python), "-m", "llama_cpp.server", "--model", str(arguments.gguf), "--port", "{port}"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--save", action="store_true", help=f"Write {RESULTS.name}")
    arguments = parser.parse_args()
    samples: dict[str, list[dict[str, Any]]] = {}
    for _ in range(arguments.repeats):
        for name, command in commands(arguments).items():
            port = free_port()
            samples.setdefault(name, []).append(start([each.format(port=port) for each in command], port))
    for name, own in samples.items():
        show(name, own)
    if arguments.save:
        write_report(RESULTS, "startup", {"gguf_bytes": arguments.gguf.stat().st_size, "samples": samples})


def show(name: str, samples: list[dict[str, Any]]) -> None:
    first_token_s = statistics.median(sample["first_token_s"] for sample in samples)
    cpu_s = statistics.median(sum(each["cpu_s"] for each in sample["processes"]) for sample in samples)
    print(f"{name}: first token after {first_token_s:.2f} s, {cpu_s:.2f} s of processor time")
    last = samples[-1]
    for phase in last["phases"]:
        print(f"  {statistics.median(each['phases'].get(phase, 0.0) for each in samples):7.3f} s  {phase}")
    for process in last["processes"]:
        sizes = ", ".join(f"{process[f'{kind}_mib']:.0f} MiB {kind}" for kind in ("pss", "anonymous", "rss"))
        print(f"  {process['process']}: {process['cpu_s']:.2f} s of processor time, {sizes}")
    print(f"  in all: {sum(process['pss_mib'] for process in last['processes']):.0f} MiB")


if __name__ == "__main__":
    main()
