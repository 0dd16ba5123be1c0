"""The output items of a response while they grow, and the events that report them.

    reasoning, message, function_call or mcp_call:
      output_item.added, [content_part.added], deltas ..., done, [content_part.done], output_item.done
    mcp_approval_request, once it is complete:
      output_item.added, output_item.done

One state machine produces both, so that the items are the sum of the events.
"""

from __future__ import annotations

import base64
import types
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from headrace.frontend.request.message import call_id
from headrace.frontend.text.formats.events import AnswerPart

Item = dict[str, Any]
NO_SERVERS: Mapping[str, str] = types.MappingProxyType({})
CUSTOM_CALL = "custom_tool_call"
APPROVAL_REQUEST, APPROVAL_RESPONSE = "mcp_approval_request", "mcp_approval_response"


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class ClientTool(NamedTuple):
    """A tool that the client runs (client_tools.py)."""

    function: Item
    """The tool in the form of chat completions."""
    name: str
    namespace: str | None = None
    is_custom: bool = False


NO_TOOLS: Mapping[str, ClientTool] = types.MappingProxyType({})


def mcp_call(label: str, name: str, arguments: str = "", *, approval_request_id: str | None = None) -> Item:
    """An mcp_call item for a tool of the MCP server `label`, before the call is carried out."""
    about = {"server_label": label, "name": name, "arguments": arguments}
    rest = {"approval_request_id": approval_request_id, "output": None, "error": None}
    return {"id": new_id("mcp"), "type": "mcp_call", **about, **rest}


class Tell(Protocol):
    def __call__(self, kind: str, **fields: Any) -> None:
        """Sends the event response.KIND."""
        ...


class OutputItems:
    """The state machine: `take` accepts what the parser reads from the model's output."""

    def __init__(
        self,
        tell: Tell,
        *,
        with_encrypted: bool = False,
        servers: Mapping[str, str] = NO_SERVERS,
        asked_for: Collection[str] = (),
        tools: Mapping[str, ClientTool] = NO_TOOLS,
    ) -> None:
        """with_encrypted: reasoning items get `encrypted_content`, for clients that send it back instead of the text.
        servers: for each MCP tool that this server calls, by name, its server's label. asked_for: names of the MCP
        tools whose calls need the client's approval. tools: the client's tools, by the names that the model sees."""
        self._tools = tools
        self._tell, self._with_encrypted, self._servers, self._asked_for = tell, with_encrypted, servers, asked_for
        self.calling: list[tuple[int, Item]] = []
        """Calls of MCP tools that have to be carried out, each with its index in `done`."""
        self.done: list[Item] = []
        self._open: Item | None = None
        self._kind = ""
        self._call = -1
        """The index of the open item among the output's tool calls; -1 if it is not one."""
        self._texts: list[str] = []
        self._logprobs: list[Any] = []

    def take(self, told: AnswerPart, logprobs: Sequence[Any] = ()) -> None:
        """Adds an event of the parser to the open item, or begins another. logprobs: of its tokens, if requested."""
        kind = "function_call" if told.call >= 0 else "reasoning" if told.reasoning else "message"
        if self._open is None or self._kind != kind or self._call != told.call:
            self.close()
            self._begin(kind, told)
        item, text = self._open, told.content or told.reasoning or told.arguments
        assert item is not None
        if not text:
            return
        self._texts.append(text)
        place = {"item_id": item["id"], "output_index": len(self.done)}
        if item["type"] in (APPROVAL_REQUEST, CUSTOM_CALL):
            pass  # sent once it is complete
        elif kind == "function_call":
            self._tell(f"{item['type']}_arguments.delta", **place, delta=text)
        elif kind == "reasoning":
            self._tell("reasoning_text.delta", **place, content_index=0, delta=text)
        else:
            self._logprobs += logprobs
            self._tell("output_text.delta", **place, content_index=0, delta=text, logprobs=logprobs)

    def add_listing(self, item: Item) -> None:
        """Adds an mcp_list_tools item: the tools of an MCP server."""
        index = len(self.done)
        self._tell("output_item.added", output_index=index, item={**item, "tools": []})
        for step in ("in_progress", "completed"):
            self._tell(f"mcp_list_tools.{step}", item_id=item["id"], output_index=index)
        self._tell("output_item.done", output_index=index, item=item)
        self.done.append(item)

    def begin_call(self, item: Item) -> None:
        """Adds a call that the client has approved and that has to be carried out."""
        index, item["status"] = len(self.done), "calling"
        self._tell("output_item.added", output_index=index, item={**item, "status": "in_progress"})
        self._tell("mcp_call.in_progress", item_id=item["id"], output_index=index)
        self.done.append(item)
        self.calling.append((index, item))

    def called(self) -> None:
        """Called when all of `calling` have been carried out: sends their last events."""
        for index, item in self.calling:
            item["status"] = "completed" if item["error"] is None else "failed"
            self._tell(f"mcp_call.{item['status']}", item_id=item["id"], output_index=index)
            self._tell("output_item.done", output_index=index, item=item)
        self.calling.clear()

    def finish(self, *, is_complete: bool) -> None:
        """Called when the output has ended. A complete one without any text gets an empty message."""
        self.close("completed" if is_complete else "incomplete")
        for index, item in self.calling:  # the output was cut off after them
            item["status"] = "incomplete"
            self._tell("output_item.done", output_index=index, item=item)
        self.calling.clear()
        if is_complete and (not self.done or self.done[-1]["type"] == "reasoning"):
            self._begin("message", AnswerPart())
            self.close()

    def _begin(self, kind: str, told: AnswerPart) -> None:
        item: Item
        match kind:
            case "function_call" if told.name in self._asked_for:
                about: Item = {"server_label": self._servers[told.name], "name": told.name, "arguments": ""}
                item = {"id": new_id("mcpr"), "type": APPROVAL_REQUEST, **about}
            case "function_call" if told.name in self._servers:
                item = mcp_call(self._servers[told.name], told.name)
            case "function_call":
                item = self._own_call(told)
            case "reasoning":
                item = {"id": new_id("rs"), "type": kind, "summary": [], "content": []}
            case _:
                item = {"id": new_id("msg"), "type": kind, "role": "assistant", "content": []}
        self._kind = kind
        self._open, self._call, self._texts, self._logprobs = {**item, "status": "in_progress"}, told.call, [], []
        if item["type"] == APPROVAL_REQUEST:
            return
        self._tell("output_item.added", output_index=len(self.done), item=self._open)
        if item["type"] == "mcp_call":
            self._tell("mcp_call.in_progress", item_id=item["id"], output_index=len(self.done))
        if kind != "function_call":
            place = {"item_id": item["id"], "output_index": len(self.done), "content_index": 0}
            self._tell("content_part.added", **place, part=self._part(kind, ""))

    def close(self, status: str = "completed") -> None:
        """Completes the open item with the text so far, and sends its last events."""
        if self._open is None:
            return
        item, text, index = self._open, "".join(self._texts), len(self.done)
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            item = {**item, "arguments": text}
            self._tell("function_call_arguments.done", **place, name=item["name"], arguments=text)
        elif item["type"] == CUSTOM_CALL:
            del item["status"]
            item["input"] = input_of(text)
            self._tell("custom_tool_call_input.delta", **place, delta=item["input"])
            self._tell("custom_tool_call_input.done", **place, input=item["input"])
        elif item["type"] == "mcp_call":
            self._open = None
            self._close_call({**item, "arguments": text, "status": status}, place)
            return
        elif item["type"] == APPROVAL_REQUEST:
            self._open = None
            if status == "completed":  # an incomplete call must not be approved
                self._close_request({**item, "arguments": text})
            return
        else:
            part = self._part(item["type"], text)
            item = {**item, "content": [part]}
            place["content_index"] = 0
            if item["type"] == "reasoning":
                self._tell("reasoning_text.done", **place, text=text)
                if self._with_encrypted:
                    item["encrypted_content"] = as_encrypted(text)
            else:
                self._tell("output_text.done", **place, text=text, logprobs=self._logprobs)
            self._tell("content_part.done", **place, part=part)
        if item["type"] != CUSTOM_CALL:
            item["status"] = status
        self._tell("output_item.done", output_index=index, item=item)
        self.done.append(item)
        self._open = None

    def _own_call(self, told: AnswerPart) -> Item:
        """The item of a call of a client's tool, or of an unknown tool."""
        tool = self._tools.get(told.name)
        name = told.name if tool is None else tool.name
        within = {} if tool is None or tool.namespace is None else {"namespace": tool.namespace}
        about = {"call_id": call_id(told), "name": name, **within}
        if tool is not None and tool.is_custom:
            return {"id": new_id("ctc"), "type": CUSTOM_CALL, **about, "input": ""}
        return {"id": new_id("fc"), "type": "function_call", **about, "arguments": ""}

    def _close_call(self, item: Item, place: Item) -> None:
        index = len(self.done)
        self._tell("mcp_call_arguments.done", **place, arguments=item["arguments"])
        self.done.append(item)
        if item["status"] == "completed":  # a call that was cut off is not carried out
            item["status"] = "calling"
            self.calling.append((index, item))
        else:
            self._tell("output_item.done", output_index=index, item=item)

    def _close_request(self, item: Item) -> None:
        del item["status"]
        for step in ("added", "done"):
            self._tell(f"output_item.{step}", output_index=len(self.done), item=item)
        self.done.append(item)

    def _part(self, kind: str, text: str) -> Item:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}


def as_encrypted(text: str) -> str:
    """The text as `encrypted_content`: only base64, since the response shows the reasoning anyway."""
    return base64.b64encode(text.encode()).decode()


def with_encrypted(item: Item) -> Item:
    """A complete item, with `encrypted_content` if it is reasoning."""
    if item["type"] != "reasoning":
        return item
    return {**item, "encrypted_content": as_encrypted("".join(part["text"] for part in item["content"]))}


def from_encrypted(content: str) -> str:
    """The inverse of `as_encrypted`. Raises ValueError for text that this server did not write."""
    return base64.b64decode(content, validate=True).decode()


def input_of(arguments: str) -> str:
    """A custom tool's input, from the arguments of the model's call; the arguments themselves if they have none."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    text = found.get("input") if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments
