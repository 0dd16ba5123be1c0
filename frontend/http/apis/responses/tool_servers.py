"""MCP servers, whose tools the model may call. This server carries out the calls, with the official client, `mcp`.

A request names one of the servers of `--tool-server`, and cannot give an address: clients could otherwise reach
whatever this server can reach.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from headrace.frontend.http.apis.responses.items import Item, new_id
from headrace.frontend.http.server.errors import ApiError, bad_field, without_own_names
from headrace.frontend.tracing.tracer import calling_tool
from headrace.ipc.failure import OptionError
from headrace.ipc.struct_types import threadsafe

logger = logging.getLogger(__name__)
CALL_TIMEOUT_S = 60.0
_LIST_TIMEOUT_S = 10.0
MOST_CALLS = 128
"""Most calls of one response, unless its max_tool_calls is lower: a model may call tools for ever."""
_LONGEST_OUTPUT = 1 << 20
_KNOWN = ("type", "server_label", "server_url", "server_description", "allowed_tools", "require_approval")


class ToolFilter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Selects tools of a server: by name, by whether they declare that they only read, or both."""

    tool_names: tuple[str, ...] | None = None
    read_only: bool | None = None

    def __post_init__(self) -> None:
        if self.tool_names is None and self.read_only is None:
            raise ValueError("it must have tool_names or read_only")

    def admits(self, name: str, *, reads_only: bool) -> bool:
        is_named = self.tool_names is None or name in self.tool_names
        return is_named and self.read_only in (None, reads_only)


class ApprovalFilter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Selects the tools whose calls need the client's approval."""

    always: ToolFilter | None = None
    never: ToolFilter | None = None

    def asks(self, name: str, *, reads_only: bool) -> bool:
        """Whether a call needs approval. For a tool in neither filter it does, unless only `always` is given."""
        if self.always is not None and self.always.admits(name, reads_only=reads_only):
            return True
        return self.always is None if self.never is None else not self.never.admits(name, reads_only=reads_only)


class Tool(msgspec.Struct, frozen=True):
    """A tool of an MCP server that a request may use."""

    label: str
    name: str
    description: str
    schema: dict[str, Any]
    needs_approval: bool
    """Its calls need the client's approval."""

    def as_function(self) -> Item:
        """The tool in the form of chat completions."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}

    def as_item(self) -> Item:
        more = {"description": self.description, "annotations": None}
        return {"name": self.name, "input_schema": self.schema, **more}


def parse_servers(given: Sequence[str]) -> dict[str, str]:
    """The addresses of the option tool_server, by label. Raises OptionError."""
    servers: dict[str, str] = {}
    for each in (part.strip() for option in given for part in option.split(",")):
        label, _, url = each.partition("=") if "=" in each.partition("://")[0] else ("", "", each)
        if url == "demo":
            raise OptionError("tool_server=demo: there are no demonstration tools here; name a server that speaks MCP")
        if "://" not in url:
            url = f"http://{url}/mcp"  # HOST:PORT, as vLLM takes it
        label = label or url.partition("://")[2].partition("/")[0]
        if label in servers:
            raise OptionError(f"tool_server={each}: {label} names another server already; give it as LABEL=URL")
        servers[label] = url
    if servers and importlib.util.find_spec("mcp") is None:
        raise OptionError("tool_server needs the official client library of MCP: pip install 'mcp>=2'")
    return servers


class ToolServers:
    """The MCP servers of the option tool_server."""

    def __init__(self, given: Sequence[str]) -> None:
        """Raises OptionError."""
        self._urls = parse_servers(given)
        if self._urls:
            importlib.import_module("mcp")  # takes a second, so it is done before any request

    async def tools(self, asked: Item, where: str) -> list[Tool]:
        """The allowed tools of the server that `asked`, a request's tool of type mcp, names. Raises ApiError."""
        label = asked.get("server_label")
        if not isinstance(label, str) or label not in self._urls:
            known = ", ".join(self._urls) or "none: it was started without --tool-server"
            raise bad_field(
                f"{where}.server_label", f"{where} names the tool server {str(label)[:80]!r}; this server has {known}"
            )
        self._check(asked, where, self._urls[label])
        allowed, approval = _allowed(asked, where), approval_of(asked, where)
        try:
            async with asyncio.timeout(_LIST_TIMEOUT_S), self._client(label) as client:
                found = (await client.list_tools()).tools
        except Exception as error:
            raise _unreachable(label, error) from error
        names = [each.name for each in found]
        missing = [name for name in (allowed and allowed.tool_names) or () if name not in names]
        if missing:
            why = f"{where}.allowed_tools has {missing[0][:80]!r}; {label} has {', '.join(names)}"
            raise bad_field(f"{where}.allowed_tools", why[:500])
        tools = []
        for each in found:
            reads_only = bool(each.annotations and each.annotations.read_only_hint)
            if allowed is None or allowed.admits(each.name, reads_only=reads_only):
                asks = approval.asks(each.name, reads_only=reads_only)
                tools.append(Tool(label, each.name, each.description or "", each.input_schema, asks))
        return tools

    async def call(self, item: Item) -> None:
        """Carries out an mcp_call and sets its output or its error."""
        try:
            arguments = msgspec.json.decode(item["arguments"] or "{}")
            if not isinstance(arguments, dict):
                raise ValueError("the arguments are no JSON object")
            with calling_tool(item["name"]):
                async with asyncio.timeout(CALL_TIMEOUT_S), self._client(item["server_label"]) as client:
                    result = await client.call_tool(item["name"], arguments)
            text = "\n".join(_text(block) for block in result.content)[:_LONGEST_OUTPUT]
            if result.is_error:
                item["error"] = failure(text or "the tool failed and said nothing")
            else:
                item["output"] = text
        except Exception as error:  # whatever fails at a foreign server, the model gets it as an error
            logger.info("the call of a tool of %s failed", item["server_label"], exc_info=error)
            item["error"] = failure(_for_clients(error)[:_LONGEST_OUTPUT])

    def _client(self, label: str) -> Any:
        """A new client, for one operation: the server may have been restarted since the last one."""
        from mcp import Client

        return Client(self._urls[label])

    def _check(self, asked: Item, where: str, url: str) -> None:
        for name, value in asked.items():
            if name not in _KNOWN and value is not None:
                raise bad_field(f"{where}.{name}", f"{where}.{name} is refused: what servers need is --tool-server's")
        if asked.get("server_url") not in (None, url):
            raise bad_field(f"{where}.server_url", f"{where}.server_url is refused: --tool-server has the addresses")


def _allowed(asked: Item, where: str) -> ToolFilter | None:
    allowed = asked.get("allowed_tools")
    given = {"tool_names": allowed} if isinstance(allowed, list) else allowed
    return None if given is None else _convert(given, ToolFilter, f"{where}.allowed_tools", "a list of names, or ")


def approval_of(asked: Item, where: str) -> ApprovalFilter:
    """Which calls need approval; as in OpenAI's API, all of them if require_approval is omitted. Raises ApiError."""
    given = asked.get("require_approval")
    if given in (None, "always"):
        return ApprovalFilter()
    if given == "never":
        return ApprovalFilter(always=ToolFilter(tool_names=()))
    return _convert(given, ApprovalFilter, f"{where}.require_approval", "always, never, or always and never with ")


_Given = TypeVar("_Given", ToolFilter, ApprovalFilter)


def _convert(given: Any, kind: type[_Given], where: str, other: str) -> _Given:
    try:
        return msgspec.convert(given, threadsafe(kind))
    except msgspec.ValidationError as error:
        why = f"{where} must be {other}an object with tool_names or read_only: {error}"
        raise bad_field(where, why) from None


def failure(text: str) -> Item:
    """The text as the error of an mcp_call."""
    return {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": text}]}


def _unreachable(label: str, error: BaseException) -> ApiError:
    logger.warning("the tools of %s could not be listed: %s", label, _cause(error))
    why = f"the tools of {label} could not be listed: {_for_clients(error)}"
    return ApiError(424, why, type="server_error", param="tools", code="tool_server_error")


def _cause(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _for_clients(error: BaseException) -> str:
    return without_own_names(_cause(error))


def _text(block: Any) -> str:
    text = getattr(block, "text", None)
    return text if isinstance(text, str) else str(block.model_dump_json(exclude_none=True))


def by_name(tools: Sequence[Tool], functions: Sequence[Item]) -> dict[str, Tool]:
    """The tools by name. Raises ApiError if two have the same name, since a call could mean either."""
    found: dict[str, Tool] = {}
    taken = {str(each["function"].get("name")) for each in functions}
    for tool in tools:
        if tool.name in taken or tool.name in found:
            raise bad_field("tools", f"two tools are called {tool.name!r:.100}: leave one out, by allowed_tools")
        found[tool.name] = tool
    return found


def listing(label: str, tools: Mapping[str, Tool]) -> Item:
    own = [tool.as_item() for tool in tools.values() if tool.label == label]
    return {"id": new_id("mcpl"), "type": "mcp_list_tools", "server_label": label, "tools": own}
