"""Metrics of an engine under vLLM's names, for /metrics and `LLM.get_metrics`, and the latter's metric objects."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.frontend.client.request_metrics import (
    FINISH_REASONS,
    REQUEST_HISTOGRAMS,
    SUCCESS,
    RequestCounts,
    cumulative,
)
from headrace.ipc.messages import BLOCK_TIME_BOUNDS, STEP_TOKEN_BOUNDS, Counted, EngineStats, Welcome


def kv_use(stats: EngineStats) -> float:
    """The share of KV blocks in use by requests, 0 to 1."""
    return 1.0 - stats.num_free_blocks / stats.num_blocks if stats.num_blocks else 0.0


def hit_rate(stats: EngineStats) -> float | None:
    """The share of prompt tokens found in the prefix cache since the engine's start; None before the first."""
    return stats.num_cached_prompt_tokens / stats.num_prompt_tokens if stats.num_prompt_tokens else None


def of_part(part: str, name: str) -> Callable[[EngineStats], float | None]:
    """A function that reads a field of a part of the statistics; None without that part."""

    def read(stats: EngineStats) -> float | None:
        found = getattr(stats, part)
        return None if found is None else float(getattr(found, name))

    return read


LORA_INFO = "lora_requests_info"


def lora_labels(stats: EngineStats) -> dict[str, str] | None:
    """The labels of LORA_INFO, a gauge whose value is the time; None without enable_lora."""
    if (adapters := stats.adapters) is None:
        return None
    return {
        "max_lora": str(adapters.max_loras),
        "waiting_lora_adapters": ",".join(adapters.waiting),
        "running_lora_adapters": ",".join(adapters.running),
    }


ENGINE_METRICS: tuple[tuple[str, str, str, Callable[[EngineStats], float | None]], ...] = (
    ("gauge", "num_requests_running", "Requests that are running.", lambda s: s.num_running),
    ("gauge", "num_requests_waiting", "Requests that are waiting.", lambda s: s.num_waiting),
    ("gauge", "kv_cache_usage_perc", "Share of the KV cache in use; 1 is all of it.", kv_use),
    ("gauge", "num_clients", "Frontends that are attached.", lambda s: s.num_clients),
    ("counter", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.num_prompt_tokens),
    ("counter", "prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.num_cached_prompt_tokens),
    (
        "counter",
        "num_preemptions",
        "Preemptions of running requests, which are recomputed later.",
        lambda s: s.num_preemptions,
    ),
    ("counter", "prompt_tokens", "Prompt tokens of all clients.", lambda s: s.num_prompt_tokens),
    (
        "counter",
        "prompt_tokens_cached",
        "Prompt tokens of all clients that were found in the prefix cache.",
        lambda s: s.num_cached_prompt_tokens,
    ),
    ("counter", "generation_tokens", "Tokens generated for all clients.", lambda s: s.num_generated_tokens),
    (
        "counter",
        "spec_decode_num_drafts",
        "Drafts: one for each step and request with draft tokens.",
        lambda s: s.num_drafts,
    ),
    (
        "counter",
        "spec_decode_num_draft_tokens",
        "Draft tokens proposed by speculative decoding.",
        lambda s: s.num_draft_tokens,
    ),
    ("counter", "spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", lambda s: s.num_accepted_tokens),
    ("counter", "engine_steps", "Steps of the engine, each a forward pass of a batch.", lambda s: s.steps),
    ("counter", "engine_forward_seconds", "Seconds in forward passes.", lambda s: s.forward_s),
    (
        "counter",
        "engine_step_gap_seconds",
        "Seconds between consecutive forward passes, in which the model waits for the engine.",
        lambda s: s.step_gap_s,
    ),
    (
        "counter",
        "engine_step_gaps",
        "Forward passes that followed another one without waiting for requests.",
        lambda s: s.num_step_gaps,
    ),
    ("counter", "engine_gc_pauses", "Garbage collections in the engine core.", lambda s: s.times.num_gc_pauses),
    (
        "counter",
        "engine_gc_pause_seconds",
        "Seconds in garbage collections in the engine core.",
        lambda s: s.times.gc_pause_s,
    ),
    ("gauge", "engine_paused", "Whether generation is paused.", lambda s: s.paused),
    (
        "gauge",
        "eplb_balancedness_min",
        "Expert balance (mean load of the ranks divided by the highest), of the worst layer.",
        of_part("expert_balance", "min"),
    ),
    (
        "gauge",
        "eplb_balancedness_p50",
        "Expert balance (mean load of the ranks divided by the highest), of the median layer.",
        of_part("expert_balance", "p50"),
    ),
    (
        "gauge",
        "eplb_balancedness_p90",
        "Expert balance (mean load of the ranks divided by the highest) that 90% of the layers reach.",
        of_part("expert_balance", "p90"),
    ),
    (
        "gauge",
        "eplb_balancedness_avg",
        "Expert balance (mean load of the ranks divided by the highest), mean of all layers.",
        of_part("expert_balance", "avg"),
    ),
    (
        "counter",
        "eplb_rearrangements",
        "Rearrangements of experts among the ranks.",
        of_part("expert_balance", "rearrangements"),
    ),
    (
        "gauge",
        "eplb_rearrangement_seconds",
        "Seconds that the last rearrangement of experts took.",
        of_part("expert_balance", "rearrangement_s"),
    ),
    (
        "counter",
        "estimated_flops_per_gpu",
        "Floating-point operations of one rank, estimated from the model's config.",
        of_part("work", "flops"),
    ),
    (
        "counter",
        "estimated_read_bytes_per_gpu",
        "Bytes of weights and KV cache that one rank reads, estimated.",
        of_part("work", "read_bytes"),
    ),
    (
        "counter",
        "estimated_write_bytes_per_gpu",
        "Bytes that one rank writes to the KV cache, estimated.",
        of_part("work", "write_bytes"),
    ),
    (
        "gauge",
        "adapters_registered",
        "LoRA adapters that are registered, which requests may name.",
        of_part("adapters", "num_registered"),
    ),
    ("gauge", "adapters_loaded", "Versions of LoRA adapters that are in memory.", of_part("adapters", "num_loaded")),
    ("counter", "adapter_loads", "LoRA adapters read from their files.", of_part("adapters", "num_loads")),
    (
        "counter",
        "adapter_load_failures",
        "LoRA adapters that could not be read.",
        of_part("adapters", "num_failed_loads"),
    ),
    (
        "counter",
        "adapter_load_seconds",
        "Seconds spent on loading LoRA adapters, beside the steps.",
        of_part("adapters", "load_s"),
    ),
    (
        "counter",
        "adapter_evictions",
        "LoRA adapters removed from memory to make room for others.",
        of_part("adapters", "num_evictions"),
    ),
)
"""Kind, name, help, and a function that reads the value: None if the engine does not have the metric."""


_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
METRICS_BY_LABEL: tuple[tuple[str, str, str, str, Callable[[EngineStats], Mapping[str, float]]], ...] = (
    (
        "gauge",
        "num_requests_waiting_by_reason",
        "Requests that are waiting, by what for: `capacity` is room in a step.",
        "reason",
        lambda s: s.num_waiting_by_reason,
    ),
    (
        "gauge",
        "engine_sleep_state",
        "Sleep state of the engine: 1 for the state that it is in.",
        "sleep_state",
        lambda s: {state: float(s.sleep_level == level) for level, state in enumerate(_SLEEP_STATES)},
    ),
    (
        "counter",
        "prompt_tokens_by_source",
        "Prompt tokens, by where their keys and values came from.",
        "source",
        lambda s: {
            "local_compute": s.num_prompt_tokens - s.num_cached_prompt_tokens,
            "local_cache_hit": s.num_cached_prompt_tokens,
            "external_kv_transfer": 0,
        },
    ),
)
"""Kind, name, help, name of the additional label, and a function that reads the values by that label's value."""


_NO_STEPS = Counted(counts=(0,) * (len(STEP_TOKEN_BOUNDS) + 1), sum=0.0)


def _of_blocks(name: str) -> Callable[[EngineStats], Counted | None]:
    """A function that reads one field of the times of blocks."""
    return lambda stats: None if stats.block_times is None else getattr(stats.block_times, name)


def _step_tokens(stats: EngineStats) -> Counted:
    times = stats.times
    return Counted(counts=times.step_tokens, sum=float(times.step_tokens_sum)) if times.step_tokens else _NO_STEPS


ENGINE_HISTOGRAMS: tuple[tuple[str, str, tuple[float, ...], Callable[[EngineStats], Counted | None]], ...] = (
    ("iteration_tokens_total", "Tokens per step of the engine.", tuple(map(float, STEP_TOKEN_BOUNDS)), _step_tokens),
    (
        "kv_block_lifetime_seconds",
        "From the allocation of a block to its eviction from the prefix cache.",
        BLOCK_TIME_BOUNDS,
        _of_blocks("lifetime"),
    ),
    (
        "kv_block_idle_before_evict_seconds",
        "From the last use of a cached block to its eviction.",
        BLOCK_TIME_BOUNDS,
        _of_blocks("idle_before_evict"),
    ),
    ("kv_block_reuse_gap_seconds", "Between two uses of a cached block.", BLOCK_TIME_BOUNDS, _of_blocks("reuse_gap")),
)
"""Name, help, upper bounds, and a function that reads the counts: None if the engine does not have the metric."""


@dataclass
class Metric:
    """One metric of one engine."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A sum since the engine's start."""

    value: int | float


@dataclass
class Gauge(Metric):
    """A current value."""

    value: float


@dataclass
class Vector(Metric):
    """One counter per position."""

    values: list[int]


@dataclass
class Histogram(Metric):
    """For each bound, how many observations were at most that large."""

    count: int
    sum: float
    buckets: dict[str, int]


def engine_metrics(
    stats: EngineStats, welcome: Welcome, requests: RequestCounts | None, prefix: str, engine: int = 0
) -> list[Metric]:
    """All metrics of one engine, named `prefix:name`; `requests` are the counts of one client."""
    labels = {"model_name": (welcome.served_model_names or (welcome.model,))[0], "engine": str(engine)}
    found: list[Metric] = []
    for kind, name, _, value in ENGINE_METRICS:
        if (number := value(stats)) is None:
            continue
        if kind == "gauge":
            found.append(Gauge(name=f"{prefix}:{name}", labels=labels, value=float(number)))
        else:
            found.append(Counter(name=f"{prefix}:{name}", labels=labels, value=number))
    for kind, name, _, label, values in METRICS_BY_LABEL:
        metric = Gauge if kind == "gauge" else Counter
        for value_of_label, count in values(stats).items():
            found.append(metric(name=f"{prefix}:{name}", labels={**labels, label: value_of_label}, value=count))
    if (of_loras := lora_labels(stats)) is not None:
        found.append(Gauge(name=f"{prefix}:{LORA_INFO}", labels={**labels, **of_loras}, value=time.time()))
    accepted = list(stats.num_accepted_tokens_per_pos)
    found.append(Vector(name=f"{prefix}:spec_decode_num_accepted_tokens_per_pos", labels=labels, values=accepted))
    for name, _, bounds, counted in ENGINE_HISTOGRAMS:
        if (of_steps := counted(stats)) is not None:
            found.append(_histogram(f"{prefix}:{name}", labels, bounds, of_steps.counts, of_steps.sum))
    if requests is not None:
        for name, (bounds, _) in REQUEST_HISTOGRAMS.items():
            found.append(_histogram(f"{prefix}:{name}", labels, bounds, *requests.histogram(name, engine)))
        for reason in FINISH_REASONS:
            by_reason = {**labels, "finished_reason": reason}
            found.append(
                Counter(name=f"{prefix}:{SUCCESS}", labels=by_reason, value=requests.num_ended(reason, engine))
            )
    return found


def _histogram(
    name: str, labels: dict[str, str], bounds: Sequence[float], counts: Sequence[float], total: float
) -> Histogram:
    buckets = {bound: int(count) for bound, count in cumulative(bounds, counts)}
    return Histogram(name=name, labels=labels, count=buckets["+Inf"], sum=total, buckets=buckets)


def by_name(value: Any) -> Any:
    """Statistics as JSON has them: structs, at any depth, as dicts by their fields' names. The wire has positions."""
    if isinstance(value, msgspec.Struct):
        return {name: by_name(each) for name, each in msgspec.structs.asdict(value).items()}
    if isinstance(value, list | tuple):
        return [by_name(each) for each in value]
    if isinstance(value, dict):
        return {str(key): by_name(each) for key, each in value.items()}
    return value
