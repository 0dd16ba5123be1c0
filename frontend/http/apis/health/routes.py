"""The routes of operators and their programs: health, metrics, load, version, and the API's document."""

from __future__ import annotations

import functools
import time

import msgspec

import headrace
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.server.access import Access
from headrace.frontend.http.server.engines import why_unavailable
from headrace.frontend.http.server.errors import unavailable
from headrace.frontend.http.server.exchange import Exchange
from headrace.frontend.http.server.openapi import docs_page, document
from headrace.frontend.http.server.route_spec import UNAVAILABLE, get, post
from headrace.frontend.http.server.state import ServerState


class VersionResponse(msgspec.Struct):
    version: str


class LoadResponse(msgspec.Struct):
    server_load: int
    """Requests in progress, in all HTTP processes of this server."""


class HealthResponse(msgspec.Struct):
    status: str
    """Always ok: a failed check is answered with an error."""


async def version(state: ServerState, exchange: Exchange) -> None:
    await exchange.answer(VersionResponse(headrace.__version__))


async def load(state: ServerState, exchange: Exchange) -> None:
    # This request itself is not counted: it puts no load on the engine.
    await exchange.answer(LoadResponse(state.pages.total_in_flight() - 1))


async def metrics(state: ServerState, exchange: Exchange) -> None:
    state.publish_counts()
    text, content_type = await state.exposition.text(exchange.header(b"accept") or "")
    await exchange.answer_text(text, content_type)


async def health(state: ServerState, exchange: Exchange) -> None:
    """200 while at least one engine is connected and not silent, once the adapters that the server has are loaded."""
    if not state.pool.answers:
        raise why_unavailable(state.pool)
    state.finder.check_loaded()
    await exchange.answer(HealthResponse("ok"))


async def live(state: ServerState, exchange: Exchange) -> None:
    """200 unless only a restart of the server helps: 503 once every engine is lost and none will come back."""
    if state.pool.dead.is_set():
        raise why_unavailable(state.pool)
    await exchange.answer(HealthResponse("ok"))


async def ready(state: ServerState, exchange: Exchange) -> None:
    """200 while the server accepts new connections."""
    if state.draining:
        raise state.stopping()
    await health(state, exchange)


async def progress(state: ServerState, exchange: Exchange) -> None:
    """200 while tokens arrive or no requests are queued. 503 if an engine with requests gives no token for
    progress_timeout (and is not paused), or an idle one does not answer."""
    limit_s = state.options.progress_timeout
    for engine in state.pool.engines:
        if engine.client is None:
            continue
        if len(engine.client.requests):
            oldest_s = max(engine.client.last_step_s, engine.busy_since_s)
            silent_s = time.monotonic() - oldest_s
            if silent_s > limit_s and not await _is_paused(engine):
                raise unavailable(
                    f"engine {engine.index} has requests and gave no token for {silent_s:.1f} s", code="no_progress"
                )
        elif await engine.stats(min(limit_s, 5.0)) is None and engine.client is not None:
            raise unavailable(f"engine {engine.index} does not answer", code="no_progress")
    if not state.pool.usable:
        raise why_unavailable(state.pool)
    await exchange.answer(HealthResponse("ok"))


async def _is_paused(engine: Engine) -> bool:
    stats = await engine.stats()
    return stats is not None and stats.paused


async def openapi(state: ServerState, exchange: Exchange) -> None:
    await exchange.answer(_document(state))


async def docs(state: ServerState, exchange: Exchange) -> None:
    page = docs_page(_document(state), state.pool.names)
    await exchange.answer_text(page.encode(), "text/html; charset=utf-8")


def _document(state: ServerState) -> bytes:
    return document(state.routes, state.options.root_path, bodies=state.bodies_of_apis, keys=state.access.keys)


_health = functools.partial(get, response=HealthResponse, refusals=UNAVAILABLE, access=Access.PUBLIC)
ROUTES = (
    get("/version", version, "Show the version of Headrace", VersionResponse, access=Access.STATISTICS),
    get("/load", load, "Count the requests in progress", LoadResponse, access=Access.CLIENT),
    get(
        "/metrics",
        metrics,
        "Metrics in Prometheus's text format, or as OpenMetrics with exemplars",
        access=Access.STATISTICS,
    ),
    _health("/health", health, "200 while at least one engine is connected and responds"),
    _health("/health/live", live, "Liveness: 503 once only a restart of the server helps"),
    _health("/health/ready", ready, "Readiness: 503 while the server takes no new requests"),
    _health("/health/progress", progress, "503 while an engine has requests and generates no tokens"),
    _health("/ping", health, "The same as /health"),
    post("/ping", health, "The same as /health", None, HealthResponse, UNAVAILABLE, access=Access.PUBLIC),
    get("/openapi.json", openapi, "The OpenAPI document of this server", access=Access.CLIENT),
    get("/docs", docs, "The OpenAPI document as a page", access=Access.CLIENT),
)
