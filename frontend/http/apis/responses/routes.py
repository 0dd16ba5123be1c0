"""The routes of the Responses API."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import time
from collections.abc import Coroutine
from http import HTTPStatus
from typing import Any, Literal

import msgspec

from headrace.frontend.http.apis.openai.chat import ChatParts, count_prompt
from headrace.frontend.http.apis.openai.requests import RANK_HEADER, take_rank
from headrace.frontend.http.apis.responses.client_tools import LeftOut, client_tools
from headrace.frontend.http.apis.responses.conversation import ENCRYPTED, as_chat, check_include, size_of
from headrace.frontend.http.apis.responses.create import (
    OWN_NAMES,
    ResponseParts,
    begin,
    check_request,
    conversation,
    mcp_tools,
)
from headrace.frontend.http.apis.responses.items import Item, with_encrypted
from headrace.frontend.http.apis.responses.requests import NOT_SUPPORTED, ResponsesRequest
from headrace.frontend.http.apis.responses.run import EventLog, Follower, ResponseObject, ResponseRun
from headrace.frontend.http.apis.responses.store import IN_PROGRESS, ResponseStore, Stored
from headrace.frontend.http.apis.responses.tool_servers import ToolServers
from headrace.frontend.http.server.access import Access
from headrace.frontend.http.server.api import Api, ApiState
from headrace.frontend.http.server.decoding.decoder import decode_query
from headrace.frontend.http.server.decoding.known_fields import Body
from headrace.frontend.http.server.errors import ApiError, bad_field, renamed
from headrace.frontend.http.server.event_stream import HEADERS
from headrace.frontend.http.server.exchange import Exchange
from headrace.frontend.http.server.generation import HOLD_S, first_of
from headrace.frontend.http.server.route_spec import GENERATION, TOKENS, get, post, route
from headrace.frontend.http.server.shared_database import StoreError
from headrace.frontend.http.server.state import ServerState

_MOST_LOG_BYTES = 16 << 20
"""Most bytes of events kept of ended background responses, for clients that resume a stream; divided among the keys."""
_LOOK_S = 1.0
"""How often to check whether another process has cancelled a background response."""


class BackgroundRuns:
    """The background responses of this process, and the events of some that have ended."""

    def __init__(self, num_tenants: int = 1) -> None:
        self._share_bytes = _MOST_LOG_BYTES // num_tenants
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._logs: collections.OrderedDict[tuple[str, str], EventLog] = collections.OrderedDict()

    def add(self, tenant: str, run: ResponseRun, task: asyncio.Task[None]) -> None:
        key = (tenant, run.response.id)
        self._tasks[key] = task
        if run.log is not None:
            self._logs[key] = run.log
        task.add_done_callback(lambda _: self._ended(key))

    def log(self, tenant: str, id: str) -> EventLog | None:
        return self._logs.get((tenant, id))

    def cancel(self, tenant: str, id: str) -> None:
        if (task := self._tasks.get((tenant, id))) is not None:
            task.cancel()

    async def wait(self) -> None:
        """Returns when all have ended."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _ended(self, key: tuple[str, str]) -> None:
        del self._tasks[key]
        if key in self._logs:
            self._logs.move_to_end(key)
        ended = [each for each in self._logs if each[0] == key[0] and each not in self._tasks]
        excess = sum(self._logs[each].num_bytes for each in ended) - self._share_bytes
        for each in ended:
            if excess <= 0:
                break
            excess -= self._logs.pop(each).num_bytes


class ResponsesState(ApiState):
    """The state of this API in one HTTP process."""

    def __init__(self, parts: ResponseParts, num_tenants: int = 1) -> None:
        self.parts, self.store = parts, parts.store
        self.runs = BackgroundRuns(num_tenants)

    @classmethod
    def create(cls, state: ServerState) -> ResponsesState:
        """Raises OptionError."""
        options, tenants = state.options, state.keys.tenants
        parts = ResponseParts(
            ResponseStore(options.response_store, options.response_store_bytes, tenants),
            ToolServers(options.tool_server),
            LeftOut(strict=options.strict_requests),
            state.of(ChatParts),
            state.generator,
            state.bodies,
        )
        return cls(parts, len(tenants))

    async def close(self) -> None:
        await self.runs.wait()
        self.store.close()


class DeletedResponse(msgspec.Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputItemList(msgspec.Struct):
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool
    object: Literal["list"] = "list"


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class RetrieveQuery(msgspec.Struct):
    stream: bool = False
    starting_after: int = -1
    include: tuple[str, ...] = ()
    include_obfuscation: bool = False


class InputItemsQuery(msgspec.Struct):
    limit: int = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    include: tuple[str, ...] = ()


# --- create -----------------------------------------------------------------------------------------------------------


async def create(state: ServerState, exchange: Exchange) -> None:
    own, tenant = state.of(ResponsesState), exchange.tenant
    request = await exchange.prepare(lambda body: state.decoder.decode(body, ResponsesRequest))
    check_request(request, own.store)
    take_rank(request, exchange.header(RANK_HEADER))
    state.check_accepting()
    engine = await state.engine_for(request.model)
    log = EventLog(keeps=bool(request.background)) if request.stream else None
    name, deadline_s = f"resp_{exchange.request_id(request.request_id)}", state.generator.deadline_s()
    run, running, stored = await begin(own.parts, request, engine, name, tenant, log=log, deadline_s=deadline_s)
    if run.response.background:
        body = msgspec.json.encode(run.response)
        try:
            await own.store.add(tenant, msgspec.structs.replace(stored, response=body))
        except BaseException:
            running.close()
            raise
        own.runs.add(tenant, run, asyncio.create_task(_in_background(own, tenant, run, running)))
        await (exchange.answer(body) if log is None else _follow(state, exchange, log, 0, run.take_news))
    else:
        await _in_foreground(state, exchange, run, asyncio.create_task(running))


async def input_tokens(state: ServerState, exchange: Exchange) -> None:
    """The number of tokens in the prompt of a response."""
    own = state.of(ResponsesState)
    request = await exchange.prepare(lambda body: state.decoder.decode(body, ResponsesRequest))
    state.check_accepting()
    engine = await state.engine_for(request.model)
    earlier, asked = await conversation(own.store, exchange.tenant, request)
    items = [*earlier, *asked]
    functions = [tool.function for tool in client_tools(request.tools or (), own.parts.left_out).values()]
    called = await mcp_tools(own.parts.tool_servers, request, functions)
    tools = [*functions, *(tool.as_function() for tool in called.values())] or None

    def count() -> int:
        with renamed(OWN_NAMES):
            return count_prompt(as_chat(request, items, tools), engine, own.parts.chat)

    await exchange.answer(InputTokens(await state.bodies.work(size_of(request, items, tools), count)))


async def _in_foreground(state: ServerState, exchange: Exchange, run: ResponseRun, task: asyncio.Task[None]) -> None:
    """Answers with a response that ends when its client leaves."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task.add_done_callback(lambda _: None if ended.done() else ended.set_result(None))
    try:
        with state.generator.watch_client(exchange) as gone:
            if run.log is None:
                if not await first_of(ended, gone, None):
                    return
            else:
                with contextlib.suppress(ApiError):  # no output yet, so the HTTP response begins
                    if not await first_of(run.begun, gone, time.monotonic() + HOLD_S):
                        return
            if run.error is not None:
                raise run.error
            if run.log is None:
                await exchange.answer(msgspec.json.encode(run.response))
                return
            await _write_events(state, exchange, run.log, 0, gone, run.take_news)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _in_background(
    own: ResponsesState, tenant: str, run: ResponseRun, running: Coroutine[Any, Any, None]
) -> None:
    """Runs a response until it ends, or until it was cancelled or deleted by any process."""
    task = asyncio.create_task(running)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=_LOOK_S if own.store.is_shared else None)
            if own.store.is_shared and not task.done():
                with contextlib.suppress(StoreError):  # which may work again when the response is complete
                    if not await own.store.is_wanted(tenant, run.response.id):
                        break
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _follow(state: ServerState, exchange: Exchange, log: EventLog, place: int, on_writable: Any) -> None:
    with state.generator.watch_client(exchange) as gone:
        await _write_events(state, exchange, log, place, gone, on_writable)


async def _write_events(
    state: ServerState, exchange: Exchange, log: EventLog, place: int, gone: asyncio.Future[None], on_writable: Any
) -> None:
    follower = Follower(log, exchange.connection, place)
    state.generator.keep_alive.add(follower)
    try:
        await exchange.send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        follower.open(on_writable)
        if await first_of(follower.ended, gone, None):
            await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})
    finally:
        follower.close()
        state.generator.keep_alive.remove(follower)


# --- what is stored ---------------------------------------------------------------------------------------------------


async def retrieve(state: ServerState, exchange: Exchange) -> None:
    query = decode_query(exchange.query(), RetrieveQuery)
    check_include(query.include)
    stored = await _stored(state, exchange)
    if not query.stream:
        response = stored.response
        if ENCRYPTED in query.include:
            told = msgspec.json.decode(response)
            response = msgspec.json.encode({**told, "output": list(map(with_encrypted, told["output"]))})
        await exchange.answer(response)
        return
    log = state.of(ResponsesState).runs.log(exchange.tenant, stored.id)
    if log is None:
        raise bad_field(
            "stream",
            "the events of this response are not available: it was not created with background and stream, has ended "
            "some time ago, or another of the server's processes generates it; read it without stream",
        )
    await _follow(state, exchange, log, query.starting_after + 1, log.flush)


async def delete(state: ServerState, exchange: Exchange) -> None:
    id = exchange.scope["path_params"]["response_id"]
    if not await state.of(ResponsesState).store.delete(exchange.tenant, id):
        raise _no_response(id)
    state.of(ResponsesState).runs.cancel(exchange.tenant, id)
    await exchange.answer(DeletedResponse(id))


async def cancel(state: ServerState, exchange: Exchange) -> None:
    """Ends a background response where it is; one that has ended stays unchanged."""
    stored = await _stored(state, exchange)
    response = msgspec.json.decode(stored.response)
    if not response["background"]:
        raise bad_field("response_id", "Cannot cancel a synchronous response. Only one with background: true can be.")
    if stored.status in IN_PROGRESS:
        cancelled = {**response, "status": "cancelled"}
        changed = msgspec.structs.replace(stored, status="cancelled", response=msgspec.json.encode(cancelled))
        if await state.of(ResponsesState).store.put(exchange.tenant, changed):
            state.of(ResponsesState).runs.cancel(exchange.tenant, stored.id)
            stored = changed
        else:
            stored = await _stored(state, exchange)
    await exchange.answer(stored.response)


async def input_items(state: ServerState, exchange: Exchange) -> None:
    query = decode_query(exchange.query(), InputItemsQuery)
    check_include(query.include)
    if not 1 <= query.limit <= 100:
        raise bad_field("limit", f"limit is {query.limit}; it must be 1 to 100")
    items: list[Item] = msgspec.json.decode((await _stored(state, exchange)).input)
    if query.order == "desc":
        items.reverse()
    if query.after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == query.after]
        if not places:
            raise bad_field("after", f"after: no item has the id {query.after!r:.100}")
        items = items[places[0] + 1 :]
    page = items[: query.limit]
    first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
    if ENCRYPTED in query.include:
        page = list(map(with_encrypted, page))
    await exchange.answer(InputItemList(page, first, last, len(items) > len(page)))


async def _stored(state: ServerState, exchange: Exchange) -> Stored:
    id = exchange.scope["path_params"]["response_id"]
    stored = await state.of(ResponsesState).store.get(exchange.tenant, id)
    if stored is None:
        raise _no_response(id)
    return stored


def _no_response(id: str) -> ApiError:
    why = f"Response with id {id!r:.200} not found: it was deleted, was not stored, or had to make room"
    return ApiError(HTTPStatus.NOT_FOUND, why, param="response_id", code="not_found")


_get, _post = functools.partial(get, access=Access.CLIENT), functools.partial(post, access=Access.CLIENT)
ROUTES = (
    _post(
        "/v1/responses",
        create,
        "Create a response, which may be stored, followed and continued by its id",
        ResponsesRequest,
        ResponseObject,
        (*GENERATION, 424),
    ),
    _post(
        "/v1/responses/input_tokens",
        input_tokens,
        "Count the prompt's tokens of a response",
        ResponsesRequest,
        InputTokens,
        (*TOKENS, 424),
    ),
    _get(
        "/v1/responses/{response_id}",
        retrieve,
        "Retrieve a stored response",
        ResponseObject,
        query=RetrieveQuery,
        refusals=(400, 404),
    ),
    route(
        "DELETE",
        "/v1/responses/{response_id}",
        delete,
        "Delete a stored response",
        DeletedResponse,
        refusals=(404,),
        access=Access.CLIENT,
    ),
    _post(
        "/v1/responses/{response_id}/cancel",
        cancel,
        "Cancel a response that is generated in the background",
        None,
        ResponseObject,
        (400, 404),
    ),
    _get(
        "/v1/responses/{response_id}/input_items",
        input_items,
        "List the input items of a stored response",
        InputItemList,
        query=InputItemsQuery,
        refusals=(400, 404),
    ),
)
API = Api(
    routes=ROUTES,
    states=(ResponsesState,),
    bodies=(Body(kind=ResponsesRequest, called="responses", lacks=NOT_SUPPORTED),),
    not_served={"/v1/responses": "POST creates a response; GET, DELETE and POST .../cancel take its id"},
    not_routes={"/v1/responses/compact": "conversations are not compacted; truncation: auto drops the oldest turns"},
)
