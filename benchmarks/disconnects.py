"""Thousands of requests whose clients disconnect at random moments: what of them remains in the server?

    python benchmarks/disconnects.py [--requests 10000] [--streams 64]

The engine computes nothing (`tests/support/null_with_tokenizer.py`), so most of the time is spent on connecting and
disconnecting. Half of the clients disconnect: before the answer, within it, or near its end, streaming or not.
Afterwards no request may run or hold blocks, and descriptors and resident memory are compared with those halfway
through. The prefix cache is small, so that it is full by then: a larger one would go on growing by the hashes of its
blocks. At the end the idle server is observed for 10 s: its processes together should use no processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from report import write_report

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "disconnects.json"
MODEL = {"step_delay_s": 0.0005}
IDLE_S = 10.0


async def one_request(session: aiohttp.ClientSession, url: str, numbers: random.Random, counts: dict[str, int]) -> None:
    leaves = numbers.random() < 0.5
    streams = numbers.random() < 0.7
    body: dict[str, Any] = {
        "model": "null",
        "prompt": [numbers.randrange(10, 200) for _ in range(numbers.randrange(4, 200))],
    }
    body |= {"max_tokens": numbers.randrange(2, 64), "ignore_eos": True, "stream": streams, "temperature": 0}
    patience_s = numbers.expovariate(1 / 0.04) if leaves else 60.0
    try:
        async with asyncio.timeout(patience_s), session.post(f"{url}/v1/completions", json=body) as response:
            data = await response.read()
    except TimeoutError:
        counts["left"] += 1
        return
    whole = response.status == 200 and (data.endswith(b"data: [DONE]\n\n") if streams else b'"usage"' in data)
    counts["whole" if whole else "broken"] += 1


def resources(processes: list[psutil.Process]) -> dict[str, dict[str, int]]:
    names = ["http" if "serve" in process.cmdline() else "engine" for process in processes]
    return {
        name: {"rss_bytes": process.memory_info().rss, "descriptors": process.num_fds()}
        for name, process in zip(names, processes, strict=True)
    }


async def what_runs(session: aiohttp.ClientSession, url: str, prefix: str = "headrace:") -> dict[str, float]:
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    wanted = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "requests_in_flight")
    found = {
        name: sum(float(line.split()[-1]) for line in lines if line.startswith(f"{prefix}{name}")) for name in wanted
    }
    found["requests_in_flight"] -= 1  # the request that queries
    return found


async def run(url: str, server_pid: int, requests: int, streams: int) -> dict[str, Any]:
    server = psutil.Process(server_pid)
    processes = [server, *server.children()]
    numbers, counts = random.Random(0), {"whole": 0, "left": 0, "broken": 0}
    left = iter(range(requests))
    samples: list[dict[str, Any]] = []

    async def connection(session: aiohttp.ClientSession) -> None:
        for number in left:
            if number % (requests // 20) == 0:
                samples.append({"requests": number, **resources(processes)})
            await one_request(session, url, numbers, counts)

    began_s = time.monotonic()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(connection(session) for _ in range(streams)))
        seconds = time.monotonic() - began_s
        end_s = time.monotonic() + 10
        while any((running := await what_runs(session, url)).values()) and time.monotonic() < end_s:
            await asyncio.sleep(0.1)
    async with aiohttp.ClientSession() as session:
        running = await what_runs(session, url)
    samples.append({"requests": requests, **resources(processes)})
    half, last = samples[10], samples[-1]
    growth = {
        name: {key: last[name][key] - half[name][key] for key in ("rss_bytes", "descriptors")}
        for name in half
        if name != "requests"
    }
    return {
        "counts": counts,
        "seconds": seconds,
        "left_over": running,
        "growth_of_last_half": growth,
        "samples": samples,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from http_server import processor_share, serving

    with serving("--num-gpu-blocks-override", "2048", null_model=MODEL) as server:
        results = asyncio.run(run(server.url, server.process.pid, arguments.requests, arguments.streams))
        process = psutil.Process(server.process.pid)
        pids = [process.pid, *(each.pid for each in process.children(recursive=True))]
        results["idle"] = {"seconds": IDLE_S, "share_of_a_core": processor_share(pids, IDLE_S)}
    for name in ("counts", "seconds", "left_over", "growth_of_last_half", "idle"):
        print(name, results[name])
    write_report(arguments.out, "disconnects", results)
    if any(results["left_over"].values()) or results["counts"]["broken"]:
        sys.exit("something is left over")


if __name__ == "__main__":
    main()
