"""`headrace bench compare`: ratios of two results with confidence intervals, and which differences are noise.

With three or more runs on each side (folders of results), the runs are the samples, and the interval is Welch's t on
the logarithms of their values; so it covers the variation between runs. With fewer runs, the samples within the runs
are resampled (bootstrap; Efron 1979), which does not cover it: the interval is widened by RUN_DEVIATION, as two single
runs of one server on a quiet machine differ by a few percent, and the output says so.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.frontend.bench.results import record as records
from headrace.frontend.bench.results.metrics import columns, number
from headrace.ipc.failure import OptionError

NUM_SLICES = 20


class Measure(NamedTuple):
    """One figure of one result."""

    value: float
    unit: str
    higher_is_better: bool
    samples: Sequence[float]
    """The samples from which `of_samples` computes the value; empty if the result has none."""
    is_mean: bool = False
    """Whether the value is the mean of the samples, instead of their median."""

    def of_samples(self, samples: Sequence[float]) -> float:
        return statistics.fmean(samples) if self.is_mean else statistics.median(samples)


def measures(record: dict[str, Any]) -> dict[str, Measure]:
    """A result's measures by name, the most informative first; empty for an unknown benchmark."""
    readers = {
        "serve": _serve,
        "latency": _latency,
        "throughput": _throughput,
        "startup": _startup,
        "overhead": _overhead,
    }
    reader = readers.get(record["benchmark"])
    return {} if reader is None else reader(record["results"], record.get("samples", {}))


def _serve(figures: dict[str, Any], samples: dict[str, Any]) -> dict[str, Measure]:
    good = [each for each in samples.get("requests", []) if "cause" not in each]
    found = {
        "output tokens/s": Measure(figures["output_throughput"], "tok/s", True, tokens_per_slice(good, figures), True),
        "requests/s": Measure(figures["request_throughput"], "req/s", True, ()),
    }
    if "request_goodput" in figures:
        found["good requests/s"] = Measure(figures["request_goodput"], "req/s", True, ())
    # One sample per request, since the gaps within a request are not independent of each other.
    of_requests = {
        "time to first token": [1e3 * each["ttft_s"] for each in good if "ttft_s" in each],
        "time per output token": [
            1e3 * (each["e2e_s"] - each["ttft_s"]) / (each["num_output_tokens"] - 1)
            for each in good
            if "e2e_s" in each and "ttft_s" in each and each.get("num_output_tokens", 0) > 1
        ],
        "inter-token latency": [1e3 * statistics.median(each["gaps_s"]) for each in good if each.get("gaps_s")],
        "end to end": [1e3 * each["e2e_s"] for each in good if "e2e_s" in each],
    }
    return found | {name: _median(values) for name, values in of_requests.items() if values}


def _latency(figures: dict[str, Any], samples: dict[str, Any]) -> dict[str, Measure]:
    requests = samples.get("requests", [])
    found = {"batch, end to end": _median([1e3 * each for each in samples.get("latencies", [])])}
    found["time to first token"] = _median([1e3 * each["ttft_s"] for each in requests if each.get("ttft_s")])
    return found


def _throughput(figures: dict[str, Any], samples: dict[str, Any]) -> dict[str, Measure]:
    return {
        "total tokens/s": Measure(figures["tokens_per_second"], "tok/s", True, ()),
        "output tokens/s": Measure(figures["output_tokens_per_second"], "tok/s", True, ()),
        "requests/s": Measure(figures["requests_per_second"], "req/s", True, ()),
    }


def _startup(figures: dict[str, Any], samples: dict[str, Any]) -> dict[str, Measure]:
    return {
        f"{kind} start": _median([1e3 * each["total_s"] for each in samples.get(kind, [])])
        for kind in ("cold", "warm")
        if samples.get(kind)
    }


def _overhead(figures: dict[str, Any], samples: dict[str, Any]) -> dict[str, Measure]:
    found = {
        f"core, {name} running": Measure(value, "us/step", False, ())
        for name, value in figures["core_us_per_step"].items()
    }
    for name in ("socket", "ring"):
        found[f"{name} round trip"] = _median(samples.get(f"{name}_us", []), "us")
    found["HTTP server"] = Measure(figures["http_tokens_per_core_s"], "tok/s/core", True, ())
    found["idle stream"] = Measure(figures["http_idle_stream_bytes"], "bytes", False, ())
    return found


def _median(samples: Sequence[float], unit: str = "ms") -> Measure:
    return Measure(statistics.median(samples), unit, False, samples)


def token_times_s(request: dict[str, Any]) -> list[float]:
    """When each piece of an answer arrived, in seconds since the start of the run."""
    if "ttft_s" not in request:
        return []
    # With a schedule, latencies count from when the request was due, unless a bound on concurrency made it wait.
    begin_s = request["sent_s"] if "due_s" not in request or request.get("queued_s") else request["due_s"]
    times = [begin_s + request["ttft_s"]]
    for gap_s in request.get("gaps_s", []):
        times.append(times[-1] + gap_s)
    return times


def tokens_per_slice(requests: Sequence[dict[str, Any]], figures: dict[str, Any]) -> list[float]:
    """Tokens per second in each of NUM_SLICES equal slices of the run. A request's tokens are spread evenly over its
    pieces."""
    duration_s = figures["duration"]
    if not duration_s > 0 or not requests:
        return []
    counts = [0.0] * NUM_SLICES
    for request in requests:
        times = token_times_s(request)
        for time_s in times:
            at = min(NUM_SLICES - 1, int(NUM_SLICES * max(0.0, time_s) / duration_s))
            counts[at] += request.get("num_output_tokens", 0) / len(times)
    return [count * NUM_SLICES / duration_s for count in counts]


LEAST_RUNS = 3
RUN_DEVIATION = 0.05
"""Standard deviation, relative, of a figure from run to run of the same server, where it is not measured."""
INDISTINCT = "not distinguishable"
BUSY_LOAD = 0.5
"""Load average per usable thread, before a run begins, from which the machine counts as busy with something else."""
RESAMPLES = 1000
_WORK = 3_000_000
"""Most samples drawn for one interval, so that large results take seconds."""
_CONFIDENCE = 0.95
# Student's t at 97.5% by degrees of freedom, 1 to 30; the normal distribution's beyond.
_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_T_NORMAL = 1.96


class Comparison(NamedTuple):
    name: str
    unit: str
    base: float
    new: float
    ratio: float
    """new / base"""
    interval: tuple[float, float] | None
    """The 95% confidence interval of the ratio; None if the results have too few samples."""
    verdict: str


def bench_compare(arguments: argparse.Namespace) -> int:
    """Prints a comparison. Each side is a result file, or a folder of results of one configuration. Raises OptionError,
    ResultError."""
    a, b = ([run for _, run in records.read_all([path])] for path in (arguments.base, arguments.new))
    rows, notes = compare(a, b, arguments.seed), differences(a[0], b[0])
    is_by_run = min(len(a), len(b)) >= LEAST_RUNS
    if arguments.json:
        import json

        print(json.dumps({"rows": [row._asdict() for row in rows], "notes": notes, "by_run": is_by_run}, indent=1))
        return 0
    print(comparison_table(rows))
    print(
        f"\n{_CONFIDENCE:.0%} intervals over {len(a)} and {len(b)} runs."
        if is_by_run
        else f"\n{_CONFIDENCE:.0%} intervals over the samples within the runs, and {RUN_DEVIATION:.0%} assumed from "
        f"run to run. To measure that instead, give folders of {LEAST_RUNS} runs or more."
    )
    for note in notes:
        print(f"NOTE: {note}")
    return 0


def compare(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]], seed: int = 0) -> list[Comparison]:
    """A row for each measure that both sides have. Raises OptionError if there is none."""
    if a[0]["benchmark"] != b[0]["benchmark"]:
        raise OptionError(f"a result of {a[0]['benchmark']} and one of {b[0]['benchmark']} have nothing to compare")
    of_a, of_b = [measures(run) for run in a], [measures(run) for run in b]
    names = [name for name in of_a[0] if all(name in each for each in (*of_a, *of_b))]
    if not names:
        raise OptionError("these results have no measure in common: did every request fail?")
    return [_row(name, [each[name] for each in of_a], [each[name] for each in of_b], seed) for name in names]


def _row(name: str, a: list[Measure], b: list[Measure], seed: int) -> Comparison:
    base, new = (statistics.median(each.value for each in side) for side in (a, b))
    ratio = new / base if base else math.nan
    interval: tuple[float, float] | None = None
    if min(len(a), len(b)) >= LEAST_RUNS:
        interval = welch([each.value for each in a], [each.value for each in b])
    elif all(len(side[0].samples) >= LEAST_RUNS for side in (a, b)):
        within = bootstrap(_pooled(a), _pooled(b), random.Random(f"{seed}/{name}"))
        interval = widened(ratio, within, len(a), len(b))
    return Comparison(name, a[0].unit, base, new, ratio, interval, verdict(ratio, interval, a[0].higher_is_better))


def _pooled(side: list[Measure]) -> Measure:
    return side[0]._replace(samples=[sample for each in side for sample in each.samples])


def verdict(ratio: float, interval: tuple[float, float] | None, higher_is_better: bool) -> str:
    """The result in words: not distinguishable if the interval contains 1."""
    if interval is None or not math.isfinite(ratio):
        return "one value each: cannot tell"
    if interval[0] <= 1 <= interval[1]:
        return INDISTINCT
    is_better = (ratio > 1) == higher_is_better
    return f"{abs(ratio - 1):.1%} {'better' if is_better else 'WORSE'}"


def widened(ratio: float, within: tuple[float, float], num_a: int, num_b: int) -> tuple[float, float]:
    """An interval of the samples within few runs, with the assumed variation between runs added, in quadrature on
    logarithms."""
    if not (within[0] > 0 and math.isfinite(within[1]) and ratio > 0):
        return within
    between = _T_NORMAL * RUN_DEVIATION * math.sqrt(1 / num_a + 1 / num_b)
    below, above = (math.hypot(math.log(edge / ratio), between) for edge in within)
    return ratio * math.exp(-below), ratio * math.exp(above)


def bootstrap(a: Measure, b: Measure, numbers: random.Random) -> tuple[float, float]:
    """The interval that holds the middle 95% of the ratios over resamples of both sides."""
    resamples = max(200, min(RESAMPLES, _WORK // (len(a.samples) + len(b.samples))))
    ratios = []
    for _ in range(resamples):
        base = a.of_samples(numbers.choices(a.samples, k=len(a.samples)))
        new = b.of_samples(numbers.choices(b.samples, k=len(b.samples)))
        ratios.append(new / base if base else math.inf)
    ratios.sort()
    edge = int(resamples * (1 - _CONFIDENCE) / 2)
    return ratios[edge], ratios[-1 - edge]


def welch(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """The 95% interval of the ratio of geometric means, b / a, of two sets of runs (Welch 1947, on logarithms)."""
    if min(*a, *b) <= 0:
        return (0.0, math.inf)
    logs = [[math.log(each) for each in side] for side in (a, b)]
    shares = [statistics.variance(side) / len(side) for side in logs]
    middle = statistics.fmean(logs[1]) - statistics.fmean(logs[0])
    total = sum(shares)
    if total == 0:
        return (math.exp(middle), math.exp(middle))
    freedom = total**2 / sum(share**2 / (len(side) - 1) for share, side in zip(shares, logs, strict=True))
    reach = _t(freedom) * math.sqrt(total)
    return math.exp(middle - reach), math.exp(middle + reach)


def _t(freedom: float) -> float:
    at = max(1, math.floor(freedom))
    return _T[at - 1] if at <= len(_T) else _T_NORMAL


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Sentences about other differences between two results: machine, arguments, failed requests."""
    notes = []
    for name, label in (("CPU", "CPU"), ("usable_threads", "number of threads"), ("memory_bytes", "memory")):
        values = [run.get("machine", {}).get(name) for run in (a, b)]
        if values[0] != values[1]:
            notes.append(f"another machine: {label} {values[0]} and {values[1]}")
    ignored = {"output_json", "result_dir", "result_filename", "label", "metadata", "base_url", "host", "port"}
    asked = [{k: v for k, v in run.get("arguments", {}).items() if k not in ignored} for run in (a, b)]
    for name in sorted(asked[0].keys() | asked[1].keys()):
        if asked[0].get(name) != asked[1].get(name):
            notes.append(f"other arguments: {name} {asked[0].get(name, 'default')} and {asked[1].get(name, 'default')}")
    for run, side in ((a, "base"), (b, "new")):
        machine = run.get("machine", {})
        load, threads = machine.get("load_average") or 0.0, machine.get("usable_threads") or 1
        if load / threads >= BUSY_LOAD:
            notes.append(f"a busy machine: load {load:.1f} on {threads} threads when {side} began; figures vary more")
    failed = [run["results"].get("failed", 0) for run in (a, b)]
    if any(failed):
        notes.append(f"requests failed: {failed[0]} and {failed[1]}")
    return notes


def comparison_table(rows: Sequence[Comparison]) -> str:
    table = [["", "unit", "base", "new", "ratio", "95% interval", "verdict"]]
    for row in rows:
        interval = "-" if row.interval is None else f"{row.interval[0]:.3f} - {row.interval[1]:.3f}"
        table.append([row.name, row.unit, number(row.base), number(row.new), f"{row.ratio:.3f}", interval, row.verdict])
    return columns(table, indent=0)
