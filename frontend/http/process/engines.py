"""The engines behind the server, in HTTP's words: which serves a model, why none does, and their load in the log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from headrace.frontend.client.stats_log import StatsLog, cache_line
from headrace.frontend.fleet.pool import SILENT_AFTER_S, Engine, EnginePool
from headrace.frontend.http.errors import ApiError, unavailable
from headrace.ipc.failure import Failure, HeadraceError

logger = logging.getLogger(__name__)


def engine_for(pool: EnginePool, model: str | None) -> Engine:
    """One that serves the model: its tokenizer and limits are those of all that do. The router chooses where a request
    runs. Raises ApiError: 404 for no such model, 503 for no engine."""
    known = pool.names
    if model is None and known:
        model = known[0]
    if model not in known and known:
        raise ApiError(
            404,
            f"the model {model!r:.200} does not exist; there is {', '.join(known)}",
            param="model",
            code="model_not_found",
        )
    engine = pool.serving(model or "")
    if engine is None:
        raise why_unavailable(pool)
    return engine


def why_unavailable(pool: EnginePool) -> ApiError:
    failure = next(filter(None, map(_failure_of, pool.engines)), None)
    if failure is not None:
        return unavailable(f"the engine is not running: {failure.message}", code="engine_dead")
    if any(engine.is_silent for engine in pool.engines):
        return unavailable(
            f"the engine has said nothing for more than {SILENT_AFTER_S:g} s; it may be stopped",
            code="engine_silent",
        )
    if pool.started.is_set():
        return unavailable("the engine is shutting down and takes no new requests", code="shutting_down")
    return unavailable("the engine is still loading the model", code="loading")


def _failure_of(engine: Engine) -> Failure | None:
    """Why it is not there, also in the moment before that has been dealt with."""
    return engine.failure or (engine.client.failure if engine.client is not None else None)


async def log_load(pool: EnginePool, interval_s: float) -> None:
    """A line for each engine at the start about its cache, and one each `interval_s` about its load, for ever."""
    logs: dict[Engine, StatsLog] = {}
    while True:
        logs = {engine: log for engine, log in logs.items() if engine in pool.engines}
        for engine in list(pool.engines):
            if (log := logs.get(engine)) is None:
                if engine.client is None:
                    continue
                log = logs[engine] = StatsLog(engine.index)
                with contextlib.suppress(HeadraceError):
                    logger.info("%s", cache_line(await engine.client.describe_engine(), engine.index))
            if (stats := await engine.stats()) is not None:
                line = log.line(stats, time.monotonic())
                logger.log(logging.DEBUG if log.is_idle else logging.INFO, "%s", line)
        await asyncio.sleep(interval_s)
