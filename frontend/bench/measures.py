"""What can be compared between two results of one benchmark: values, which way is better, and their samples."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

NUM_SLICES = 20


class Measure(NamedTuple):
    """One figure of one result."""

    value: float
    unit: str
    higher_is_better: bool
    samples: Sequence[float]
    """From which the value was made, by `of_samples`; empty when the result holds none."""
    is_mean: bool = False
    """The value is the mean of the samples, else their median."""

    def of_samples(self, samples: Sequence[float]) -> float:
        return statistics.fmean(samples) if self.is_mean else statistics.median(samples)


def measures(record: dict[str, Any]) -> dict[str, Measure]:
    """By name, the most telling first; empty for a benchmark that is not known."""
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
    # A request is the unit: gaps within one are not independent of each other.
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
    """When each piece of an answer came, counted from the start of the run."""
    if "ttft_s" not in request:
        return []
    # Where a schedule counts, latencies begin when the request was due, unless it waited for its turn here.
    begin_s = request["sent_s"] if "due_s" not in request or request.get("queued_s") else request["due_s"]
    times = [begin_s + request["ttft_s"]]
    for gap_s in request.get("gaps_s", []):
        times.append(times[-1] + gap_s)
    return times


def tokens_per_slice(requests: Sequence[dict[str, Any]], figures: dict[str, Any]) -> list[float]:
    """Tokens per second in each of NUM_SLICES equal slices of the run. A piece of several tokens counts as so many."""
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
