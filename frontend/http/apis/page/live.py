"""The state of all engines in one answer, from which the page's live view draws. Counters and histograms are told as
they are: rates and percentiles of any span follow from two answers."""

from __future__ import annotations

from typing import Literal

import msgspec

import headrace
from headrace.frontend.client.engine_metrics import kv_use
from headrace.frontend.client.request_metrics import REQUEST_HISTOGRAMS
from headrace.frontend.fleet.engine import SILENT_AFTER_S, Engine
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.http.server.engines import failure_of
from headrace.frontend.http.server.errors import without_own_names
from headrace.frontend.http.server.metrics import Pages
from headrace.ipc.messages import EngineStats

LATENCIES = ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")
Condition = Literal["ready", "starting", "silent", "paused", "asleep", "lost"]


class LiveEngine(msgspec.Struct, kw_only=True):
    """One engine. What its core tells is null while it does not answer."""

    index: int
    state: Condition
    problem: str
    """Why it is not ready; empty if there is nothing to tell."""
    models: tuple[str, ...]
    adapters: tuple[str, ...]
    """Their LoRA adapters, which a request may name in place of a model."""
    generates: bool | None
    """Whether they write text; those for embeddings, scores and classes do not."""
    max_model_len: int | None
    sampling_defaults: dict[str, float | int | list[int]]
    """Sampling fields that the model's generation config sets."""
    startup_s: dict[str, float]
    """Seconds of each phase of its start, in order."""
    num_running: int | None
    num_waiting: int | None
    kv_cache_usage: float | None
    """The share of the KV cache that requests use, 0 to 1."""
    prompt_tokens: int | None
    """Since its start, as are generated_tokens and num_preemptions."""
    cached_tokens: int | None
    """Prompt tokens that the prefix cache had."""
    generated_tokens: int | None
    num_preemptions: int | None
    latencies: dict[str, list[int]]
    """By the names of `bounds`: how many requests of this server were in each bucket, not cumulative; the last one has
    what is above all bounds."""


class LiveState(msgspec.Struct, kw_only=True):
    version: str
    server: str
    """Which of the servers at this address answered, as behind a balancer: counts of another one are not comparable."""
    bounds: dict[str, tuple[float, ...]]
    """By metric, the upper bounds of the buckets in seconds."""
    engines: list[LiveEngine]


async def live_state(pool: EnginePool, pages: Pages) -> LiveState:
    stats = await pool.stats()
    return LiveState(
        version=headrace.__version__,
        server=pages.server,
        bounds={name: REQUEST_HISTOGRAMS[name][0] for name in LATENCIES},
        engines=[_engine(engine, stats.get(engine), pool, pages) for engine in list(pool.engines)],
    )


def _engine(engine: Engine, stats: EngineStats | None, pool: EnginePool, pages: Pages) -> LiveEngine:
    state, problem = _condition(engine, stats, has_begun=pool.started.is_set())
    welcome = engine.client.welcome if engine.client is not None else None
    return LiveEngine(
        index=engine.index,
        state=state,
        problem=problem,
        models=engine.names,
        adapters=tuple(name for name in pool.adapters if pool.adapters.base_of(name) in engine.names),
        generates=None if welcome is None else welcome.generates,
        max_model_len=None if welcome is None else welcome.max_model_len,
        sampling_defaults={} if welcome is None else welcome.generation_defaults,
        startup_s={} if welcome is None else welcome.startup_s,
        num_running=None if stats is None else stats.num_running,
        num_waiting=None if stats is None else stats.num_waiting,
        kv_cache_usage=None if stats is None else kv_use(stats),
        prompt_tokens=None if stats is None else stats.num_prompt_tokens,
        cached_tokens=None if stats is None else stats.num_cached_prompt_tokens,
        generated_tokens=None if stats is None else stats.num_generated_tokens,
        num_preemptions=None if stats is None else stats.num_preemptions,
        latencies={name: [int(count) for count in pages.of_requests(engine.index, name)[:-1]] for name in LATENCIES},
    )


def _condition(engine: Engine, stats: EngineStats | None, *, has_begun: bool) -> tuple[Condition, str]:
    """An engine's state, and in whole sentences why it is not ready."""
    failure = failure_of(engine)
    why = "" if failure is None else f"{without_own_names(failure.message).rstrip('. ')}."
    if engine.client is None and (failure is None or not has_begun):
        return "starting", why
    if not engine.usable:
        return "lost", f"{why} It is being started again.".lstrip() if engine.is_awaited else why
    if engine.is_silent or stats is None:
        return "silent", f"It has said nothing for more than {SILENT_AFTER_S:g} s; it may be stopped."
    if stats.sleep_level:
        return "asleep", "Its memory is released: POST /wake_up allocates it again."
    if stats.paused:
        return "paused", "It was paused: POST /resume ends that."
    return "ready", ""
