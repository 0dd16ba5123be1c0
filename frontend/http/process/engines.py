"""The engines as HTTP handlers see them: which one serves a model, why none does, and their load in the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence

from headrace.frontend.client.stats_log import StatsLog, cache_line
from headrace.frontend.fleet.adapters import FleetAdapters
from headrace.frontend.fleet.engine import SILENT_AFTER_S, Engine
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.http.server.errors import ApiError, UnknownModelError, unavailable, without_own_names
from headrace.ipc.failure import Failure, HeadraceError

logger = logging.getLogger(__name__)
_MISSING_AFTER_S, _MISSING_EVERY_S = 1.0, 30.0


def adapter_named(adapters: FleetAdapters, served: Sequence[str], model: str | None) -> str | None:
    """The adapter that a request's `model` names: alone or, as SGLang's clients do, as BASE:ADAPTER. None: it names
    none."""
    if model is None or model in served:
        return None
    if model in adapters:
        return model
    base, _, name = model.rpartition(":")
    return name if base in served and name in adapters else None


def engine_for(pool: EnginePool, model: str | None) -> Engine:
    """An engine that serves the model, or the base of the adapter that it names, for its tokenizer and limits, which
    all engines of the model share. The router chooses where a request runs. Raises ApiError: 404 for an unknown model,
    503 if no engine is available."""
    known = pool.names
    if not model and known:  # an empty name is none, as in vLLM
        model = known[0]
    name = adapter_named(pool.adapters, known, model)
    if name is None and model not in known and known:
        told = [*known, *pool.adapters]
        raise UnknownModelError(model or "", f"the model {model!r:.200} does not exist; served: {', '.join(told)}")
    engine = pool.serving((model if name is None else pool.adapters.base_of(name)) or "")
    if engine is None:
        raise why_unavailable(pool)
    return engine


def why_unavailable(pool: EnginePool) -> ApiError:
    failure = next(filter(None, map(failure_of, pool.engines)), None)
    if failure is not None and not pool.started.is_set() and not pool.dead.is_set():
        return unavailable(f"waiting for an engine: {without_own_names(failure.message)}", code="loading")
    if failure is not None:
        return unavailable(f"the engine is not running: {without_own_names(failure.message)}", code="engine_dead")
    if any(engine.is_silent for engine in pool.engines):
        return unavailable(
            f"the engine has said nothing for more than {SILENT_AFTER_S:g} s; it may be stopped", code="engine_silent"
        )
    if pool.started.is_set():
        return unavailable("the engine is shutting down and takes no new requests", code="shutting_down")
    if not pool.engines:
        return unavailable("no engine is known yet: waiting for one that a coordinator tells of", code="loading")
    return unavailable("the engine is still loading the model", code="loading")


def failure_of(engine: Engine) -> Failure | None:
    """Why the engine is down, also while the pool has not handled its end yet."""
    return engine.failure or (engine.client.failure if engine.client is not None else None)


async def log_missing(pool: EnginePool, coordinators: Sequence[str]) -> None:
    """Logs every _MISSING_EVERY_S for which engines, that others run, the start waits. Never returns."""
    await asyncio.sleep(_MISSING_AFTER_S)
    while True:
        logger.warning("waiting for an engine: %s", "; ".join(_missing(pool, coordinators)))
        await asyncio.sleep(_MISSING_EVERY_S)


def _missing(pool: EnginePool, coordinators: Sequence[str]) -> Iterator[str]:
    for engine in pool.engines:
        yield engine.failure.message if engine.failure is not None else f"{engine.source.address} has not answered yet"
    for address in coordinators:
        yield f"the coordinator at {address} has told of none that answers"


async def log_load(pool: EnginePool, interval_s: float) -> None:
    """Logs a line about each engine's cache at its start, and one about its load every `interval_s`. Never returns."""
    logs: dict[Engine, StatsLog] = {}
    while True:
        logs = {engine: log for engine, log in logs.items() if engine in pool.engines}
        await asyncio.gather(*(_log_load_of(engine, logs) for engine in pool.engines))
        await asyncio.sleep(interval_s)


async def _log_load_of(engine: Engine, logs: dict[Engine, StatsLog]) -> None:
    if (log := logs.get(engine)) is None:
        if engine.client is None:
            return
        log = logs[engine] = StatsLog(engine.index)
        with contextlib.suppress(HeadraceError):
            logger.info("%s", cache_line(await engine.client.describe_engine(), engine.index))
    if (stats := await engine.stats()) is not None:
        line = log.line(stats, time.monotonic())
        logger.log(logging.DEBUG if log.is_idle else logging.INFO, "%s", line)
