"""How long a stream stands still when its engine is killed or stopped, and whether its tokens stay the same.

    python benchmarks/failover.py [--rounds 10] [--streams 8] [--signal KILL|STOP] [--out FILE]

Two engines of the demo model serve one AsyncLLM. In each round all streams run undisturbed once, then again while one
engine gets the signal; a stream's gap is from its last token before the signal to its first one after, of those that
the engine had. What the other engine takes to compute prompt and tokens again is told apart: the time to a first token
of a prompt of that length, with the same streams running. To reach at p99, without it: 100 ms killed, 3 s stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import psutil

from headrace import AsyncLLM, RequestOutputKind, SamplingParams
from headrace.frontend.bench.results.metrics import percentile
from headrace.frontend.bench.results.record import surroundings

PROMPT = "The history of the city begins with a river, a bridge and a market."
NUM_TOKENS = 160
SIGNAL_AFTER_TOKENS = 60
REJOINED_WITHIN_S = 60.0


class Stream:
    """One answer, with the time of each piece."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.token_ids: list[int] = []
        self.times_s: list[float] = []

    async def run(self, llm: AsyncLLM, name: str, prompt: Any = PROMPT, num_tokens: int = NUM_TOKENS) -> Stream:
        params = SamplingParams(
            max_tokens=num_tokens, ignore_eos=True, seed=self.number, output_kind=RequestOutputKind.DELTA
        )
        async for output in llm.generate(prompt, params, f"{name}-{self.number}"):
            self.token_ids += output.outputs[0].token_ids
            self.times_s.append(time.monotonic())
        return self

    def gap_s(self, since_s: float) -> float:
        """From the last piece before this time to the first one after it."""
        before = max(each for each in self.times_s if each <= since_s)
        return min(each for each in self.times_s if each > since_s) - before


def engines() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [each for each in children if "headrace.core.process.daemon" in " ".join(each.cmdline())]


async def one_round(llm: AsyncLLM, index: int, num_streams: int, number: signal.Signals) -> dict[str, Any]:
    """Gaps of the streams that moved, the usual time between two tokens, and how many streams changed."""
    quiet = await asyncio.gather(*(Stream(each).run(llm, f"quiet-{index}") for each in range(num_streams)))
    streams = [Stream(each) for each in range(num_streams)]
    running = [asyncio.ensure_future(each.run(llm, f"loud-{index}")) for each in streams]
    while any(len(each.token_ids) < SIGNAL_AFTER_TOKENS for each in streams):
        await asyncio.sleep(0.001)
    victim = engines()[index % 2]
    sent_s = time.monotonic()
    victim.send_signal(number)
    await asyncio.gather(*running)
    if number == signal.SIGSTOP:
        victim.send_signal(signal.SIGCONT)
    usual_s = statistics.median(b - a for each in quiet for a, b in zip(each.times_s, each.times_s[1:], strict=False))
    gaps_s = sorted(each.gap_s(sent_s) for each in streams)
    moved = gaps_s[-(num_streams // 2) :]  # requests are divided evenly
    again = Stream(1000 + index)  # what the other engine computes again, beside as many streams
    beside = [asyncio.ensure_future(Stream(each).run(llm, f"beside-{index}")) for each in range(num_streams // 2)]
    await asyncio.sleep(0.2)
    began_s = time.monotonic()
    await again.run(llm, f"again-{index}", {"prompt_token_ids": streams[0].token_ids[:SIGNAL_AFTER_TOKENS]}, 1)
    first_token_s = again.times_s[0] - began_s
    await asyncio.gather(*beside)
    await rejoined()
    changed = sum(one.token_ids != other.token_ids for one, other in zip(quiet, streams, strict=True))
    return {"gaps_s": moved, "usual_s": usual_s, "computed_again_s": first_token_s, "changed": changed}


async def rejoined() -> None:
    """Both engines are there again."""
    deadline_s = time.monotonic() + REJOINED_WITHIN_S
    while len(engines()) < 2:
        assert time.monotonic() < deadline_s, "the killed engine was not started again"
        await asyncio.sleep(0.1)
    await asyncio.sleep(4.0)  # it reads its weights, or is heard again


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    number = signal.Signals[f"SIG{arguments.signal}"]
    llm = AsyncLLM(arguments.model, data_parallel_size=2) if arguments.model else AsyncLLM(data_parallel_size=2)
    try:
        await Stream(0).run(llm, "first")
        rounds = [await one_round(llm, index, arguments.streams, number) for index in range(arguments.rounds)]
    finally:
        await llm.close()
    gaps_s = sorted(gap_s for each in rounds for gap_s in each["gaps_s"])
    again_s = statistics.median(each["computed_again_s"] for each in rounds)
    return {
        "signal": number.name,
        "streams": arguments.streams,
        "num_gaps": len(gaps_s),
        "gap_p50_s": percentile(gaps_s, 50),
        "gap_p99_s": percentile(gaps_s, 99),
        "computed_again_s": again_s,
        "gap_p99_without_s": percentile(gaps_s, 99) - again_s,
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
