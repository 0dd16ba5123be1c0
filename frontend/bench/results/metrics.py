"""Computes figures from raw samples, under the names of vLLM's result files, and formats them as tables.

Pure Python, since the frontend does not import numpy.
"""

from __future__ import annotations

import collections
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace.frontend.bench.traffic.load import LoadResult, Outcome
from headrace.frontend.bench.traffic.workload import BenchRequest
from headrace.ipc.failure import OptionError

GOODPUT_METRICS = ("ttft", "tpot", "e2el")
METRICS = ("ttft", "tpot", "itl", "e2el")
BUSY_SHARE = 0.85
LATE_MS = 10.0
LEAST_JUDGED_S = 1.0
"""Shorter runs get no warning of a busy generator: most of their time is the start, when it is always busy."""


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile of ascending samples, interpolated linearly between the two nearest ranks like numpy's default."""
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def parse_percentiles(text: str) -> list[float]:
    """From `50,90,99`. Raises OptionError."""
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = [-1.0]
    if not all(0 <= each <= 100 for each in found):
        raise OptionError(f"--metric-percentiles={text}: it must be numbers from 0 to 100, such as 50,90,99")
    return found


def parse_metrics(text: str) -> list[str]:
    """From `ttft,tpot`. Raises OptionError."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [each for each in found if each not in METRICS]
    if unknown:
        raise OptionError(f"--percentile-metrics={text}: {unknown[0]} is unknown; known: {', '.join(METRICS)}")
    return found


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Limits in milliseconds by metric, from `ttft:500 tpot:50`. Raises OptionError."""
    limits = {}
    for pair in pairs:
        name, colon, text = pair.partition(":")
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not colon or name not in GOODPUT_METRICS or not value >= 0:
            raise OptionError(
                f"--goodput {pair}: it must be NAME:MILLISECONDS, with a name of {', '.join(GOODPUT_METRICS)}"
            )
        limits[name] = value
    return limits


def summary(name: str, values_ms: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    """Mean, median, standard deviation, maximum and percentiles of one metric; empty without samples."""
    if not values_ms:
        return {}
    ordered = sorted(values_ms)
    found = {
        f"mean_{name}_ms": statistics.fmean(ordered),
        f"median_{name}_ms": percentile(ordered, 50),
        f"std_{name}_ms": statistics.pstdev(ordered),
        f"max_{name}_ms": ordered[-1],
    }
    return found | {f"p{percent:g}_{name}_ms": percentile(ordered, percent) for percent in percentiles}


def tpot_s(outcome: Outcome) -> float | None:
    """Seconds per output token after the first; None with fewer than two tokens."""
    if outcome.e2e_s is None or outcome.ttft_s is None or outcome.num_output_tokens < 2:
        return None
    return (outcome.e2e_s - outcome.ttft_s) / (outcome.num_output_tokens - 1)


def serving_figures(
    load: LoadResult,
    requests: Sequence[BenchRequest],
    *,
    goodput: Mapping[str, float],
    shown: Mapping[str, list[float]],
) -> dict[str, Any]:
    """All figures of a run against a server. goodput: limits in ms; shown: percentiles; both by metric."""
    good = [outcome for outcome in load.outcomes if not outcome.cause]
    # The server's count of a prompt's tokens if it reports one, since it tokenises the text; else our own.
    num_input = sum(each.num_prompt_tokens or requests[each.index].num_prompt_tokens or 0 for each in good)
    num_output = sum(outcome.num_output_tokens for outcome in good)
    seconds = max(load.duration_s, 1e-9)
    samples = samples_ms(good)
    figures: dict[str, Any] = {
        "duration": load.duration_s,
        "completed": len(good),
        "failed": len(load.outcomes) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / seconds,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        "max_concurrent_requests": load.max_in_flight,
    }
    if goodput:
        figures["request_goodput"] = sum(_is_good(outcome, goodput) for outcome in good) / seconds
    for name in METRICS:
        figures |= summary(name, samples[name], shown.get(name, []))
    queued_ms = [1e3 * outcome.queued_s for outcome in good]
    if any(queued_ms):
        figures |= summary("queue", queued_ms, [99.0])
    return figures | {"errors": errors_by_cause(load.outcomes), "generator": generator_figures(load)}


def samples_ms(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """The samples of each metric in milliseconds, from outcomes of requests that succeeded."""
    return {
        "ttft": [1e3 * o.ttft_s for o in outcomes if o.ttft_s is not None],
        "tpot": [1e3 * each for o in outcomes if (each := tpot_s(o)) is not None],
        "itl": [1e3 * gap for o in outcomes for gap in o.gaps_s],
        "e2el": [1e3 * o.e2e_s for o in outcomes if o.e2e_s is not None],
    }


def errors_by_cause(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """The count of each cause and the detail of its first error, the most frequent first."""
    counts = collections.Counter(outcome.cause for outcome in outcomes if outcome.cause)
    example = {outcome.cause: outcome.detail for outcome in reversed(outcomes)}
    return {cause: {"count": count, "example": example[cause]} for cause, count in counts.most_common()}


def generator_figures(load: LoadResult) -> dict[str, Any]:
    """The generator's processor time and lateness, with a warning if it may have limited the other figures."""
    late_ms = sorted(1e3 * each for each in load.lateness_s)
    share = load.cpu_s / max(load.duration_s, 1e-9)
    figures: dict[str, Any] = {"cpu_share": share}
    if late_ms:
        figures |= {"late_p50_ms": percentile(late_ms, 50), "late_p99_ms": percentile(late_ms, 99)}
        figures["late_max_ms"] = late_ms[-1]
    warning = ""
    if share > BUSY_SHARE and load.duration_s > LEAST_JUDGED_S:
        warning = (
            f"the generator used {share:.0%} of a core and may be what limits these figures: lower the rate, or run "
            "several generators"
        )
    elif late_ms and figures["late_p99_ms"] > LATE_MS:
        warning = (
            f"requests were sent up to {figures['late_p99_ms']:.0f} ms late (p99), though the generator used only "
            f"{share:.0%} of a core: the machine is busy. Latencies count from when requests were due"
        )
    return figures | {"warning": warning}


def _is_good(outcome: Outcome, limits: Mapping[str, float]) -> bool:
    """Whether the request is within every limit. An output of one token always meets the limit of tpot."""
    found_s = {"ttft": outcome.ttft_s, "tpot": tpot_s(outcome) or 0.0, "e2el": outcome.e2e_s}
    return all((value := found_s[name]) is not None and 1e3 * value <= limit for name, limit in limits.items())


METRIC_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end to end",
    "queue": "wait in the client",
}


def columns(rows: Sequence[Sequence[str]], *, indent: int = 2) -> str:
    """A table with the first column aligned left and the others right."""
    widths = [max(len(row[at]) for row in rows if at < len(row)) for at in range(max(map(len, rows)))]
    lines = []
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=False)),
        ]
        lines.append(" " * indent + "  ".join(cells).rstrip())
    return "\n".join(lines)


def number(value: float | None) -> str:
    """A number with three or more significant digits and thousands separators; `-` for None."""
    if value is None:
        return "-"
    magnitude = abs(value)
    if magnitude >= 1000 or (isinstance(value, int) and not isinstance(value, bool)):
        return f"{value:,.0f}"
    return f"{value:.1f}" if magnitude >= 100 else f"{value:.2f}" if magnitude >= 1 else f"{value:.3f}"


def metric_table(figures: dict[str, Any], names: Iterable[str], unit: str = "ms") -> str:
    """A table with a row for each metric that has samples, and columns for mean, percentiles and maximum."""
    names = [name for name in names if f"median_{name}_{unit}" in figures]
    percents = sorted(
        {
            float(key.split("_")[0][1:])
            for key in figures
            for name in names
            if key.endswith(f"_{name}_{unit}") and key[0] == "p" and key != f"p50_{name}_{unit}"
        }
    )
    head = [f"{unit}", "mean", "p50", *(f"p{percent:g}" for percent in percents), "max"]
    keys = ["mean", "median", *(f"p{percent:g}" for percent in percents), "max"]
    rows = [head]
    for name in names:
        values = [figures.get(f"{key}_{name}_{unit}") for key in keys]
        rows.append([METRIC_NAMES.get(name, name), *map(number, values)])
    return columns(rows)


def error_lines(errors: dict[str, dict[str, Any]]) -> list[str]:
    return [
        f"  {cause}: {error['count']}" + (f", such as: {error['example']}" if error["example"] else "")
        for cause, error in errors.items()
    ]


def serving_table(record: dict[str, Any]) -> str:
    """The report of a run against a server."""
    figures = record["results"]
    lines = [
        f"{figures['completed']:,} of {figures['completed'] + figures['failed']:,} requests completed in "
        f"{figures['duration']:.2f} s; at most {figures['max_concurrent_requests']:,} at once"
    ]
    rates = [
        ["requests/s", number(figures["request_throughput"])],
        *([["output tokens/s", number(figures["output_throughput"])]] if figures["total_output_tokens"] else []),
        ["total tokens/s", number(figures["total_token_throughput"])],
    ]
    if "request_goodput" in figures:
        rates.append(["good requests/s", number(figures["request_goodput"])])
    lines.append(columns(rates))
    if figures["completed"]:
        lines += ["", metric_table(figures, METRIC_NAMES)]
    if figures["errors"]:
        lines += ["", f"{figures['failed']:,} failed:", *error_lines(figures["errors"])]
    generator = figures["generator"]
    late = f", sends late by {generator['late_p99_ms']:.1f} ms (p99)" if "late_p99_ms" in generator else ""
    lines += ["", f"generator: {generator['cpu_share']:.0%} of a core{late}"]
    if generator["warning"]:
        lines.append(f"WARNING: {generator['warning']}")
    return "\n".join(lines)
