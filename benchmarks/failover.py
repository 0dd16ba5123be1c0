"""How long streams pause when their engine is killed or suspended, by phases, and whether their tokens change.

    python benchmarks/failover.py [--rounds 10] [--streams 8] [--signal KILL|STOP] [--out FILE]

Two engines of the demo model serve one AsyncLLM. In each round all streams run undisturbed once, then again while one
engine gets the signal. The router tells which streams that engine had; the gap of such a stream is from its last token
before the signal to its first token after it:

    last token    signal     moved to the other engine                first token there
        |-----------|------ noticed ----|------------- resumed ------------|      gap = from the first to the last
                                           |-- A --|--- B ---|                    recomputed, of streams A and B

The other engine recomputes prompt and tokens, of one request or several in a step, and other requests wait meanwhile.
It reports for each request the time from its first step to its first token. The recomputation in a stream's gap is the
time during which the engine did that for any of the moved streams. No prefix is cached, or the engine could find what
it once computed. Targets at p99, for the gap without recomputation: 100 ms killed, 3 s suspended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from headrace import AsyncLLM, RequestOutputKind, SamplingParams
from headrace.frontend.bench.results.metrics import percentile
from headrace.frontend.bench.results.record import surroundings
from headrace.frontend.fleet.pool import EnginePool

PROMPT = "The history of the city begins with a river, a bridge and a market."
NUM_TOKENS = 400
SIGNAL_AFTER_TOKENS = 60
REJOINED_WITHIN_S = 60.0


class Stream:
    """One answer, with the time of each piece."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.request_id = ""
        self.token_ids: list[int] = []
        self.times_s: list[float] = []
        self.prefill_s = 0.0
        """Seconds from its first step to its first token, at the engine that finished it."""

    async def run(self, llm: AsyncLLM, name: str) -> Stream:
        self.request_id = f"{name}-{self.number}"
        params = SamplingParams(
            max_tokens=NUM_TOKENS, ignore_eos=True, seed=self.number, output_kind=RequestOutputKind.DELTA
        )
        async for output in llm.generate(PROMPT, params, self.request_id):
            self.token_ids += output.outputs[0].token_ids
            self.times_s.append(time.monotonic())
            if output.metrics is not None:
                self.prefill_s = output.metrics.prefill_s or 0.0
        return self

    def last_before_s(self, at_s: float) -> float:
        return max(each for each in self.times_s if each <= at_s)

    def first_after_s(self, at_s: float) -> float:
        return min(each for each in self.times_s if each > at_s)


def engines() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [each for each in children if "headrace.core.process.daemon" in " ".join(each.cmdline())]


def pool_of(llm: AsyncLLM) -> EnginePool:
    return llm._client


async def all_have(streams: Sequence[Stream], num_tokens: int) -> None:
    while any(len(each.token_ids) < num_tokens for each in streams):
        await asyncio.sleep(0.001)


async def one_round(llm: AsyncLLM, index: int, num_streams: int, number: signal.Signals) -> dict[str, Any]:
    """For each moved stream its gap and the gap's phases; and how many streams changed."""
    quiet = await asyncio.gather(*(Stream(each).run(llm, f"quiet-{index}") for each in range(num_streams)))
    streams = [Stream(each) for each in range(num_streams)]
    running = [asyncio.ensure_future(each.run(llm, f"loud-{index}")) for each in streams]
    await all_have(streams, SIGNAL_AFTER_TOKENS)
    pool = pool_of(llm)
    engine = pool.engines[index % 2]
    routes = [pool.route_of(each.request_id) for each in streams]
    lost = [n for n, route in enumerate(routes) if route.member is not None and route.member.facts.name == engine.name]
    victim = psutil.Process(engine.process.pid)
    sent_s = time.monotonic()
    victim.send_signal(number)
    moved_s: dict[int, float] = {}
    while len(moved_s) < len(lost):
        await asyncio.sleep(0.001)
        moved_s |= {n: time.monotonic() for n in lost if n not in moved_s and routes[n].num_migrations}
    await asyncio.gather(*running)
    usual_s = statistics.median(b - a for each in quiet for a, b in zip(each.times_s, each.times_s[1:], strict=False))
    if number == signal.SIGSTOP:
        victim.send_signal(signal.SIGCONT)
    await rejoined()
    firsts_s = {n: streams[n].first_after_s(moved_s[n]) for n in lost}
    again = [(first_s - streams[n].prefill_s, first_s) for n, first_s in firsts_s.items()]
    gaps = []
    for n, first_s in firsts_s.items():
        last_s = streams[n].last_before_s(sent_s)
        again_s = covered_s(again, moved_s[n], first_s)
        gaps.append(
            {
                "gap_s": first_s - last_s,
                "noticed_s": moved_s[n] - sent_s,
                "resumed_s": first_s - moved_s[n],
                "prefill_s": streams[n].prefill_s,
                "computed_again_s": again_s,
                "without_s": first_s - last_s - again_s,
            }
        )
    changed = sum(one.token_ids != other.token_ids for one, other in zip(quiet, streams, strict=True))
    return {"gaps": gaps, "usual_s": usual_s, "changed": changed}


def covered_s(intervals: Sequence[tuple[float, float]], start_s: float, end_s: float) -> float:
    """How much of the time from start to end any of the intervals covers."""
    total_s = 0.0
    for first_s, last_s in sorted(intervals):
        first_s, last_s = max(first_s, start_s), min(last_s, end_s)
        if last_s > first_s:
            total_s, start_s = total_s + last_s - first_s, last_s
    return total_s


async def rejoined() -> None:
    """Waits until both engines are connected again."""
    deadline_s = time.monotonic() + REJOINED_WITHIN_S
    while len(engines()) < 2:
        assert time.monotonic() < deadline_s, "the killed engine was not started again"
        await asyncio.sleep(0.1)
    await asyncio.sleep(4.0)  # it loads its weights, or resumes


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    number = signal.Signals[f"SIG{arguments.signal}"]
    options: dict[str, Any] = {"data_parallel_size": 2, "enable_prefix_caching": False}
    llm = AsyncLLM(arguments.model, **options) if arguments.model else AsyncLLM(**options)
    try:
        await Stream(0).run(llm, "first")
        rounds = [await one_round(llm, index, arguments.streams, number) for index in range(arguments.rounds)]
    finally:
        await llm.close()
    gaps = [gap for each in rounds for gap in each["gaps"]]
    if not gaps:
        raise SystemExit(f"no stream was at the engine that got SIG{arguments.signal}, in any round: there is no gap")
    result = {"signal": number.name, "streams": arguments.streams, "num_gaps": len(gaps)}
    for name in ("gap_s", "noticed_s", "resumed_s", "prefill_s", "computed_again_s", "without_s"):
        values = sorted(gap[name] for gap in gaps)
        result |= {f"{name.removesuffix('_s')}_p{share}_s": percentile(values, share) for share in (50, 99)}
    return {
        **result,
        "usual_s": statistics.median(each["usual_s"] for each in rounds),
        "changed_streams": sum(each["changed"] for each in rounds),
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments))
    print(json.dumps({name: value for name, value in result.items() if name != "rounds"}, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps({**surroundings(probe=False), "results": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
