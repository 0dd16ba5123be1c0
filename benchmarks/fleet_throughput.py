"""Two engines on this machine's cores compared with one on the same cores; and the router's cost with a single engine.

    python benchmarks/fleet_throughput.py [--rounds 5] [--streams 64] [--tokens 384] [--model MODEL | --null]
                                          [--out FILE]

Without a model a tiny one is made, with two layers of 64 values, so that overhead dominates and a step takes as long
for half as many streams. With --null the engines compute nothing (NullExecutor), which leaves the cost of messages: two
engines send twice as many. Each round serves all streams by one engine and by two, in turn. Figures are medians of the
rounds: tokens per second of wall-clock time, and processor time of frontend and engines per token. Target: two engines
have 0.95 of one engine's rate. The router's cost is its processor time (every call into it, and the pool's ticks) as a
share of the processor time of frontend and engine together, with one engine behind the same pool. Target: 1%.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from headrace import AsyncLLM, RequestOutputKind, SamplingParams
from headrace.core.options.parsing import parse_options
from headrace.frontend.bench.results.record import surroundings
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.fleet.start import owned_ranks, start_ranks
from headrace.frontend.request.checks import check
from headrace.frontend.request.prompts import Prompt

NULL = {
    "model": "null",
    "distributed_executor_backend": "headrace.executor.testing.null:NullExecutor",
    "skip_tokenizer_init": True,
}
ROOT = Path(__file__).parent.parent
PROMPT_TOKENS = 64


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    return dict(NULL) if arguments.null else {"model": arguments.model}


def params(number: int, num_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=num_tokens, ignore_eos=True, seed=number, output_kind=RequestOutputKind.DELTA, detokenize=False
    )


async def tokens_per_s(llm: AsyncLLM, arguments: argparse.Namespace, name: str) -> float:
    async def stream(number: int) -> None:
        prompt = {"prompt_token_ids": [5 + (number + each) % 90 for each in range(PROMPT_TOKENS)]}
        async for _ in llm.generate(prompt, params(number, arguments.tokens), f"{name}-{number}"):
            pass

    began_s = time.perf_counter()
    await asyncio.gather(*(stream(number) for number in range(arguments.streams)))
    return arguments.streams * arguments.tokens / (time.perf_counter() - began_s)


async def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    rates: dict[int, list[float]] = {1: [], 2: []}
    costs: dict[int, list[float]] = {1: [], 2: []}
    for index in range(arguments.rounds):
        for size, measured in rates.items():
            llm = AsyncLLM(**options_of(arguments), data_parallel_size=size)
            try:
                await tokens_per_s(llm, arguments, "first")
                processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
                before_s = processor_s(processes)
                measured.append(await tokens_per_s(llm, arguments, f"round-{index}"))
                costs[size].append(processor_s(processes) - before_s)
            finally:
                await llm.close()
    one, two = (statistics.median(each) for each in rates.values())
    us_of_1, us_of_2 = (1e6 * statistics.median(each) / arguments.streams / arguments.tokens for each in costs.values())
    return {
        "tokens_per_s_of_1": one,
        "tokens_per_s_of_2": two,
        "ratio": two / one,
        "processor_us_per_token_of_1": us_of_1,
        "processor_us_per_token_of_2": us_of_2,
        "rounds": rates,
    }


def processor_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in processes)


class Watch:
    """Measures the processor time of the calls that it wraps."""

    def __init__(self) -> None:
        self.seconds, self._depth = 0.0, 0

    def wrap(self, owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def timed(*values: Any, **keywords: Any) -> Any:
            if self._depth:
                return real(*values, **keywords)
            self._depth, began_s = 1, time.thread_time()
            try:
                return real(*values, **keywords)
            finally:
                self._depth, self.seconds = 0, self.seconds + time.thread_time() - began_s

        setattr(owner, name, timed)


async def router_share(arguments: argparse.Namespace) -> dict[str, Any]:
    parsed = parse_options(**options_of(arguments))
    watch = Watch()
    pool = EnginePool(owned_ranks(parsed, start_ranks(parsed), 1))  # an only one that does not return has no router
    await pool.open()
    try:
        for name in ("place", "end", "tick", "heard", "load", "refused"):
            watch.wrap(pool.router, name)
        watch.wrap(pool, "_tick")
        engine = psutil.Process(pool.engines[0].process.pid)

        async def stream(number: int) -> None:
            prompt = Prompt(token_ids=[5 + (number + each) % 90 for each in range(PROMPT_TOKENS)])
            async for _ in pool.submit(check(f"share-{number}", prompt, params(number, arguments.tokens), pool)):
                pass

        before_s = time.process_time() + sum(engine.cpu_times()[:2])
        await asyncio.gather(*(stream(number) for number in range(arguments.streams)))
        total_s = time.process_time() + sum(engine.cpu_times()[:2]) - before_s
    finally:
        await pool.close(5.0)
    num_tokens = arguments.streams * arguments.tokens
    return {
        "router_us_per_token": 1e6 * watch.seconds / num_tokens,
        "processor_us_per_token": 1e6 * total_s / num_tokens,
        "router_share": watch.seconds / total_s,
    }


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    return {**await router_share(arguments), **await compare(arguments)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--model", help="default: a tiny one")
    parser.add_argument("--null", action="store_true", help="engines that compute nothing")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
        if not arguments.model and not arguments.null:
            sys.path.insert(0, str(ROOT / "tests" / "support"))
            import tiny_models

            arguments.model = str(tiny_models.save("llama", Path(folder) / "tiny", tokenizer=True))
        result = asyncio.run(measure(arguments))
    print(json.dumps({name: value for name, value in result.items() if name != "rounds"}, indent=2))
    if arguments.out:
        arguments.out.write_text(json.dumps({**surroundings(probe=False), "results": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
