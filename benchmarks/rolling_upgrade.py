"""A fleet of an earlier version is upgraded, program by program, under load: no stream may end before its answer does.

    python benchmarks/rolling_upgrade.py PYTHON_OF_THE_OTHER_VERSION [--streams 16] [--out FILE]

PYTHON_OF_THE_OTHER_VERSION is the interpreter of an environment in which an earlier commit is installed from its source
tree. A coordinator, three engines (a null model) and two servers of that version; streams go to either server, and to
the other one where a server refuses or answers 503 before the answer has begun, as docs/deploy tells a proxy to. Then
one program after the other is asked to end (SIGTERM) and started again as this version, an engine and a server in turn,
so that for most of the time servers and engines are of both versions; and back again.

Versions whose messages differ refuse each other (ipc/messages.py:SCHEMA_HASH): a server then has the engines of its own
version. The coordinator is restarted last: its messages have a hash of their own.

Target: no stream lost, no request that nobody took. Otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from chaos import _free_port as free_port
from chaos import _healthy as healthy

from headrace.frontend.bench.results.metrics import percentile
from headrace.frontend.bench.results.record import surroundings

NUM_ENGINES, NUM_SERVERS = 3, 2
NUM_TOKENS, STEP_S = 100, 0.02
STARTS_WITHIN_S, ENDS_WITHIN_S, TAKEN_WITHIN_S = 120.0, 60.0, 30.0
UNDISTURBED_S = 3.0
"""Of load between two restarts."""


class Program:
    """One program of the fleet, of the version that it was started with last."""

    def __init__(self, name: str, arguments: list[str], folder: Path) -> None:
        self.name, self._arguments, self._log = name, arguments, folder / f"{name}.log"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, python: str) -> None:
        support = Path(python).parents[2] / "tests" / "support"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(support)}
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                python, "-m", *self._arguments, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    async def restart(self, python: str) -> str:
        """Returns what was wrong with its end."""
        assert self._process is not None, "it was started"
        self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(ENDS_WITHIN_S):
                status = await self._process.wait()
        except TimeoutError:
            self.kill()
            status = -1
        await self.start(python)
        return "" if status == 0 else f"{self.name} ended with {status}"

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""


class Fleet:
    def __init__(self, folder: Path) -> None:
        meeting = f"ipc://{folder}/coordinator.sock"
        self.coordinator = Program("coordinator", ["headrace", "coordinator", "--address", meeting], folder)
        overrides = json.dumps({"vocab_size": 400, "step_delay_s": STEP_S, "max_model_len": 2048})
        engine = ["headrace.core.process.daemon", "null", "--served-model-name", "m", "--hf-overrides", overrides]
        engine += ["--distributed-executor-backend", "null_with_tokenizer:TokenizingNullExecutor"]
        engine += ["--coordinator", meeting, "--data-parallel-size", str(NUM_ENGINES)]
        self.addresses = [f"ipc://{folder}/engine-{number}.sock" for number in range(NUM_ENGINES)]
        self.engines = [
            Program(f"engine {n}", [*engine, "--address", address, "--data-parallel-rank", str(n)], folder)
            for n, address in enumerate(self.addresses)
        ]
        self.ports = [free_port() for _ in range(NUM_SERVERS)]
        self.servers = [
            Program(f"server {n}", ["headrace", "serve", "--coordinator", meeting, "--port", str(port)], folder)
            for n, port in enumerate(self.ports)
        ]
        self.all = [self.coordinator, *self.engines, *self.servers]

    async def start(self, python: str) -> None:
        for program in self.all:
            await program.start(python)
        for port in self.ports:
            await self.until(healthy(port), f"the server at port {port}")
            await self.until(lambda port=port: self.num_engines(port, NUM_ENGINES), "its engines")

    async def until(self, is_so: Any, what: str) -> None:
        end_s = time.monotonic() + STARTS_WITHIN_S
        while not await is_so():
            if time.monotonic() > end_s:
                logs = "\n".join(f"--- {each.name}\n{each.log[-1500:]}" for each in self.all)
                raise TimeoutError(f"{what} did not come within {STARTS_WITHIN_S:g} s\n{logs}")
            await asyncio.sleep(0.1)

    async def num_engines(self, port: int, least: int) -> bool:
        """Whether the server at this port has so many engines."""
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient(timeout=5.0, verify=False) as client:
                page = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
            return len(re.findall(r"^headrace:engine_up\{.*\} 1", page, re.MULTILINE)) >= least
        return False


class Load:
    def __init__(self, ports: list[int]) -> None:
        self._urls = [f"http://127.0.0.1:{port}/v1/completions" for port in ports]
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.gaps_s: list[float] = []
        self.is_over = False

    async def run(self, number: int) -> None:
        async with httpx.AsyncClient(timeout=60.0, verify=False) as client:
            while not self.is_over:
                number += 1
                await self._one(client, number)

    async def _one(self, client: httpx.AsyncClient, number: int) -> None:
        body = {"model": "m", "prompt": f"The {number}. story", "seed": number, "max_tokens": NUM_TOKENS}
        body |= {"stream": True, "ignore_eos": True}
        end_s = time.monotonic() + TAKEN_WITHIN_S
        for tried in range(1_000_000):
            text = ""
            try:
                async with client.stream("POST", self._urls[(number + tried) % len(self._urls)], json=body) as answer:
                    if answer.status_code == 200:
                        last_s, gap_s = time.monotonic(), 0.0
                        async for part in answer.aiter_text():
                            gap_s, last_s = max(gap_s, time.monotonic() - last_s), time.monotonic()
                            text += part
                        self.gaps_s.append(gap_s)
                        self._judge(text)
                        return
                    text = (await answer.aread()).decode()
                    if answer.status_code != 503:
                        self._note("refused", f"{answer.status_code} {text}")
                        return
            except httpx.HTTPError as error:
                if text:
                    self._note("lost", f"{error!r} after {text[-300:]}")
                    return
                text = repr(error)
            self.counts["sent to the other server"] += 1
            if time.monotonic() > end_s:
                self._note("taken by nobody", text)
                return
            await asyncio.sleep(0.1 * (tried % len(self._urls)))

    def _judge(self, text: str) -> None:
        if '"finish_reason":"length"' in text and text.endswith("data: [DONE]\n\n"):
            self.counts["whole"] += 1
        else:
            self._note("lost", text[-600:])

    def _note(self, what: str, why: str) -> None:
        self.counts[what] += 1
        self.wrong.append(f"{what}: {why}")
        print(f"{what}: {why}", file=sys.stderr, flush=True)


async def change(fleet: Fleet, load: Load, python: str) -> None:
    """Restarts one program after the other as another version."""
    for n, engine in enumerate(fleet.engines):
        await restart(load, engine, python)
        await fleet.until(lambda n=n: asyncio.to_thread(serves, python, fleet.addresses[n]), engine.name)
        if n < len(fleet.servers):
            await restart(load, fleet.servers[n], python)
            await fleet.until(healthy(fleet.ports[n]), fleet.servers[n].name)
        await asyncio.sleep(UNDISTURBED_S)
    await restart(load, fleet.coordinator, python)
    for port in fleet.ports:
        await fleet.until(lambda port=port: fleet.num_engines(port, NUM_ENGINES), f"all engines at port {port}")
    await asyncio.sleep(UNDISTURBED_S)


def serves(python: str, address: str) -> bool:
    command = [python, "-m", "headrace", "ps", "--engine", address]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


async def restart(load: Load, program: Program, python: str) -> None:
    print(f"{program.name}: as {python}; {dict(load.counts)}", flush=True)
    if wrong := await program.restart(python):
        load._note("a bad end", f"{wrong}: {program.log[-1500:]}")


async def measure(other: str, num_streams: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="upgrade-") as name:
        fleet = Fleet(Path(name))
        load = Load(fleet.ports)
        try:
            await fleet.start(other)
            streams = [asyncio.create_task(load.run(1000 * n)) for n in range(num_streams)]
            await asyncio.sleep(UNDISTURBED_S)
            await change(fleet, load, sys.executable)
            await change(fleet, load, other)
            load.is_over = True
            await asyncio.gather(*streams)
        finally:
            for program in fleet.all:
                program.kill()
    return {
        "streams": num_streams,
        "counts": dict(load.counts),
        "longest_gap_p50_s": percentile(sorted(load.gaps_s), 50),
        "longest_gap_p99_s": percentile(sorted(load.gaps_s), 99),
        "wrong": load.wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", help="the interpreter of the other version's environment")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = asyncio.run(measure(arguments.other, arguments.streams))
    print(json.dumps(results, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps({**surroundings(probe=False), "results": results}, indent=1) + "\n")
    sys.exit(bool(results["wrong"]))


if __name__ == "__main__":
    main()
