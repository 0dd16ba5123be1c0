"""Streams through engines and HTTP processes that are constantly killed and suspended: no stream may end or change.

    python benchmarks/chaos.py [--minutes 10] [--streams 64] [--demo] [--seed 0] [--out FILE]

Four engine-cores of a tiny model (with --demo of the demo model), two HTTP processes that find them through a
coordinator, and that coordinator; a supervisor restarts each when it ends. Streams of the official openai client
alternate between requests whose answers were recorded undisturbed: seeded completions with logprobs, n = 2, and JSON
schemas. Every few seconds an engine, an HTTP process or the coordinator gets SIGKILL, or SIGSTOP and some seconds later
SIGCONT. At least one engine and one HTTP process are always spared. Supervisors have their own event loop, as the
streams' loop is busy reading.

Target: no stream lost except those of a killed HTTP process, none changed. Otherwise the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import openai

from headrace.frontend.bench.results.metrics import percentile
from headrace.frontend.bench.results.record import surroundings
from headrace.frontend.client.background import BackgroundLoop

ROOT = Path(__file__).parent.parent
NUM_ENGINES, NUM_SERVERS = 4, 2
STRUCK = (0.65, 0.2, 0.15)
"""Shares of the signals that go to engines, HTTP processes and the coordinator."""
NUM_TOKENS = 120
NAME = "chaos"
STARTS_WITHIN_S = 120.0
STREAM_TAKES_S = 180.0
"""A stream that takes longer has stalled, however often its engine was lost."""
BETWEEN_S = (1.0, 4.0)
STOPPED_S = (1.0, 8.0)
LOGPROB_ERROR = 1e-3
"""Sums in batches of other sizes round differently."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "ages": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
Answer = tuple[str, tuple[str, ...], tuple[float, ...]]
"""Text, tokens and their logprobs."""


class Process:
    """A program that is restarted whenever it ends."""

    def __init__(self, name: str, command: list[str], is_ready: Callable[[], Awaitable[bool]], log: Path) -> None:
        self.name, self._command, self._is_ready, self._log = name, command, is_ready, log
        self.lives = 0
        self.is_up = False
        """Whether the current process has answered, and is neither ended nor suspended."""
        self._process: asyncio.subprocess.Process | None = None

    async def keep(self) -> None:
        while True:
            with self._log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
                )
            self.lives += 1
            ended = asyncio.ensure_future(self._process.wait())
            try:
                end_s = time.monotonic() + STARTS_WITHIN_S
                while not ended.done() and not await self._is_ready():
                    assert time.monotonic() < end_s, f"{self.name} did not start: {self._log.read_text()[-2000:]}"
                    await asyncio.sleep(0.05)
                self.is_up = not ended.done()
                await ended
            finally:
                ended.cancel()
                self.is_up = False
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None, "it is up"
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)


class Chaos:
    def __init__(self, folder: Path, model: list[str], numbers: random.Random) -> None:
        self._numbers = numbers
        self.struck: Counter[str] = Counter()
        self.ports = [_free_port() for _ in range(NUM_SERVERS)]
        addresses = [f"ipc://{folder}/engine-{number}.sock" for number in range(NUM_ENGINES)]
        meeting = f"ipc://{folder}/coordinator.sock"
        headrace = [sys.executable, "-m", "headrace"]
        self.coordinators = [
            Process(
                "coordinator",
                [*headrace, "coordinator", "--address", meeting],
                _coordinates(meeting),
                folder / "coordinator.log",
            )
        ]
        engine = [sys.executable, "-m", "headrace.core.process.daemon", *model]
        engine += [
            "--served-model-name",
            NAME,
            "--max-num-seqs",
            "64",
            "--max-model-len",
            "512",
            "--num-gpu-blocks-override",
            "2048",
            "--coordinator",
            meeting,
            "--data-parallel-size",
            str(NUM_ENGINES),
        ]
        self.engines = [
            Process(
                f"engine {n}",
                [*engine, "--address", address, "--data-parallel-rank", str(n)],
                _listens(address),
                folder / f"engine-{n}.log",
            )
            for n, address in enumerate(addresses)
        ]
        server = [*headrace, "serve", "--coordinator", meeting]
        self.servers = [
            Process(f"server {n}", [*server, "--port", str(port)], _healthy(port), folder / f"server-{n}.log")
            for n, port in enumerate(self.ports)
        ]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        for group in (self.coordinators, self.engines, self.servers):
            self._tasks += [asyncio.create_task(each.keep()) for each in group]
            await self.all_up(group)

    async def all_up(self, group: list[Process]) -> None:
        end_s = time.monotonic() + STARTS_WITHIN_S
        while not all(each.is_up for each in group):
            for task in self._tasks:
                if task.done():
                    task.result()
            assert time.monotonic() < end_s, [each.name for each in group if not each.is_up]
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def strike(self, until_s: float) -> None:
        """Sends signals until then (monotonic seconds)."""
        stopped: set[asyncio.Task[None]] = set()
        while time.monotonic() < until_s:
            await asyncio.sleep(self._numbers.uniform(*BETWEEN_S))
            for task in self._tasks:
                if task.done():
                    task.result()
            (group,) = self._numbers.choices((self.engines, self.servers, self.coordinators), STRUCK)
            up = [each for each in group if each.is_up]
            if group is self.engines:
                up = [each for each in up if await self._has_others(each)]
            elif group is self.servers and len(up) < 2:
                continue
            if not up:
                continue
            victim, kind = self._numbers.choice(up), group[0].name.split()[0]
            number = self._numbers.choice((signal.SIGKILL, signal.SIGSTOP))
            self.struck[f"{kind} {number.name}"] += 1
            victim.send(number)
            victim.is_up = False
            if number == signal.SIGSTOP:
                stopped.add(asyncio.create_task(self._go_on(victim, victim.lives)))
        await asyncio.gather(*stopped)

    async def _has_others(self, engine: Process) -> bool:
        """Whether every server that is up is connected to another engine that is up."""
        for port, server in zip(self.ports, self.servers, strict=True):
            if not server.is_up:
                continue
            try:
                async with httpx.AsyncClient(timeout=5.0, verify=False) as client:
                    page = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
            except httpx.HTTPError:
                return False
            connected = {int(n) for n in re.findall(r'^headrace:engine_up\{engine="(\d+)"\} 1', page, re.MULTILINE)}
            if not any(self.engines[n].is_up for n in connected if self.engines[n] is not engine):
                return False
        return True

    async def _go_on(self, victim: Process, life: int) -> None:
        await asyncio.sleep(self._numbers.uniform(*STOPPED_S))
        victim.send(signal.SIGCONT)
        victim.is_up = victim.lives == life


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _listens(address: str) -> Callable[[], Awaitable[bool]]:
    from headrace.frontend.client.client import CoreClient
    from headrace.frontend.client.transport import ZmqTransport
    from headrace.ipc.failure import HeadraceError

    async def ask() -> bool:
        client = CoreClient(ZmqTransport(address))
        try:
            await client.start(1.0)
        except (HeadraceError, TimeoutError):
            return False
        finally:
            await client.close()
        return True

    return ask


def _coordinates(address: str) -> Callable[[], Awaitable[bool]]:
    from headrace.frontend.cli.commands.top import FoundEngines
    from headrace.frontend.fleet.discovery import Discovery

    async def ask() -> bool:
        discovery, end_s = Discovery([address]), time.monotonic() + 1.0
        discovery.start(FoundEngines())
        try:
            while not discovery.directory.heard_all(time.monotonic()):
                if time.monotonic() > end_s:
                    return False
                await asyncio.sleep(0.02)
        finally:
            await discovery.close()
        return True

    return ask


def _healthy(port: int) -> Callable[[], Awaitable[bool]]:
    async def ask() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient(timeout=2.0, verify=False) as client:
                return (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200
        return False

    return ask


async def completion(client: openai.AsyncOpenAI, seed: int, beat: Callable[[], None]) -> list[Answer]:
    """One streamed completion with logprobs; two outputs for odd seeds."""
    stream = await client.completions.create(
        model=NAME, prompt=f"The {seed}. story of the river:", seed=seed, max_tokens=NUM_TOKENS, logprobs=1,
        stream=True, n=1 + seed % 2, temperature=1.0, extra_body={"ignore_eos": True},
    )  # fmt: skip
    found: dict[int, tuple[list[str], list[str], list[float]]] = {}
    async for chunk in stream:
        beat()
        for choice in chunk.choices:
            text, tokens, logprobs = found.setdefault(choice.index, ([], [], []))
            text.append(choice.text)
            if choice.logprobs is not None:
                tokens += choice.logprobs.tokens or []
                logprobs += [each or 0.0 for each in choice.logprobs.token_logprobs or []]
    return [("".join(found[index][0]), tuple(found[index][1]), tuple(found[index][2])) for index in sorted(found)]


async def document(client: openai.AsyncOpenAI, seed: int, beat: Callable[[], None]) -> list[Answer]:
    """One streamed answer that follows a JSON schema."""
    stream = await client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": f"Invent person {seed}."}], seed=seed, max_tokens=NUM_TOKENS,
        stream=True, temperature=1.0, logprobs=True,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}},
    )  # fmt: skip
    text, tokens, logprobs = "", list[str](), list[float]()
    async for chunk in stream:
        beat()
        for choice in chunk.choices:
            text += choice.delta.content or ""
            for each in (choice.logprobs.content or []) if choice.logprobs is not None else []:
                tokens.append(each.token)
                logprobs.append(each.logprob)
    return [(text, tuple(tokens), tuple(logprobs))]


ASK = (completion, completion, document)


def differences(answers: list[Answer], expected: list[Answer]) -> tuple[bool, float]:
    """Whether texts or tokens differ, or logprobs by more than rounding; and the largest difference of logprobs."""
    if [each[:2] for each in answers] != [each[:2] for each in expected]:
        return True, 0.0
    pairs = [pair for a, b in zip(answers, expected, strict=True) for pair in zip(a[2], b[2], strict=False)]
    error = max((abs(a - b) for a, b in pairs), default=0.0)
    return error > LOGPROB_ERROR or [len(each[2]) for each in answers] != [len(each[2]) for each in expected], error


class Streams:
    """The outcomes of all streams."""

    def __init__(self, chaos: Chaos, clients: list[openai.AsyncOpenAI], expected: dict[int, list[Answer]]) -> None:
        self._chaos, self._clients, self._expected = chaos, clients, expected
        self.counts: Counter[str] = Counter()
        self.bad: list[dict[str, Any]] = []
        self.gaps_s: list[float] = []
        self.largest_error = 0.0

    async def run(self, first: int, until_s: float) -> None:
        """Runs one request after another until then (monotonic seconds)."""
        number = first
        while time.monotonic() < until_s:
            up = [n for n, each in enumerate(self._chaos.servers) if each.is_up]
            if not up:
                await asyncio.sleep(0.05)
                continue
            await self._one(number % len(self._expected), up[number % len(up)])
            number += 1

    async def _one(self, seed: int, at: int) -> None:
        server = self._chaos.servers[at]
        life, last_s, gap_s = server.lives, time.monotonic(), 0.0

        def beat() -> None:
            nonlocal last_s, gap_s
            now_s = time.monotonic()
            last_s, gap_s = now_s, max(gap_s, now_s - last_s)

        try:
            async with asyncio.timeout(STREAM_TAKES_S):
                answers = await ASK[seed % len(ASK)](self._clients[at], seed, beat)
        except (openai.OpenAIError, httpx.HTTPError, TimeoutError) as error:
            await asyncio.sleep(0.2)  # its supervisor notices a death slightly later than its clients
            if server.lives != life or not server.is_up:
                self.counts["ended with their HTTP process"] += 1
            else:
                self._note("lost", seed, f"{type(error).__name__}: {error}")
            return
        is_changed, error_size = differences(answers, self._expected[seed])
        self.largest_error = max(self.largest_error, error_size)
        self.gaps_s.append(gap_s)
        if is_changed:
            self._note("changed", seed, json.dumps({"got": answers, "expected": self._expected[seed]}))
        else:
            self.counts["whole and unchanged"] += 1

    def _note(self, what: str, seed: int, why: str) -> None:
        self.counts[what] += 1
        self.bad.append({"what": what, "seed": seed, "why": why})
        print(f"{what}: request {seed}: {why[:600]}", file=sys.stderr, flush=True)


async def measure(arguments: argparse.Namespace, folder: Path, model: list[str]) -> dict[str, Any]:
    chaos = Chaos(folder, model, random.Random(arguments.seed))
    clients = [
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=STREAM_TAKES_S
        )
        for port in chaos.ports
    ]
    supervisors = BackgroundLoop("supervisors")
    try:
        await asyncio.to_thread(supervisors.run, chaos.start())
        kinds = range(min(arguments.streams, 24))
        expected = {seed: await ASK[seed % len(ASK)](clients[0], seed, lambda: None) for seed in kinds}
        streams = Streams(chaos, clients, expected)
        until_s = time.monotonic() + 60.0 * arguments.minutes
        strikes = asyncio.create_task(asyncio.to_thread(supervisors.run, chaos.strike(until_s)))
        await asyncio.gather(*(streams.run(number, until_s) for number in range(arguments.streams)))
        await strikes
        await asyncio.to_thread(supervisors.run, chaos.all_up([*chaos.coordinators, *chaos.engines, *chaos.servers]))
        for seed in kinds:  # at the end all processes must be up and give the same answers
            await streams._one(seed, seed % NUM_SERVERS)
    finally:
        await asyncio.gather(*(client.close() for client in clients))
        supervisors.run(chaos.stop())
        supervisors.stop()
    return {
        "minutes": arguments.minutes,
        "streams": arguments.streams,
        "counts": dict(streams.counts),
        "struck": dict(chaos.struck),
        "longest_gap_p50_s": percentile(sorted(streams.gaps_s), 50),
        "longest_gap_p99_s": percentile(sorted(streams.gaps_s), 99),
        "largest_logprob_error": streams.largest_error,
        "bad": streams.bad,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--demo", action="store_true", help="the demo model instead of a tiny one")
    parser.add_argument("--seed", type=int, default=0, help="of who is struck when")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder, model = Path(name), list[str]()
        if not arguments.demo:
            sys.path.insert(0, str(ROOT / "tests" / "support"))
            import tiny_models

            model = [str(tiny_models.save("llama", folder / "tiny", tokenizer=True)), "--dtype", "float32"]
        result = asyncio.run(measure(arguments, folder, model))
    print(json.dumps({name: value for name, value in result.items() if name != "bad"}, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps({**surroundings(probe=False), "results": result}, indent=1) + "\n")
    sys.exit(any(result["counts"].get(bad) for bad in ("lost", "changed")))


if __name__ == "__main__":
    main()
