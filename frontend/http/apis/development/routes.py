"""vLLM's development routes: the control channel's commands over HTTP. Served only with --server-dev-mode.

A command goes to all engines of the server at once, and is answered when all have carried it out. Any of several HTTP
processes can accept it, since the engines keep the state.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Awaitable, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from headrace.frontend.client.client import CoreClient
from headrace.frontend.client.control import QUICK_S, method_command, pause_command, sleep_command, wake_command
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.access import Access
from headrace.frontend.http.server.api import Api
from headrace.frontend.http.server.decoding.decoder import decode_query
from headrace.frontend.http.server.engines import why_unavailable
from headrace.frontend.http.server.errors import ApiError
from headrace.frontend.http.server.exchange import Exchange
from headrace.frontend.http.server.route_spec import Handler, RouteSpec, get, post
from headrace.frontend.http.server.state import ServerState
from headrace.ipc.control import (
    Commands,
    DescribeEngine,
    EngineReport,
    ResumeGeneration,
    StartProfile,
    StopProfile,
)
from headrace.ipc.failure import EngineDeadError, HeadraceError
from headrace.ipc.messages import EngineStats

T = TypeVar("T")


def is_development(options: ServeOptions) -> bool:
    return options.server_dev_mode or os.environ.get("HEADRACE_SERVER_DEV_MODE") == "1"


class PauseQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    mode: Annotated[
        Literal["abort", "wait", "keep"],
        Meta(
            description="What happens to running requests: abort them, wait until they are finished, or keep "
            "them until /resume"
        ),
    ] = "abort"
    clear_cache: Annotated[bool, Meta(description="Clear the prefix cache, and what kept requests have computed")] = (
        True
    )
    wait_for_inflight_requests: Annotated[bool, Meta(description="Deprecated by vLLM: the same as mode=wait")] = False


_LONGEST_LOOK = 64
"""Most bytes that are read of a body that should be empty."""


class SleepQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    level: Annotated[
        Literal[1, 2], Meta(description="1 keeps the weights in the host's memory; 2 reads them again after waking up")
    ] = 1
    mode: Annotated[Literal["abort", "wait", "keep"], Meta(description="The same as mode of /pause")] = "abort"


class WakeQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    tags: Annotated[
        tuple[Literal["weights", "kv_cache"], ...],
        Meta(description="What to wake up: weights, kv_cache; default: both"),
    ] = ()


class ResetQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    reset_running_requests: Annotated[
        bool, Meta(description="Also what running requests have computed, which is computed again")
    ] = False
    reset_external: Annotated[
        bool, Meta(description="Accepted without effect: there are no caches outside the engine")
    ] = False


class ReloadQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    weights_path: Annotated[
        str, Meta(description="A checkpoint of the same config on the engines' hosts; without it, the model's own")
    ] = ""


class NoQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """No query parameters."""


class RpcRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /collective_rpc"""

    method: Annotated[str, Meta(description="A method of the class that worker_extension_cls names")]
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: Annotated[float, Meta(gt=0, description="Seconds; without it, as long as it takes")] | None = None


class RpcResponse(msgspec.Struct):
    results: list[Any]
    """The method's return value on each worker, in the order of engines and ranks."""


class StatusResponse(msgspec.Struct):
    status: str


class PausedResponse(msgspec.Struct):
    is_paused: bool


class SleepingResponse(msgspec.Struct):
    is_sleeping: bool


class ProfileResponse(msgspec.Struct):
    files: list[str]
    """Paths on the engines' hosts, of files for ui.perfetto.dev."""


class WorldSizeResponse(msgspec.Struct):
    world_size: int


class EngineInfo(msgspec.Struct):
    options: dict[str, Any]
    decisions: dict[str, dict[str, str]]
    """By the name of the decision: its value and its reason."""
    facts: dict[str, Any]
    workers: list[dict[str, Any]]


class ServerInfoResponse(msgspec.Struct):
    version: str
    engines: list[EngineInfo]


async def pause(state: ServerState, exchange: Exchange) -> None:
    """Answers 200 once nothing runs on the engines. If an engine outlives this server, so does the pause."""
    query = decode_query(exchange.query(), PauseQuery)
    mode: Any = "wait" if query.wait_for_inflight_requests else query.mode
    await _command(state, pause_command(mode, query.clear_cache), None)
    await exchange.answer(StatusResponse("paused"))


async def resume(state: ServerState, exchange: Exchange) -> None:
    decode_query(exchange.query(), NoQuery)
    await _command(state, ResumeGeneration())
    await exchange.answer(StatusResponse("resumed"))


async def is_paused(state: ServerState, exchange: Exchange) -> None:
    """Whether any engine is paused."""
    await exchange.answer(PausedResponse(any(each.paused for each in await _stats(state))))


async def sleep(state: ServerState, exchange: Exchange) -> None:
    """Answers 200 once the engines have freed their memory."""
    query = decode_query(exchange.query(), SleepQuery)
    await _command(state, sleep_command(query.level, query.mode), None)
    await exchange.answer(StatusResponse("sleeping"))


async def wake_up(state: ServerState, exchange: Exchange) -> None:
    query = decode_query(exchange.query(), WakeQuery)
    await _command(state, wake_command(query.tags), None)
    await exchange.answer(StatusResponse("awake"))


async def is_sleeping(state: ServerState, exchange: Exchange) -> None:
    """Whether any engine, or a part of one, is asleep."""
    await exchange.answer(SleepingResponse(any(each.sleep_level for each in await _stats(state))))


async def reset_prefix_cache(state: ServerState, exchange: Exchange) -> None:
    asked = decode_query(exchange.query(), ResetQuery)
    await asyncio.gather(*(client.reset_prefix_cache(asked.reset_running_requests) for client in _clients(state)))
    await exchange.answer(StatusResponse("ok"))


async def reset_mm_cache(state: ServerState, exchange: Exchange) -> None:
    decode_query(exchange.query(), NoQuery)
    await asyncio.gather(*(client.reset_mm_cache() for client in _clients(state)))
    await exchange.answer(StatusResponse("ok"))


async def reload_weights(state: ServerState, exchange: Exchange) -> None:
    """Running requests continue with the new weights. If an engine cannot read them, all keep their own, and it says
    why."""
    asked = decode_query(exchange.query(), ReloadQuery)
    _clients(state)
    await _answered(state.pool.reload_weights(asked.weights_path))
    await exchange.answer(StatusResponse("ok"))


async def start_profile(state: ServerState, exchange: Exchange) -> None:
    decode_query(exchange.query(), NoQuery)
    await _command(state, StartProfile(), None)  # the profiler may be loaded only now
    await exchange.answer(StatusResponse("ok"))


async def stop_profile(state: ServerState, exchange: Exchange) -> None:
    decode_query(exchange.query(), NoQuery)
    results = await _command(state, StopProfile(), None)
    await exchange.answer(ProfileResponse([path for result in results for path in result.paths]))


async def collective_rpc(state: ServerState, exchange: Exchange) -> None:
    decode_query(exchange.query(), NoQuery)
    request = await exchange.prepare(lambda body: state.decoder.decode(body, RpcRequest))
    command = method_command(request.method, request.args, request.kwargs)
    try:
        async with asyncio.timeout(request.timeout):  # the caller's limit; an engine that exceeds it is not dead
            answers = await _command(state, command, None)
    except TimeoutError:
        text = f"{request.method} did not answer within the request's timeout of {request.timeout:g} s, and goes on"
        raise ApiError(HTTPStatus.REQUEST_TIMEOUT, text, code="timeout") from None
    await exchange.answer(RpcResponse([each["result"] for answer in answers for each in answer.payloads]))


async def world_size(state: ServerState, exchange: Exchange) -> None:
    """The number of workers of all engines."""
    await exchange.answer(WorldSizeResponse(sum(len(report.workers) for report in await _reports(state))))


async def server_info(state: ServerState, exchange: Exchange) -> None:
    from headrace import __version__

    engines = [
        EngineInfo(
            options=report.options,
            decisions={name: {"value": value, "reason": reason} for name, value, reason in report.decisions},
            facts=report.facts,
            workers=list(report.workers),
        )
        for report in await _reports(state)
    ]
    await exchange.answer(ServerInfoResponse(__version__, engines))


async def _command(state: ServerState, command: Commands, timeout_s: float | None = QUICK_S) -> list[Any]:
    """Returns the answer of each engine. Raises ApiError (400) with an engine's reason if it refuses."""
    _clients(state)
    return await _answered(state.pool.control_each(command, timeout_s))


async def _answered(command: Awaitable[T]) -> T:
    try:
        return await command
    except EngineDeadError:
        raise
    except HeadraceError as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, str(error).partition("\n")[0], code="command_refused") from None


async def _reports(state: ServerState) -> list[EngineReport]:
    return await _command(state, DescribeEngine())


async def _stats(state: ServerState) -> list[EngineStats]:
    return await asyncio.gather(*(client.get_stats() for client in _clients(state)))


def _clients(state: ServerState) -> list[CoreClient]:
    clients = [engine.client for engine in state.pool.engines if engine.client is not None and engine.usable]
    if not clients:
        raise why_unavailable(state.pool)
    return clients


def _post(path: str, handler: Handler, summary: str, response: Any, query: Any = NoQuery) -> RouteSpec:
    checked = _without_body(handler, query.__struct_fields__)
    return post(path, checked, summary, None, response, (400, 403, 503), query=query, access=Access.ADMIN)


def _without_body(handler: Handler, names: Sequence[str]) -> Handler:
    """Wraps a handler to refuse requests with a body, since a client that sends one expects it to have an effect."""
    known = f"its parameters stand in the query: {', '.join(names)}" if names else "and has no parameters"

    async def checked(state: ServerState, exchange: Exchange) -> None:
        start = b""
        async for part in exchange.parts():
            start += part
            if len(start) > _LONGEST_LOOK:
                break
        if len(start) > _LONGEST_LOOK or start.strip() not in (b"", b"{}", b"null"):
            raise ApiError(HTTPStatus.BAD_REQUEST, f"this route reads no body, {known}", code="invalid_value")
        await handler(state, exchange)

    return checked


_get = functools.partial(get, refusals=(400, 503), access=Access.ADMIN)
ROUTES = (
    _post("/pause", pause, "Pause generation until /resume", StatusResponse, PauseQuery),
    _post("/resume", resume, "Resume generation after /pause", StatusResponse),
    _get("/is_paused", is_paused, "Whether generation is paused", PausedResponse),
    _post(
        "/sleep",
        sleep,
        "Free the engines' memory until /wake_up; needs --enable-sleep-mode",
        StatusResponse,
        SleepQuery,
    ),
    _post("/wake_up", wake_up, "Wake up after /sleep", StatusResponse, WakeQuery),
    _get("/is_sleeping", is_sleeping, "Whether an engine is sleeping", SleepingResponse),
    _post("/reset_prefix_cache", reset_prefix_cache, "Clear the prefix cache", StatusResponse, ResetQuery),
    _post("/reset_mm_cache", reset_mm_cache, "Clear the cache of processed multimodal inputs", StatusResponse),
    _post(
        "/reload_weights",
        reload_weights,
        "Reload the weights, or load those of another path",
        StatusResponse,
        ReloadQuery,
    ),
    _post("/start_profile", start_profile, "Start profiling; needs --profiler-config", StatusResponse),
    _post("/stop_profile", stop_profile, "Stop profiling and write the profile", ProfileResponse),
    post(
        "/collective_rpc",
        collective_rpc,
        "Call a method of the workers; needs --worker-extension-cls",
        RpcRequest,
        RpcResponse,
        (400, 403, 408, 413, 415, 503),
        access=Access.ADMIN,
    ),
    _get("/server_info", server_info, "Show the engines' options and what was derived from them", ServerInfoResponse),
    _get("/get_world_size", world_size, "Show the number of workers", WorldSizeResponse),
)
API = Api(routes=ROUTES, is_served=is_development, served_by="--server-dev-mode: it is a development route")
