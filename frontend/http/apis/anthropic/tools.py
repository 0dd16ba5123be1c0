"""The tools that a conversation of Anthropic's API offers at its end.

    declared in `tools`                                 offered, unless defer_loading (and others are not deferred)
    tool_result: [{type: tool_reference, tool_name}]    a deferred tool was found: offered from here on
    system: [{type: tool_addition, tool}]               offered from here on; `tool` may be a definition
    system: [{type: tool_removal, tool}]                not offered from here on

The model is shown those that are offered at the end. Chat templates have them at the beginning of the prompt, so those
that were added come behind the others: the cached prefix is as long as it can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from headrace.frontend.http.server.errors import ApiError, bad_field

UNRESOLVED = "tool_reference_unresolved"
"""Anthropic's code of an error: a tool is named that nothing has defined."""
T = TypeVar("T")


class OfferedTools(Generic[T]):
    """T: the form of a tool."""

    def __init__(self, define: Callable[[Any, str], tuple[str, T]]) -> None:
        """define: a definition's name and tool, from its JSON and its place in the body. Raises ApiError."""
        self._define = define
        self._tools: dict[str, T] = {}
        self._offered: dict[str, None] = {}
        """Names, in the order in which they were offered."""

    def declare(self, name: str, tool: T, *, is_offered: bool) -> None:
        """Of the body's `tools`. Raises ApiError for a name that another has."""
        if name in self._tools:
            raise bad_field("tools", f"two tools are called {name!r:.100}")
        self._tools[name] = tool
        if is_offered:
            self._offered[name] = None

    def refer(self, name: str, where: str) -> None:
        """Of a tool_reference in a tool's result. Raises ApiError."""
        self._set(name, where, is_offered=True)

    def change(self, block: dict[str, Any], where: str) -> None:
        """Of a tool_addition or tool_removal. Raises ApiError, which names the field."""
        is_addition = block.get("type") == "tool_addition"
        tool: dict[str, Any] = block["tool"] if isinstance(block.get("tool"), dict) else {}
        match tool.get("type"):
            case "tool_reference" if isinstance(tool.get("name"), str):
                self._set(tool["name"], f"{where}.tool", is_offered=is_addition)
            case "tool_definition" if is_addition:
                name, defined = self._define(tool.get("definition"), f"{where}.tool.definition")
                self._tools[name] = defined
                self._offered[name] = None
            case _:
                more = " or {type: tool_definition, definition: ...}" if is_addition else ""
                raise bad_field(f"{where}.tool", f"{where}.tool must be {{type: tool_reference, name: ...}}{more}")

    def at_end(self, also: Iterable[str] = ()) -> list[T]:
        """also: names of further tools to offer: those that tool_choice demands."""
        demanded = [name for name in also if name in self._tools]
        return [self._tools[name] for name in dict.fromkeys((*self._offered, *demanded))]

    def _set(self, name: str, where: str, *, is_offered: bool) -> None:
        if name not in self._tools:
            raise ApiError(
                400,
                f"{where} names the tool {name!r:.100}, which is not defined before: give it in tools",
                param=where,
                code=UNRESOLVED,
            )
        if is_offered:
            self._offered[name] = None
        else:
            self._offered.pop(name, None)
