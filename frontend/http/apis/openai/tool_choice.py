"""Checks of a request's `tools`, and the meaning of its `tool_choice`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.frontend.http.server.decoding.decoder import closest
from headrace.frontend.http.server.errors import ApiError, bad_field
from headrace.frontend.text.formats.output_formats import NO_TOOLS, ToolChoice, Tools, wrong_tool
from headrace.frontend.text.formats.parameters import types_of

_OF_FUNCTIONS = ("name", "description", "parameters", "strict")
"""Known fields of a function; others are passed to the chat template, which may read them."""
NO_STRICT_CALLS = (
    "a tool has `strict`, and nothing can hold calls to its schema where the model decides whether to call, as this "
    "server reads none of this model's (its chat template speaks for no known format, or an option says so). Name one "
    "by --tool-call-parser, ask with `tool_choice` required or a function's name, or leave `strict` out"
)


def tool_choice_of(tools: Tools | None, choice: str | dict[str, Any] | None) -> ToolChoice:
    """Returns the tools that the model sees, and those it must call. Raises ApiError, which names the field."""
    choice = _in_openais_form(choice)
    if tools == []:
        raise bad_field("tools", "`tools` must not be an empty array: leave it out, or give those that may be called")
    check_tools(tools)
    if choice == "none" or (choice is None and tools is None):
        return NO_TOOLS
    if choice is None:
        return ToolChoice(tools)
    if tools is None:
        raise bad_field(
            "tool_choice",
            "When using `tool_choice`, `tools` must be set: give those that may be called, or leave it out",
        )
    if choice == "auto":
        return ToolChoice(tools)
    if choice == "required":
        return ToolChoice(tools, tools)
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(choice, dict) and kind == "function":
        named = _named(tools, [choice], "tool_choice")
        return ToolChoice(tools, named, is_named=True)
    if isinstance(choice, dict) and kind == "allowed_tools":
        allowed = choice.get("allowed_tools")
        if not isinstance(allowed, dict) or not isinstance(allowed.get("tools"), list) or not allowed["tools"]:
            raise bad_field("tool_choice.allowed_tools", "allowed_tools must be {mode: auto or required, tools: [...]}")
        some = _named(tools, allowed["tools"], "tool_choice.allowed_tools.tools")
        if allowed.get("mode") not in ("auto", "required"):
            raise bad_field("tool_choice.allowed_tools.mode", "allowed_tools.mode must be auto or required")
        return ToolChoice(some, some if allowed["mode"] == "required" else None)
    raise bad_field(
        "tool_choice",
        "tool_choice must be none, auto, required, {type: function, function: {name: ...}} or "
        "{type: allowed_tools, allowed_tools: {mode: ..., tools: [...]}}",
    )


def _in_openais_form(choice: Any) -> Any:
    """A choice as Mistral's, Anthropic's and the Responses API write it, in the form of chat completions."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind == "any":
        return "required"
    if not isinstance(choice, dict):
        return choice
    if kind in ("auto", "none", "required"):
        return kind
    if kind in ("function", "tool") and "name" in choice and "function" not in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def check_tools(tools: Tools | None) -> None:
    """Raises ApiError for a tool that is not a function with a unique name and a schema."""
    if (wrong := wrong_tool(tools or ())) is not None:
        raise bad_field(*wrong)
    for index, tool in enumerate(tools or ()):
        where = f"tools[{index}].function"
        for name in tool["function"].keys() - set(_OF_FUNCTIONS):
            if (known := closest(name, _OF_FUNCTIONS)) is not None:
                raise bad_field(where, f"unknown field {name!r} of {where}; did you mean {known}?")


def check_schemas(choice: ToolChoice) -> None:
    """Checks tools whose calls are constrained to their schemas. Raises ApiError unless parameters are an object."""
    for function in (tool["function"] for tool in choice.forced or choice.shown or ()):
        schema, named = function.get("parameters") or {}, f"the parameters of the tool {function['name'][:80]!r}"
        declared = schema.get("type") or "object"
        if "object" not in types_of({"type": declared}):
            raise bad_field("tools", f"{named} are of type {declared!r:.80}, and a call's arguments are an object")
        properties = schema.get("properties") or {}
        if not isinstance(properties, dict) or not all(isinstance(each, dict | bool) for each in properties.values()):
            raise bad_field("tools", f"{named}: properties must be an object of schemas by the properties' names")
        required = schema.get("required") or []
        if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
            raise bad_field("tools", f"{named}: required must be a list of properties' names")


def _named(tools: Tools, wanted: Sequence[Any], where: str) -> Tools:
    known, found = {tool["function"]["name"]: tool for tool in tools}, []
    for index, each in enumerate(wanted):
        function = each.get("function") if isinstance(each, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            at = where if where == "tool_choice" else f"{where}[{index}]"
            raise bad_field(
                f"{at}.function.name",
                f"{at} needs the name of a tool: give {{type: function, function: {{name: ...}}}}",
            )
        if name not in known:
            raise ApiError(
                400,
                f"{where} names the tool {str(name)[:80]!r}; tools has {', '.join(known)[:500]}",
                param=where,
                code="invalid_value",
            )
        found.append(known[name])
    return found
