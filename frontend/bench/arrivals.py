"""When requests are sent: an open loop's schedule is fixed before it begins, whatever the server does."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from headrace.frontend.bench.options import TrafficOptions
from headrace.frontend.bench.workload import BenchRequest
from headrace.ipc.failure import OptionError


def check_traffic(options: TrafficOptions) -> None:
    """Raises OptionError for rates that cannot be, all of them told at once."""
    problems = []
    if not options.request_rate > 0:
        problems.append(f"--request-rate={options.request_rate:g}: it must be over 0, or inf for all at once")
    if not options.burstiness > 0:
        problems.append(f"--burstiness={options.burstiness:g}: it must be over 0; 1 is Poisson")
    ramp = (options.ramp_up_strategy, options.ramp_up_start_rps, options.ramp_up_end_rps)
    if any(each is not None for each in ramp):
        if any(each is None for each in ramp):
            problems.append("a ramp needs all of --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps")
        for name in ("ramp_up_start_rps", "ramp_up_end_rps"):
            value = getattr(options, name)
            if value is not None and not 0 < value < math.inf:
                problems.append(f"--{name.replace('_', '-')}={value:g}: it must be over 0")
        if not math.isinf(options.request_rate):
            problems.append("--request-rate does not go with a ramp, which has rates of its own")
    if options.self_timed and (not math.isinf(options.request_rate) or options.ramp_up_strategy):
        problems.append("--self-timed sends at the file's times: leave out --request-rate and the ramp")
    if problems:
        raise OptionError("; ".join(problems))


def schedule(requests: Sequence[BenchRequest], options: TrafficOptions, seed: int) -> list[float] | None:
    """Seconds after the start at which each request is due, ascending; None when all are sent at once.

    Intervals are gamma-distributed with mean 1 / rate and shape `burstiness`; without a ramp they are stretched so
    that the last request is due at exactly len(requests) / rate, and runs with different seeds offer the same load.
    Raises OptionError.
    """
    if options.self_timed:
        if any(request.at_s is None for request in requests):
            raise OptionError("--self-timed needs a file with times: --dataset-name timed_trace or burstgpt")
        times = [request.at_s or 0.0 for request in requests]
        if not all(math.isfinite(at_s) for at_s in times) or times != sorted(times):
            raise OptionError("--self-timed: the file's times, with --timed-trace-sec-multiplier, must be ascending")
        return times
    if options.ramp_up_strategy is None and math.isinf(options.request_rate):
        return None
    numbers = random.Random(f"arrivals/{seed}")
    due_s, now_s = [], 0.0
    for index in range(len(requests)):
        now_s += _interval_s(numbers, _rate(options, index / max(1, len(requests) - 1)), options.burstiness)
        due_s.append(now_s)
    if options.ramp_up_strategy is None and now_s > 0:
        stretch = len(requests) / options.request_rate / now_s
        due_s = [each * stretch for each in due_s]
    return due_s


def _interval_s(numbers: random.Random, rate: float, burstiness: float) -> float:
    if math.isinf(burstiness):
        return 1.0 / rate
    return numbers.gammavariate(burstiness, 1.0 / (rate * burstiness))


def _rate(options: TrafficOptions, progress: float) -> float:
    """Requests per second when this share of the requests has been sent."""
    start, end = options.ramp_up_start_rps, options.ramp_up_end_rps
    if options.ramp_up_strategy is None or start is None or end is None:
        return options.request_rate
    if options.ramp_up_strategy == "linear":
        return start + (end - start) * progress
    return float(start * (end / start) ** progress)
