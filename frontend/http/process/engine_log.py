"""Lines in the server's log about its engines: those that are missing, and the load of those that are there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence

from headrace.frontend.client.stats_log import StatsLog, cache_line
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.fleet.pool import EnginePool
from headrace.ipc.failure import HeadraceError

logger = logging.getLogger(__name__)
_MISSING_AFTER_S, _MISSING_EVERY_S = 1.0, 30.0


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
