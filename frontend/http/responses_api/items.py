"""The items of a response while they grow, and the events that tell of them.

    reasoning, message or function_call:
      output_item.added, [content_part.added], deltas ..., done, [content_part.done], output_item.done

One state machine gives both: the items are what the events add up to.
"""

from __future__ import annotations

import base64
import types
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headrace.frontend.text.formats.message import call_id
from headrace.frontend.text.formats.parser import Event

Item = dict[str, Any]
NO_SERVERS: Mapping[str, str] = types.MappingProxyType({})


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class Tell(Protocol):
    def __call__(self, kind: str, **fields: Any) -> None:
        """Sends the event response.KIND."""
        ...


class OutputItems:
    """Feed it what a reader reads of the model's answer."""

    def __init__(self, tell: Tell, *, with_encrypted: bool = False, servers: Mapping[str, str] = NO_SERVERS) -> None:
        """with_encrypted: reasoning carries `encrypted_content`, for clients that send it back instead of its text.
        servers: labels of the MCP servers whose tools this server calls, by the tools' names."""
        self._tell, self._with_encrypted, self._servers = tell, with_encrypted, servers
        self.calling: list[tuple[int, Item]] = []
        """Calls of MCP tools that are to be carried out, with their places."""
        self.done: list[Item] = []
        self._open: Item | None = None
        self._kind = ""
        self._call = -1
        """Which of the answer's calls the open item is."""
        self._texts: list[str] = []
        self._logprobs: list[Any] = []

    def take(self, told: Event, logprobs: Sequence[Any] = ()) -> None:
        """logprobs: of the tokens that told it, where they were asked for."""
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
        if kind == "function_call":
            self._tell(f"{item['type']}_arguments.delta", **place, delta=text)
        elif kind == "reasoning":
            self._tell("reasoning_text.delta", **place, content_index=0, delta=text)
        else:
            self._logprobs += logprobs
            self._tell("output_text.delta", **place, content_index=0, delta=text, logprobs=logprobs)

    def add_listing(self, item: Item) -> None:
        """What tools an MCP server has."""
        index = len(self.done)
        self._tell("output_item.added", output_index=index, item={**item, "tools": []})
        for step in ("in_progress", "completed"):
            self._tell(f"mcp_list_tools.{step}", item_id=item["id"], output_index=index)
        self._tell("output_item.done", output_index=index, item=item)
        self.done.append(item)

    def called(self) -> None:
        """All of `calling` has been carried out."""
        for index, item in self.calling:
            item["status"] = "completed" if item["error"] is None else "failed"
            self._tell(f"mcp_call.{item['status']}", item_id=item["id"], output_index=index)
            self._tell("output_item.done", output_index=index, item=item)
        self.calling.clear()

    def finish(self, *, is_complete: bool) -> None:
        """The answer has ended; one without any text is an empty message."""
        self.close("completed" if is_complete else "incomplete")
        for index, item in self.calling:  # the answer was cut off after them
            item["status"] = "incomplete"
            self._tell("output_item.done", output_index=index, item=item)
        self.calling.clear()
        if is_complete and (not self.done or self.done[-1]["type"] == "reasoning"):
            self._begin("message", Event())
            self.close()

    def _begin(self, kind: str, told: Event) -> None:
        item: Item
        match kind:
            case "function_call" if told.name in self._servers:
                about: Item = {"server_label": self._servers[told.name], "name": told.name}
                about |= {"arguments": "", "output": None, "error": None}
                item = {"id": new_id("mcp"), "type": "mcp_call", **about}
            case "function_call":
                item = {"id": new_id("fc"), "type": kind, "call_id": call_id(told), "name": told.name, "arguments": ""}
            case "reasoning":
                item = {"id": new_id("rs"), "type": kind, "summary": [], "content": []}
            case _:
                item = {"id": new_id("msg"), "type": kind, "role": "assistant", "content": []}
        self._kind = kind
        self._open, self._call, self._texts, self._logprobs = {**item, "status": "in_progress"}, told.call, [], []
        self._tell("output_item.added", output_index=len(self.done), item=self._open)
        if item["type"] == "mcp_call":
            self._tell("mcp_call.in_progress", item_id=item["id"], output_index=len(self.done))
        if kind != "function_call":
            place = {"item_id": item["id"], "output_index": len(self.done), "content_index": 0}
            self._tell("content_part.added", **place, part=self._part(kind, ""))

    def close(self, status: str = "completed") -> None:
        """The open item is whole, as far as it comes."""
        if self._open is None:
            return
        item, text, index = self._open, "".join(self._texts), len(self.done)
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            item = {**item, "arguments": text}
            self._tell("function_call_arguments.done", **place, name=item["name"], arguments=text)
        elif item["type"] == "mcp_call":
            item = {**item, "arguments": text, "status": status}
            self._tell("mcp_call_arguments.done", **place, arguments=text)
            self._open = None
            self.done.append(item)
            if status == "completed":  # one that was cut off is not carried out
                item["status"] = "calling"
                self.calling.append((index, item))
            else:
                self._tell("output_item.done", output_index=index, item=item)
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
        item["status"] = status
        self._tell("output_item.done", output_index=index, item=item)
        self.done.append(item)
        self._open = None

    def _part(self, kind: str, text: str) -> Item:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs}


def as_encrypted(text: str) -> str:
    """OpenAI hides reasoning; here the answer has it in the clear, and this only carries it back."""
    return base64.b64encode(text.encode()).decode()


def from_encrypted(content: str) -> str:
    """Raises ValueError for what this server did not write."""
    return base64.b64decode(content, validate=True).decode()
