"""Starts a response: gathers the conversation so far and the tools, and builds each prompt of its turns.

Both the server's routes and batches start responses here.
"""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import Callable, Coroutine, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec

from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.openai.chat import ChatParts, prepare_chat
from headrace.frontend.http.apis.responses.client_tools import HOSTED, LeftOut, client_tools
from headrace.frontend.http.apis.responses.conversation import (
    ENCRYPTED,
    approved_calls,
    as_chat,
    check_include,
    check_outputs_have_calls,
    referred,
    size_of,
    stored_form,
    turns_to_drop,
    without_oldest,
)
from headrace.frontend.http.apis.responses.items import APPROVAL_REQUEST, CUSTOM_CALL, Item, new_id
from headrace.frontend.http.apis.responses.requests import ResponsesRequest
from headrace.frontend.http.apis.responses.run import EventLog, ResponseObject, ResponseRun, TurnAnswer
from headrace.frontend.http.apis.responses.store import ResponseStore, Stored
from headrace.frontend.http.apis.responses.tool_servers import MOST_CALLS, Tool, ToolServers, by_name, failure, listing
from headrace.frontend.http.server.errors import ApiError, bad_field
from headrace.frontend.http.server.exchange import LargeBodies
from headrace.frontend.http.server.generation import Generator, PreparedRequest, prepared_as
from headrace.frontend.http.server.shared_database import SILENT_S, StoreError
from headrace.frontend.text.template_renderer import one_limit
from headrace.ipc.failure import QueueFullError

OWN_NAMES: Mapping[str, str] = types.MappingProxyType(
    {
        "messages": "input",
        "response_format": "text.format",
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens"),
    }
)
"""The Responses API's names of chat completions' fields."""
_RETRY_S = 1.0


class ResponseParts(NamedTuple):
    """The parts of an HTTP process that responses need."""

    store: ResponseStore
    tool_servers: ToolServers
    left_out: LeftOut
    chat: ChatParts
    generator: Generator
    bodies: LargeBodies


class Begun(NamedTuple):
    run: ResponseRun
    running: Coroutine[Any, Any, None]
    """The coroutine of `ResponseRun.run`, not awaited yet."""
    stored: Stored
    """What will be stored, still without the response."""


async def begin(
    parts: ResponseParts,
    request: ResponsesRequest,
    engine: Engine,
    name: str,
    tenant: str,
    *,
    log: EventLog | None = None,
    deadline_s: float | None = None,
) -> Begun:
    """Prepares a response. A background response is not stored yet. Raises ApiError and HeadraceError.

    log: receives its events. deadline_s: when it must have ended (monotonic)."""
    store = parts.store
    earlier, asked = await conversation(store, tenant, request)
    items = [*earlier, *asked]
    tools = client_tools(request.tools or (), parts.left_out)
    functions = [tool.function for tool in tools.values()]
    called = await mcp_tools(parts.tool_servers, request, functions)
    labels = {name: tool.label for name, tool in called.items()}
    approved = approved_calls(asked, items, labels)
    turns = _Turns(
        parts,
        request,
        items,
        lambda request, items, tools: _work(parts.chat, request, items, tools, engine, name, tenant),
        AnswerTools(functions, called),
    )
    work = await turns.first()
    response = _response_of(request, new_id("resp"), work, stores=store.most_bytes > 0)
    stored = Stored(response.id, response.status, request.previous_response_id, b"", msgspec.json.encode(asked))

    async def save(response: ResponseObject) -> bool:
        now = msgspec.structs.replace(stored, status=response.status, response=msgspec.json.encode(response))
        if response.background:
            return await _put_surely(store, tenant, now)
        if response.store and response.status in ("completed", "incomplete"):
            try:
                await store.add(tenant, now)
            except StoreError:  # logged; the client should have its answer
                response.store = False
        return True

    run = ResponseRun(
        response,
        parts.generator,
        log,
        save,
        with_encrypted=ENCRYPTED in (request.include or ()),
        servers=labels,
        asked_for=frozenset(name for name, tool in called.items() if tool.needs_approval),
        tools=tools,
    )
    listings = [listing(label, called) for label in dict.fromkeys(labels.values())]
    running = run.run(work, turns.next if called else None, listings, approved, deadline_s)
    return Begun(run, running, stored)


async def whole(parts: ResponseParts, request: ResponsesRequest, engine: Engine, name: str, tenant: str) -> bytes:
    """Runs a response without a connection and returns it as JSON. Raises ApiError and HeadraceError; of these,
    QueueFullError if it may be retried, as no tool has been called."""
    run, running, _ = await begin(parts, request, engine, name, tenant)
    await running
    if run.error is None:
        return msgspec.json.encode(run.response)
    if isinstance(run.error, QueueFullError) and any(item["type"] == "mcp_call" for item in run.items.done):
        raise ApiError.of(run.error)
    raise run.error


async def _put_surely(store: ResponseStore, tenant: str, stored: Stored) -> bool:
    """Updates a response that is read by its id only: waits for a store that cannot be used now, until the response
    would count as failed."""
    end_s = time.monotonic() + SILENT_S
    while True:
        try:
            return await store.put(tenant, stored)
        except StoreError:
            if time.monotonic() >= end_s:
                raise
        await asyncio.sleep(_RETRY_S)


def check_request(request: ResponsesRequest, store: ResponseStore) -> None:
    """Checks fields against each other and the store. Raises ApiError, which names the field."""
    check_include(request.include)
    if request.background and request.store is False:
        raise bad_field(
            "background", "background can only be used when `store` is true: such a response is read by its id"
        )
    if (request.background or request.store) and not store.most_bytes:
        field = "background" if request.background else "store"
        raise bad_field(field, f"{field}: this server keeps no responses (its option response_store_bytes is 0)")
    if request.reasoning is not None and not isinstance(request.reasoning.get("effort", ""), str | None):
        raise bad_field("reasoning.effort", "reasoning.effort must be a text")


async def conversation(store: ResponseStore, tenant: str, request: ResponsesRequest) -> tuple[list[Item], list[Item]]:
    """The items before the request, and its own. Raises ApiError for what is not stored, or is no conversation."""
    earlier = await _history(store, tenant, request.previous_response_id)
    ids = referred(request.input)
    asked = stored_form(request.input, await store.items(tenant, ids) if ids else {}, earlier)
    check_outputs_have_calls(asked, [*earlier, *asked])
    return earlier, asked


async def _history(store: ResponseStore, tenant: str, previous: str | None) -> list[Item]:
    """The items of the responses before this one, oldest first. Raises ApiError if one is missing or incomplete."""
    if previous is None:
        return []
    items, missing = await store.history(tenant, previous)
    if missing is None:
        return items
    param = "previous_response_id"
    if missing == previous and await store.get(tenant, previous) is not None:
        raise bad_field(param, f"the response {previous!r:.200} is not complete, and nothing can follow it")
    also = "" if missing == previous else f", which {previous!r:.200} follows,"
    raise ApiError(
        HTTPStatus.NOT_FOUND,
        f"Response with id {missing!r:.200}{also} not found: it was deleted, was not stored, or had to make room",
        param=param,
        code="previous_response_not_found",
    )


def _work(
    chat: ChatParts,
    request: ResponsesRequest,
    items: list[Item],
    tools: list[Item] | None,
    engine: Engine,
    name: str,
    tenant: str,
) -> PreparedRequest:
    """What to run. With truncation: auto, drops the oldest turns that do not fit. Raises ApiError."""

    def attempt(kept: list[Item]) -> PreparedRequest | ApiError:
        try:
            return prepared_as(
                OWN_NAMES,
                lambda: prepare_chat(as_chat(request, kept, tools), engine, name, chat, tenant, TurnAnswer),
            )
        except ApiError as error:
            if error.body.code != "context_length_exceeded" or request.truncation != "auto":
                raise
            return error

    with one_limit():
        best = attempt(items)
        cuts = turns_to_drop(items)
        low, high = 0, len(cuts) if isinstance(best, ApiError) else 0
        while low < high:  # binary search for the first cut that fits
            middle = (low + high) // 2
            found = attempt(without_oldest(items, cuts[middle]))
            if isinstance(found, ApiError):
                low = middle + 1
            else:
                best, high = found, middle
        if isinstance(best, ApiError):
            raise best
        return best


async def mcp_tools(servers: ToolServers, request: ResponsesRequest, functions: Sequence[Item]) -> dict[str, Tool]:
    """The MCP tools that this server may call for the request, by name. Raises ApiError."""
    found: list[Tool] = []
    for index, tool in enumerate(request.tools or ()):
        if tool["type"] == "mcp":
            found += await servers.tools(tool, f"tools[{index}]")
    return by_name(found, functions)


class _Turns:
    """The prompts of one response: the first, and one after each turn whose tool calls this server has carried out."""

    def __init__(
        self, parts: ResponseParts, request: ResponsesRequest, items: list[Item], make: MakeWork, tools: AnswerTools
    ) -> None:
        self._parts, self._request, self._items, self._make, self._tools = parts, request, items, make, tools
        self._calls_left = min(request.max_tool_calls or MOST_CALLS, MOST_CALLS)

    async def first(self) -> PreparedRequest:
        return await self._work(self._request, self._items)

    async def next(self, run: ResponseRun) -> PreparedRequest | None:
        """The next prompt; None if the response ends: without calls, or with some for the client to run or approve."""
        if not run.items.calling:
            return None
        calls = [item for _, item in run.items.calling]
        for item in calls[self._calls_left :]:
            item["error"] = failure("not carried out: the response has made as many calls as it may (max_tool_calls)")
        carried_out = calls[: self._calls_left]
        self._calls_left -= len(carried_out)
        await asyncio.gather(*map(self._parts.tool_servers.call, carried_out))
        run.items.called()
        if any(item["type"] in ("function_call", CUSTOM_CALL, APPROVAL_REQUEST) for item in run.items.done):
            return None
        # A required call has been made now.
        request = msgspec.structs.replace(self._request, tool_choice=None)
        if request.max_output_tokens is not None:
            request.max_output_tokens -= run.usage.output_tokens
            run.is_cut = request.max_output_tokens <= 0
        return None if run.is_cut else await self._work(request, [*self._items, *run.items.done])

    async def _work(self, request: ResponsesRequest, items: list[Item]) -> PreparedRequest:
        called = [tool.as_function() for tool in self._tools.called.values()] if self._calls_left > 0 else []
        tools = [*self._tools.functions, *called] or None
        return await self._parts.bodies.work(size_of(request, items, tools), lambda: self._make(request, items, tools))


MakeWork = Callable[[ResponsesRequest, list[Item], list[Item] | None], PreparedRequest]
"""Makes what runs from a request, the conversation's items, and the tools that the model sees."""


class AnswerTools(NamedTuple):
    functions: list[Item]
    """The client's tools, in the form of chat completions."""
    called: dict[str, Tool]
    """Those of MCP servers, by name."""


def _response_of(request: ResponsesRequest, id: str, work: PreparedRequest, *, stores: bool) -> ResponseObject:
    params, answer = work.requests[0].params, work.answer
    text, reasoning = request.text or {}, request.reasoning or {}
    assert isinstance(answer, TurnAnswer), "as `_work` makes it"
    return ResponseObject(
        id=id,
        created_at=int(time.time()),
        status="queued" if request.background else "in_progress",
        background=bool(request.background),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=answer.model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        reasoning={"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        store=stores and request.store is not False,
        temperature=params.temperature,
        text={**text, "format": text.get("format") or {"type": "text"}},
        tool_choice=request.tool_choice or "auto",
        tools=[_told(tool) for tool in request.tools or () if tool["type"] not in HOSTED],
        top_logprobs=request.top_logprobs or 0,
        top_p=params.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
        metadata=request.metadata or {},
    )


def _told(tool: Item) -> Item:
    """The tool as it appears in the response."""
    return {"description": None, "parameters": None, "strict": None, **tool} if tool["type"] == "function" else tool
