"""The cost of structured outputs: speed with a JSON schema, first tokens of new schemas, effect on other requests.

    python benchmarks/structured.py [--quick] [--out benchmarks/results/structured.json]

- `streams`: answers that follow a schema of 20 fields, compared with the same prompts without one. All answers are cut
  at the same number of tokens; runs alternate, and `ratio` is that of the median times.
- `first token`: requests one at a time, each with a schema that is new to the engine, compared with the same without.
- `arrivals`: the time between tokens of one long stream while requests for one token each arrive, every one with a new
  schema, compared with the same arrivals without schemas.
- `steps`: how many steps an answer of known form takes for its tokens.

Nothing else may run on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from report import write_report
from structured_schema import schema_of

from headrace import LLM, AsyncLLM, RequestOutputKind, SamplingParams, StructuredOutputsParams
from headrace.executor.checkpoints.demo_model import fetch_demo_model

PROMPT = "<|im_start|>user\nDescribe a person as JSON.<|im_end|>\n<|im_start|>assistant\n"
LONG_PROMPT = "<|im_start|>user\nTell a long story.<|im_end|>\n<|im_start|>assistant\n"


def following(schema: dict[str, Any]) -> dict[str, Any]:
    return {"structured_outputs": StructuredOutputsParams(json=schema, disable_any_whitespace=True)}


def compare_streams(llm: LLM, num_streams: int, tokens: int, rounds: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {"without": [], "with": []}
    for turn in range(rounds + 1):
        for kind, extra in (("without", {"ignore_eos": True}), ("with", following(schema_of()))):
            params = [
                SamplingParams(temperature=0.7, seed=seed, max_tokens=tokens, **extra) for seed in range(num_streams)
            ]
            began_s = time.perf_counter()
            outputs = llm.generate([PROMPT] * num_streams, params, use_tqdm=False)
            took_s = time.perf_counter() - began_s
            assert all(len(output.outputs[0].token_ids) == tokens for output in outputs), "answers differ in length"
            if turn:  # the first warms up
                times[kind].append(took_s)
    tokens_per_s = {kind: [num_streams * tokens / each for each in seconds] for kind, seconds in times.items()}
    ratio = statistics.median(times["without"]) / statistics.median(times["with"])
    return {"streams": num_streams, "tokens": tokens, "ratio": ratio, "tokens_per_s": tokens_per_s}


def first_tokens(llm: LLM, count: int) -> dict[str, Any]:
    """Milliseconds from a request to its only token."""
    times_ms: dict[str, list[float]] = {"without": [], "with": []}
    for nth in range(count + 5):
        for kind, extra in (("without", {}), ("with", following(schema_of(1000 + nth)))):
            params = SamplingParams(temperature=0, max_tokens=1, **extra)
            began_s = time.perf_counter()
            llm.generate([PROMPT], params, use_tqdm=False)
            if nth >= 5:
                times_ms[kind].append(1e3 * (time.perf_counter() - began_s))
    more = [mine - other for mine, other in zip(sorted(times_ms["with"]), sorted(times_ms["without"]), strict=True)]
    return {"schemas": count, **summary(times_ms), "p99_more_ms": more[int(0.99 * (count - 1))], "ms": times_ms}


async def arrivals(llm: AsyncLLM, seconds: float, per_s: float) -> dict[str, Any]:
    gaps_ms: dict[str, list[float]] = {}
    kinds: dict[str, Callable[[int], dict[str, Any]]] = {
        "without": lambda nth: {},
        "with": lambda nth: following(schema_of(100_000 + nth)),
    }
    for kind, extra_of in kinds.items():
        params = SamplingParams(temperature=0, max_tokens=100_000, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        arriving = asyncio.create_task(arrive(llm, seconds, per_s, extra_of))
        gaps_ms[kind] = await gaps_of(llm.generate(LONG_PROMPT, params, f"long {kind}"), arriving)
        await llm.abort(f"long {kind}")
        await arriving
    ratio = percentile(gaps_ms["with"], 0.99) / percentile(gaps_ms["without"], 0.99)
    return {"per_s": per_s, "seconds": seconds, "p99_ratio": ratio, **summary(gaps_ms), "ms": gaps_ms}


async def arrive(llm: AsyncLLM, seconds: float, per_s: float, extra_of: Callable[[int], dict[str, Any]]) -> None:
    async def one(nth: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=1, **extra_of(nth))
        async for _ in llm.generate(PROMPT, params, f"new {nth} {id(extra_of)}"):
            pass

    began_s, tasks = time.perf_counter(), []
    for nth in range(int(seconds * per_s)):
        await asyncio.sleep(max(0.0, began_s + nth / per_s - time.perf_counter()))
        tasks.append(asyncio.create_task(one(nth)))
    await asyncio.gather(*tasks)


async def gaps_of(outputs: AsyncIterator[Any], until: asyncio.Task[None]) -> list[float]:
    """Milliseconds between tokens, while the task runs."""
    gaps_ms, last_s = [], 0.0
    async for _ in outputs:
        now_s = time.perf_counter()
        if last_s:
            gaps_ms.append(1e3 * (now_s - last_s))
        last_s = now_s
        if until.done():
            break
    return gaps_ms


def steps_of(llm: LLM) -> dict[str, Any]:
    forms = {
        "choice": StructuredOutputsParams(choice=["a rather long answer that is known", "the other, not shorter"]),
        "schema": StructuredOutputsParams(json=schema_of(fields=5), disable_any_whitespace=True),
    }
    found = {}
    for name, form in forms.items():
        before = llm.get_stats()
        params = SamplingParams(temperature=0, max_tokens=400, structured_outputs=form)
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
        after, tokens = llm.get_stats(), len(output.outputs[0].token_ids)
        steps = after.steps - before.steps
        found[name] = {"tokens": tokens, "steps": steps, "forced_share": 1 - steps / tokens}
    return found


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def summary(by_kind: dict[str, list[float]]) -> dict[str, Any]:
    return {
        f"{name}_ms": {kind: percentile(values, share) for kind, values in by_kind.items()}
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }


async def measure_arrivals(engine: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    async with AsyncLLM(**engine) as llm:
        async for _ in llm.generate(PROMPT, SamplingParams(max_tokens=1, **following(schema_of(99_999))), "warm up"):
            pass
        return await arrivals(llm, arguments.seconds, arguments.per_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="within five minutes")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--only-streams", action="store_true", help="none of the other cases; nothing is written")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--rounds", type=int, help="of each case; default: 7, or 3 with --quick")
    parser.add_argument("--schemas", type=int, help="new ones; default: 500, or 150 with --quick")
    parser.add_argument("--seconds", type=float, help="of arrivals; default: 20, or 6 with --quick")
    parser.add_argument("--per-s", type=float, default=100.0, help="arrivals")
    parser.add_argument("--model", help="default: the demo model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--backend", default="auto", help="of structured_outputs_config")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    arguments = parser.parse_args()
    arguments.rounds = arguments.rounds or (3 if arguments.quick else 7)
    arguments.schemas = arguments.schemas or (150 if arguments.quick else 500)
    arguments.seconds = arguments.seconds or (6.0 if arguments.quick else 20.0)
    engine: dict[str, Any] = {
        "model": arguments.model or str(fetch_demo_model()),
        "dtype": arguments.dtype,
        "max_model_len": 2048,
        "structured_outputs_config": {"backend": arguments.backend},
    }
    results: dict[str, Any] = {"engine": {**engine, "model": "demo" if not arguments.model else arguments.model}}
    with LLM(**engine) as llm:
        results["streams"] = [
            compare_streams(llm, streams, arguments.tokens, arguments.rounds) for streams in arguments.streams
        ]
        if arguments.only_streams:
            for case in results["streams"]:
                print(f"{case['streams']} streams: {case['ratio']:.3f}x of the speed without a schema")
            return
        results["first token"] = first_tokens(llm, arguments.schemas)
        results["steps"] = steps_of(llm)
    results["arrivals"] = asyncio.run(measure_arrivals(engine, arguments))
    print(table(results))
    if arguments.out:
        write_report(arguments.out, "structured", results)


def table(results: dict[str, Any]) -> str:
    first, others = results["first token"], results["arrivals"]
    rows = [("case", "without", "with", "")]
    for case in results["streams"]:
        speeds = {kind: statistics.median(values) for kind, values in case["tokens_per_s"].items()}
        name = f"{case['streams']} streams, tok/s"
        rows.append((name, f"{speeds['without']:.0f}", f"{speeds['with']:.0f}", f"{case['ratio']:.3f}x"))
    for name in ("p50", "p99"):
        times = first[f"{name}_ms"]
        more = f"{first['p99_more_ms']:+.1f} ms" if name == "p99" else ""
        rows.append((f"first token {name}, ms", f"{times['without']:.1f}", f"{times['with']:.1f}", more))
        gaps = others[f"{name}_ms"]
        ratio = f"{others['p99_ratio']:.3f}x" if name == "p99" else ""
        rows.append((f"others' step {name}, ms", f"{gaps['without']:.1f}", f"{gaps['with']:.1f}", ratio))
    for name, case in results["steps"].items():
        share = f"{case['forced_share']:.0%} forced"
        rows.append((f"{name}: tokens, steps", str(case["tokens"]), str(case["steps"]), share))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


if __name__ == "__main__":
    main()
