"""What a terminal shows of a result: aligned columns, the figures that matter first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

METRIC_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end to end",
    "queue": "wait in the client",
}


def columns(rows: Sequence[Sequence[str]], *, indent: int = 2) -> str:
    """The first column to the left, the others to the right."""
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
    """Three or more significant digits, with thousands parted."""
    if value is None:
        return "-"
    magnitude = abs(value)
    if magnitude >= 1000 or (isinstance(value, int) and not isinstance(value, bool)):
        return f"{value:,.0f}"
    return f"{value:.1f}" if magnitude >= 100 else f"{value:.2f}" if magnitude >= 1 else f"{value:.3f}"


def metric_table(figures: dict[str, Any], names: Iterable[str], unit: str = "ms") -> str:
    """A row for each metric that has samples, a column for each figure that the first of them has."""
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
    """A run against a server."""
    figures = record["results"]
    lines = [
        f"{figures['completed']:,} of {figures['completed'] + figures['failed']:,} requests completed in "
        f"{figures['duration']:.2f} s; at most {figures['max_concurrent_requests']:,} at once"
    ]
    rates = [
        ["requests/s", number(figures["request_throughput"])],
        ["output tokens/s", number(figures["output_throughput"])],
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
