"""A server whose engines are scaled up and down at random and killed meanwhile: no stream may end or change.

    python benchmarks/scaling_chaos.py [--minutes 10] [-asc 2] [--restart-engine N] [--seed 0] [--out FILE]

`headrace serve -dp 2` with engines of a null model whose steps take a while, and streams whose answers were recorded
undisturbed. One task asks for 1 to 4 engines again and again, sometimes twice at once, sometimes while the model's
folder is away so that engines cannot start; another sends engines SIGKILL: those that serve, start or leave, and, where
engines are restarted, also all at once. Now and then it lets a scaling be; then there must be as many engines as the
server says there are, whether the scaling succeeded or not: processes, sockets, and in the server's metrics.

At least one engine that stays is spared where none is restarted, as the server ends with its last one. Failures that
`docs/serving.md` promises are counted apart: requests that are refused while no engine serves, and those that lost
more engines without a token between than max_migrations allows.

Target: no stream lost or changed, each scaling answered in time, no wrong number, and nothing left at the end.
Otherwise the exit status is 1.
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
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
from chaos import NAME, Answer, completion, differences

from headrace.frontend.bench.results.metrics import percentile
from headrace.frontend.bench.results.record import surroundings
from headrace.frontend.client.client import CoreClient
from headrace.frontend.client.transport import ZmqTransport
from headrace.ipc.failure import HeadraceError
from headrace.ipc.messages import GetStats

SUPPORT = Path(__file__).parent.parent / "tests" / "support"
sys.path.append(str(SUPPORT))
from patience import within  # noqa: E402

RUNTIME, MODEL_FOLDER = "HEADRACE_RUNTIME_DIR", "HEADRACE_TEST_MODEL_FOLDER"
DAEMON, ENGINE_SOCKETS = "headrace.core.process.daemon", "engine-*.sock"
MOST_ENGINES = 4
STEP_S = 0.025
ANSWERS_WITHIN_S = 30.0
"""On a busy machine; a dead engine refuses at once."""
STARTS_WITHIN_S, STREAM_TAKES_S, SCALING_TAKES_S, ENDS_WITHIN_S = 120.0, 240.0, 240.0, 60.0
"""On a quiet machine: an engine starts for minutes where forty processes want each core."""
BETWEEN_KILLS_S, BETWEEN_SCALINGS_S, DRAINS_S = (0.5, 4.0), (0.0, 3.0), (0.2, 4.0)
LET_BE, TWICE, FOLDER_AWAY, ALL_AT_ONCE = 0.35, 0.15, 0.1, 0.05
"""Shares of scalings without a kill meanwhile, of two at once, of those whose engines cannot start; of kills of all."""
MOST_WHILE_NONE_SERVES = 3
"""Kills in a row while no engine serves: on a busy machine an engine starts for half a minute, and a server gives up
one that has died ten times in a row (RESTARTS), which is its last one then."""
AWAY_S = 3.0
"""How long the model's folder is away, at most."""
SETTLED_S = 3.0
"""A kill this long before a scaling makes no difference to it."""
BY_RULE = ("max_migrations is", "died while running this request")


class Service:
    """The server as a program, and its engines as processes."""

    def __init__(self, folder: Path, arguments: argparse.Namespace) -> None:
        self.runtime, self.model = folder / "run", folder / "model"
        self.runtime.mkdir(mode=0o700)
        self.model.mkdir()
        self._log = folder / "server.log"
        overrides = json.dumps({"vocab_size": 400, "step_delay_s": STEP_S, "max_model_len": 2048})
        self._command = [sys.executable, "-m", "headrace", "serve", "null", "--served-model-name", NAME, "--port", "0"]
        self._command += ["--distributed-executor-backend", "null_with_tokenizer:MissableExecutor"]
        self._command += [
            "--hf-overrides",
            overrides,
            "-dp",
            "2",
            "--api-server-count",
            str(arguments.api_server_count),
        ]
        if arguments.restart_engine is not None:
            self._command += ["--restart-engine", str(arguments.restart_engine)]
        self.restarts = arguments.restart_engine != 0
        self.url = ""
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        added = {RUNTIME: str(self.runtime), MODEL_FOLDER: str(self.model), "PYTHONPATH": str(SUPPORT)}
        with self._log.open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                *self._command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1", **added}
            )
        end_s = time.monotonic() + within(STARTS_WITHIN_S)
        while (found := re.search(r"ready: (\S+)/v1 for clients", self.log)) is None:
            assert self.process.returncode is None, self.log
            assert time.monotonic() < end_s, f"it did not start: {self.log}"
            await asyncio.sleep(0.05)
        self.url = found.group(1)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def has_ended(self) -> bool:
        return self.process is None or self.process.returncode is not None

    def engines(self) -> list[int]:
        """Process ids of the engines that run, those that start or leave too."""
        return [pid for pid, words in self._processes().items() if DAEMON in words]

    def _processes(self) -> dict[int, list[str]]:
        """All processes of this server and their command lines, also of those whose parent has died."""
        found = {}
        mark = f"{RUNTIME}={self.runtime}".encode()
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                of_this = mark in Path(f"/proc/{each.pid}/environ").read_bytes().split(b"\0")
                if of_this and each.status() != psutil.STATUS_ZOMBIE:
                    found[each.pid] = each.cmdline()
        return found

    async def serving(self) -> dict[int, bool]:
        """Process ids of the engines that answer, and whether they stay: they do not refuse new requests."""
        answers = await asyncio.gather(*(_ask(f"ipc://{each}") for each in self.runtime.glob(ENGINE_SOCKETS)))
        return dict(answer for answer in answers if answer is not None)

    def sockets(self) -> list[str]:
        """Names of the engines' sockets."""
        return sorted(each.name for each in self.runtime.glob(ENGINE_SOCKETS))

    def kill(self, pids: list[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def stop(self) -> list[str]:
        """Ends the server. Returns what is wrong with its end, and what it leaves."""
        assert self.process is not None
        wrong = []
        if self.has_ended:
            wrong.append(f"the server ended by itself, with {self.process.returncode}")
        else:
            self.process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(within(ENDS_WITHIN_S)):
                    status = await self.process.wait()
                wrong += [f"its exit status is {status}"] if status else []
            except TimeoutError:
                wrong.append(f"it did not end within {ENDS_WITHIN_S:g} s")
                self.process.kill()
                await self.process.wait()
        end_s = time.monotonic() + 10.0
        while (left := self._processes()) and time.monotonic() < end_s:
            await asyncio.sleep(0.05)
        wrong += [f"process {pid} is left: {' '.join(words)}" for pid, words in left.items()]
        wrong += [f"{each.relative_to(self.runtime)} is left" for each in self.runtime.rglob("*")]
        self.kill(list(left))
        return wrong


async def _ask(address: str) -> tuple[int, bool] | None:
    client = CoreClient(ZmqTransport(address))
    try:
        await client.start(ANSWERS_WITHIN_S, with_tokenizer=False)
        with contextlib.suppress(HeadraceError, TimeoutError):
            await client.call(GetStats, ANSWERS_WITHIN_S)  # the core has told by then that it is leaving
        return client.welcome.pid, not client.draining
    except (HeadraceError, TimeoutError):
        return None
    finally:
        client.leave()


class Chaos:
    def __init__(self, service: Service, numbers: random.Random, until_s: float) -> None:
        self._service, self._numbers, self._until_s = service, numbers, until_s
        self._may_kill = asyncio.Event()
        self._may_kill.set()
        self._wanted: list[int] = []
        """Sizes of the scalings under way."""
        self._killed_s = 0.0
        self._while_none_serves = 0
        """Times in a row that there was nobody who serves."""
        self.counts: Counter[str] = Counter()
        self.took_s: list[float] = []
        self.bad: list[dict[str, Any]] = []

    @property
    def _goes_on(self) -> bool:
        return time.monotonic() < self._until_s and not self._service.has_ended

    def note(self, what: str, **more: Any) -> None:
        self.counts[what] += 1
        self.bad.append({"what": what, **more})
        print(f"{what}: {json.dumps(more)[:900]}", file=sys.stderr, flush=True)

    # --- kills ----------------------------------------------------------------------------------------------------

    async def kill_engines(self) -> None:
        while self._goes_on:
            await asyncio.sleep(self._numbers.uniform(*BETWEEN_KILLS_S))
            await self._may_kill.wait()
            serving = await self._service.serving()
            if self._may_kill.is_set():
                self._strike(serving)

    def _strike(self, serving: dict[int, bool]) -> None:
        engines = self._service.engines()
        staying = [pid for pid in engines if serving.get(pid)]
        self._while_none_serves = 0 if staying else self._while_none_serves + 1
        if self._while_none_serves > MOST_WHILE_NONE_SERVES:
            return
        if self._service.restarts and self._numbers.random() < ALL_AT_ONCE:
            kind, victims = "all engines at once", engines
        else:
            leaving = [pid for pid in engines if serving.get(pid) is False]
            starting = [pid for pid in engines if pid not in serving]
            # Before a scaling down has chosen who leaves, any of them may be the one that stays.
            is_open = len(staying) > min(self._wanted, default=MOST_ENGINES)
            groups = {
                "an engine that serves": staying if len(staying) > 1 and not is_open else [],
                "an engine that leaves": leaving,
                "an engine that starts": starting,
            }
            groups = {name: group for name, group in groups.items() if group}
            if not groups:
                return
            kind = self._numbers.choice(sorted(groups))
            victims = [self._numbers.choice(sorted(groups[kind]))]
        self._service.kill(victims)
        self._killed_s = time.monotonic()
        self.counts[f"killed: {kind}"] += 1

    # --- scalings -------------------------------------------------------------------------------------------------

    async def scale_engines(self) -> None:
        async with httpx.AsyncClient(
            base_url=self._service.url, timeout=within(SCALING_TAKES_S), verify=False
        ) as client:
            while self._goes_on:
                await asyncio.sleep(self._numbers.uniform(*BETWEEN_SCALINGS_S))
                await self._one_round(client)
            self._may_kill.set()

    async def _one_round(self, client: httpx.AsyncClient) -> None:
        sizes = [self._numbers.randint(1, MOST_ENGINES)]
        if self._numbers.random() < TWICE:
            sizes.append(self._numbers.randint(1, MOST_ENGINES))
        is_away, is_let_be = self._numbers.random() < FOLDER_AWAY, self._numbers.random() < LET_BE
        if is_let_be:
            self._may_kill.clear()
        if is_away:
            self._service.model.rmdir()
            asyncio.get_running_loop().call_later(AWAY_S, lambda: self._service.model.mkdir(exist_ok=True))
        try:
            began_s = time.monotonic()
            told = await asyncio.gather(*(self._scale(client, size) for size in sizes))
            if len(sizes) == 1:
                await self._compare(client, sizes[0], told[0], began_s - SETTLED_S, is_away=is_away)
        finally:
            self._service.model.mkdir(exist_ok=True)
            self._may_kill.set()

    async def _scale(self, client: httpx.AsyncClient, size: int) -> int | None:
        """Returns the number of engines that the server says there is; None if it says none."""
        body = {"new_data_parallel_size": size, "drain_timeout": self._numbers.uniform(*DRAINS_S)}
        began_s = time.monotonic()
        self._wanted.append(size)
        try:
            answer = await client.post("/scale_elastic_ep", json=body)
        except httpx.HTTPError as error:
            self.note("a scaling without an answer", size=size, why=f"{type(error).__name__}: {error}")
            return None
        finally:
            self._wanted.remove(size)
            self.took_s.append(time.monotonic() - began_s)
        self.counts[f"scalings answered {answer.status_code}"] += 1
        found = re.search(r"Scaled to (\d+) |there (?:are|is) (\d+)", answer.text)
        if found is None or answer.status_code not in (200, 503):
            self.note("a scaling without a number", size=size, answer=answer.text[:600])
            return None
        return int(found.group(1) or found.group(2))

    async def _compare(
        self, client: httpx.AsyncClient, size: int, told: int | None, since_s: float, *, is_away: bool
    ) -> None:
        """If nothing was killed since then, the number told must be right everywhere."""
        if told is None or self._service.has_ended:
            return
        serving = sorted(pid for pid, stays in (await self._service.serving()).items() if stays)
        running = sorted(self._service.engines())
        end_s = time.monotonic() + 5.0
        sockets, shown = [""], -1.0
        # Each HTTP process hears of an engine, and the parent of its end, a moment after it.
        while time.monotonic() < end_s and (len(sockets) != told or shown != told):
            sockets = self._service.sockets()
            page = (await client.get("/metrics")).text
            shown = sum(map(float, re.findall(r"^headrace:engine_up\{.*\} (\S+)", page, re.MULTILINE)))
            await asyncio.sleep(0.05)
        if self._killed_s > since_s:
            return
        self.counts["numbers compared"] += 1
        is_right = len(serving) == told == len(sockets) == shown and (running == serving or told != size)
        if not is_right or (told != size and not is_away and not self._service.restarts):
            found = {"serving": serving, "running": running, "sockets": sockets, "shown": shown}
            self.note("a wrong number", size=size, told=told, is_away=is_away, **found, log=self._service.log[-3000:])


class Streams:
    """Streams until the end, and what became of each."""

    def __init__(self, chaos: Chaos, service: Service, client: openai.AsyncOpenAI) -> None:
        self._chaos, self._service, self._client = chaos, service, client
        self.expected: list[list[Answer]] = []
        self.counts: Counter[str] = Counter()
        self.gaps_s: list[float] = []

    async def record(self, num: int) -> None:
        undisturbed = (completion(self._client, seed, lambda: None) for seed in range(num))
        self.expected = await asyncio.gather(*undisturbed)

    async def run(self, first: int, until_s: float) -> None:
        number = first
        while time.monotonic() < until_s and not self._service.has_ended:
            await self.one(number % len(self.expected))
            number += 1

    async def one(self, seed: int) -> None:
        began_s = last_s = time.monotonic()
        gap_s = 0.0

        def beat() -> None:
            nonlocal last_s, gap_s
            gap_s, last_s = max(gap_s, time.monotonic() - last_s), time.monotonic()

        try:
            async with asyncio.timeout(within(STREAM_TAKES_S)):
                answers = await completion(self._client, seed, beat)
        except (openai.OpenAIError, httpx.HTTPError, TimeoutError) as error:
            await self._failed(seed, error, began_s, has_begun=last_s != began_s)
            return
        self.gaps_s.append(gap_s)
        if differences(answers, self.expected[seed])[0]:
            self._chaos.note("a changed stream", seed=seed, got=answers, expected=self.expected[seed])
        else:
            self.counts["whole and unchanged"] += 1

    async def _failed(self, seed: int, error: Exception, began_s: float, *, has_begun: bool) -> None:
        if any(rule in str(error) for rule in BY_RULE):
            self.counts["ended by max_migrations or as the cause of deaths"] += 1
            print(f"by rule: {error}", file=sys.stderr, flush=True)
        elif isinstance(error, openai.InternalServerError) and error.status_code == 503 and not has_begun:
            if self._service.restarts:
                self.counts["refused while no engine served"] += 1
            else:
                self._chaos.note("a refused request", seed=seed, why=str(error))
            await asyncio.sleep(0.2)
        else:
            age_s = time.monotonic() - began_s
            self._chaos.note("a lost stream", seed=seed, why=f"{type(error).__name__}: {error}", age_s=age_s)


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    service = Service(folder, arguments)
    await service.start()
    client = openai.AsyncOpenAI(
        base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=within(STREAM_TAKES_S)
    )
    until_s = time.monotonic() + 60.0 * arguments.minutes
    chaos = Chaos(service, random.Random(arguments.seed), until_s)
    streams = Streams(chaos, service, client)
    assert service.process is not None
    try:
        await streams.record(min(arguments.streams, 12))
        parent = psutil.Process(service.process.pid)
        before = {"threads": parent.num_threads(), "descriptors": parent.num_fds()}
        await asyncio.gather(
            chaos.kill_engines(),
            chaos.scale_engines(),
            *(streams.run(number, until_s) for number in range(arguments.streams)),
        )
        after = {"threads": 0, "descriptors": 0}
        if not service.has_ended:
            async with httpx.AsyncClient(base_url=service.url, verify=False) as scaler:
                await chaos._scale(scaler, 2) if arguments.minutes else None
            after = {"threads": parent.num_threads(), "descriptors": parent.num_fds()}
            await asyncio.gather(*(streams.one(seed) for seed in range(len(streams.expected))))
    finally:
        await client.close()
        for wrong in await service.stop():
            chaos.note("at the end", why=wrong, log=service.log[-3000:])
        if arguments.log:
            arguments.log.write_text(service.log)
    gaps_s, took_s = sorted(streams.gaps_s), sorted(chaos.took_s)
    return {
        "minutes": arguments.minutes,
        "streams": arguments.streams,
        "api_server_count": arguments.api_server_count,
        "restart_engine": arguments.restart_engine,
        "seed": arguments.seed,
        "of_streams": dict(streams.counts),
        "of_engines": dict(sorted(chaos.counts.items())),
        "longest_gap_p50_s": percentile(gaps_s, 50),
        "longest_gap_p99_s": percentile(gaps_s, 99),
        "scaling_p50_s": percentile(took_s, 50),
        "scaling_longest_s": took_s[-1],
        "server_before": before,
        "server_after": after,
        "bad": chaos.bad,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--api-server-count", "-asc", type=int, default=1, help="HTTP processes of the server")
    parser.add_argument("--restart-engine", type=int, help="how often engines are restarted; default: the server's")
    parser.add_argument("--seed", type=int, default=0, help="of the sizes and of who is killed when")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--log", type=Path, help="keep the server's log here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scaling-") as name:
        result = asyncio.run(measure(arguments, Path(name)))
    print(json.dumps({name: value for name, value in result.items() if name != "bad"}, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps({**surroundings(probe=False), "results": result}, indent=1) + "\n")
    sys.exit(bool(result["bad"]))


if __name__ == "__main__":
    main()
