"""Times and counts requests under vLLM's names, for `LLM.get_metrics` and a server's /metrics.

The numbers are float64 in a block of memory: a client's own, or one that a server's HTTP processes share.

    block:  | histogram | histogram | ... | counter | counter | ...
    histogram:  | observations per bucket, not cumulative | those above all bounds | sum of the values |
"""

from __future__ import annotations

import collections
import itertools
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from headrace.frontend.client.request_stream import RequestStream

Block: TypeAlias = "memoryview[float] | list[float]"
Histograms = Mapping[str, tuple[tuple[float, ...], str]]
"""By name: ascending upper bounds, and help."""
SHORT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_TOKEN = (0.0005, 0.001, 0.0025, 0.005, *SHORT)
_FIRST = (0.001, 0.005, *SHORT, 160.0, 640.0, 2560.0)
_LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5)

REQUEST_HISTOGRAMS: Histograms = {
    "time_to_first_token_seconds": (_FIRST, "From a request's submission to its first token."),
    "inter_token_latency_seconds": (_TOKEN, "From one token of a request to the next."),
    "request_time_per_output_token_seconds": (_TOKEN, "A request's decode time divided by its tokens after the first."),
    "e2e_request_latency_seconds": (_LONG, "From a request's submission to its last token."),
    "request_queue_time_seconds": (_LONG, "From arrival at the engine to first scheduling."),
    "request_prefill_time_seconds": (_LONG, "From first scheduling to the first token."),
    "request_decode_time_seconds": (_LONG, "From the first token to the last."),
    "request_inference_time_seconds": (_LONG, "From first scheduling to the last token."),
    "request_prompt_tokens": (_COUNTS, "Tokens in a request's prompt."),
    "request_prefill_kv_computed_tokens": (_COUNTS, "Tokens of a request's prompt that the prefix cache did not have."),
    "request_generation_tokens": (_COUNTS, "Tokens generated for a request."),
    "request_max_num_generation_tokens": (_COUNTS, "Tokens of a request's longest output."),
    "request_params_n": ((1.0, 2.0, 5.0, 10.0, 20.0), "Outputs that a request asks for (n)."),
    "request_params_max_tokens": (_COUNTS, "max_tokens of a request."),
    "request_num_preemptions": ((0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0), "How often a request was preempted."),
}
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
SUCCESS = "request_success"
"""Counter of ended requests, labelled with one of FINISH_REASONS."""
REJECTIONS = "admission_rejections"


class Layout:
    """The index of each number in a block, by name."""

    def __init__(self, histograms: Histograms, counters: Sequence[str]) -> None:
        self.at: dict[str, int] = {}
        self.size = 0
        for name, (bounds, _) in histograms.items():
            self.at[name] = self.size
            self.size += len(bounds) + 2
        for name in counters:
            self.at[name] = self.size
            self.size += 1


REQUEST_LAYOUT = Layout(REQUEST_HISTOGRAMS, (*FINISH_REASONS, REJECTIONS))
_OF_NAME = {name: (REQUEST_LAYOUT.at[name], bounds) for name, (bounds, _) in REQUEST_HISTOGRAMS.items()}
"""Where each histogram begins in a block, and its bounds."""
INTER_TOKEN = REQUEST_LAYOUT.at["inter_token_latency_seconds"]
INTER_TOKEN_SUM = INTER_TOKEN + len(_TOKEN) + 1


def observe(block: Block, at: int, bounds: tuple[float, ...], value: float) -> None:
    """Adds a value to the histogram that begins at index `at` of the block."""
    block[at + bisect_left(bounds, value)] += 1.0
    block[at + len(bounds) + 1] += value


def cumulative(bounds: Sequence[float], counts: Sequence[float]) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound, from the counts of each bucket and of values above all bounds."""
    return list(zip((*map(str, bounds), "+Inf"), itertools.accumulate(counts), strict=True))


class Exemplar(NamedTuple):
    """An observation whose request was traced."""

    trace_id: str
    value: float
    at_s: float
    """Seconds since the epoch."""


Exemplars = dict[tuple[str, int], Exemplar]
"""By histogram and the index of a bucket: the last one there."""


class RequestMeter:
    """Times the requests that began at one engine into a block."""

    def __init__(
        self, block: Block, on_gap: Callable[[float], None] | None = None, exemplars: Exemplars | None = None
    ) -> None:
        """on_gap: called with the seconds that a request paused when it moved to another engine. exemplars: where
        the observations of traced requests are noted."""
        self._block, self._on_gap, self.exemplars = block, on_gap, exemplars

    def on_step(self, stream: RequestStream, now_s: float) -> None:
        """Call at each step with outputs of the request, as RequestListener.on_step."""
        last_s, stream.last_step_s = stream.last_step_s, now_s
        if not stream.is_first_token_counted:
            self._count_first_token(stream)
        # If n > 1, the first output represents all.
        num_tokens = len(stream.sequences[0].token_ids)
        if last_s is not None:
            block, interval_s = self._block, now_s - last_s
            count = num_tokens - stream.num_timed_tokens or 1  # several tokens may arrive together
            block[INTER_TOKEN + bisect_left(_TOKEN, interval_s / count)] += count
            block[INTER_TOKEN_SUM] += interval_s
        stream.num_timed_tokens = num_tokens
        if stream.route is not None and stream.route.num_migrations != stream.num_timed_moves:
            stream.num_timed_moves = stream.route.num_migrations
            if last_s is not None and self._on_gap is not None:
                self._on_gap(now_s - last_s)

    def on_done(self, stream: RequestStream) -> None:
        """Call when the request has ended, successfully or not."""
        reason = "error" if stream.error is not None else stream.sequences[0].finish_reason or "error"
        self._block[REQUEST_LAYOUT.at[reason]] += 1.0
        if stream.error is not None:
            return
        metrics, num_prompt = stream.metrics, len(stream.prompt.token_ids or ())
        longest = 0
        for each in stream.sequences:
            longest = max(longest, len(each.token_ids))
        told: dict[str, float | None] = {
            "request_prompt_tokens": num_prompt,
            "request_prefill_kv_computed_tokens": num_prompt - (stream.num_cached_tokens or 0),
            "request_params_n": stream.params.n,
            "request_params_max_tokens": stream.params.max_tokens,
            "request_generation_tokens": metrics.num_generation_tokens,
            "request_max_num_generation_tokens": longest,
        }
        if reason != "abort":
            told["request_num_preemptions"] = metrics.num_preemptions
            told["e2e_request_latency_seconds"] = metrics.total_s
            told["request_queue_time_seconds"] = metrics.queued_s
            told["request_prefill_time_seconds"] = metrics.prefill_s
            told["request_decode_time_seconds"] = metrics.decode_s
            if metrics.prefill_s is not None and metrics.decode_s is not None:
                told["request_inference_time_seconds"] = metrics.prefill_s + metrics.decode_s
                if metrics.num_generation_tokens > stream.params.n:
                    steps = metrics.num_generation_tokens / stream.params.n - 1
                    told["request_time_per_output_token_seconds"] = metrics.decode_s / steps
            if not stream.is_first_token_counted:  # it had all its tokens in one step
                self._count_first_token(stream)
        for name, value in told.items():
            if value is not None:
                self._observe(stream, name, value)

    def _count_first_token(self, stream: RequestStream) -> None:
        """As soon as it is there, and not when the request ends: long answers would hide what new ones wait for."""
        value = stream.metrics.first_token_latency
        if value is not None:
            stream.is_first_token_counted = True
            self._observe(stream, "time_to_first_token_seconds", value)

    def _observe(self, stream: RequestStream, name: str, value: float) -> None:
        at, bounds = _OF_NAME[name]
        bucket = bisect_left(bounds, value)
        self._block[at + bucket] += 1.0
        self._block[at + len(bounds) + 1] += value
        trace_id = "" if stream.trace is None else stream.trace.trace_id
        if trace_id and self.exemplars is not None:
            self.exemplars[name, bucket] = Exemplar(trace_id, value, time.time())


class Meters(Protocol):
    """The meters of a client's requests."""

    def meter(self, engine: int) -> RequestMeter:
        """Of requests that begin at the engine of this rank."""
        ...


class RequestCounts:
    """The metrics of one client's requests, by the engine where they began."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[float]] = collections.defaultdict(lambda: [0.0] * REQUEST_LAYOUT.size)
        self._meters: dict[int, RequestMeter] = {}

    def meter(self, engine: int) -> RequestMeter:
        if engine not in self._meters:
            self._meters[engine] = RequestMeter(self._blocks[engine])
        return self._meters[engine]

    def histogram(self, name: str, engine: int) -> tuple[list[float], float]:
        """The number of observations per bucket, and the sum of the values."""
        first = REQUEST_LAYOUT.at[name]
        *counts, total = self._blocks[engine][first : first + len(REQUEST_HISTOGRAMS[name][0]) + 2]
        return counts, total

    def num_ended(self, reason: str, engine: int) -> int:
        return int(self._blocks[engine][REQUEST_LAYOUT.at[reason]])
