"""Tools that the client runs. The model sees each as a function; calls are converted back to the client's form:

{type: function, name: F}                        F
{type: namespace, name: N, tools: [{name: F}]}   N__F; its calls have namespace N and name F
{type: custom, name: F}                          F with one text, `input`; its calls are custom_tool_call
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence

from headrace.frontend.http.apis.responses.items import ClientTool, Item
from headrace.frontend.http.server.errors import bad_field
from headrace.frontend.text.formats.output_formats import misnamed_schema

logger = logging.getLogger(__name__)
HOSTED = (
    *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11", "file_search"),
    *("image_generation", "code_interpreter", "computer", "computer_use_preview", "tool_search"),
    *("local_shell", "shell", "apply_patch", "programmatic_tool_calling"),
)
"""Types of tools that OpenAI runs, or that its models are trained to call."""
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


class LeftOut:
    """Handles HOSTED tools, which agents send to any server: the model does not see them, so it calls none."""

    def __init__(self, *, strict: bool) -> None:
        """strict: such tools are refused."""
        self._strict = strict
        self._logged: set[str] = set()

    def note(self, kind: str, where: str) -> None:
        """Logs a kind of tool once. Raises ApiError if strict."""
        if self._strict:
            raise bad_field(
                f"{where}.type", f"{where}: tools of type {kind!r} run on OpenAI's servers and are not supported"
            )
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning("tools of type %r run on OpenAI's servers and are left out of the prompt", kind)


def client_tools(tools: Sequence[Item], left_out: LeftOut) -> dict[str, ClientTool]:
    """The client's tools, by the names that the model sees. Raises ApiError, which names the tool."""
    found: dict[str, ClientTool] = {}
    for index, tool in enumerate(tools):
        for each in _of(tool, f"tools[{index}]", left_out):
            name = str(each.function["function"].get("name"))
            if name in found:
                raise bad_field("tools", f"two tools are called {name!r:.100}")
            found[name] = each
    return found


def _of(tool: Item, where: str, left_out: LeftOut) -> Iterator[ClientTool]:
    if tool.get("type") in ("function", "custom") and not isinstance(tool.get("name"), str):
        inner = "; it stands beside its type here, and not in function" if "function" in tool else ""
        raise bad_field(f"{where}.name", f"{where} needs a name{inner}")
    match tool.get("type"):
        case "function":
            if (misnamed := misnamed_schema(tool, where)) is not None:
                raise bad_field(*misnamed)
            yield ClientTool(_function(tool), str(tool.get("name")))
        case "custom":
            yield ClientTool(_custom(tool, where), str(tool.get("name")), is_custom=True)
        case "namespace":
            yield from _of_namespace(tool, where, left_out)
        case "mcp":
            pass  # this server runs it
        case str() as kind if kind in HOSTED:
            left_out.note(kind, where)
        case kind:
            raise bad_field(
                f"{where}.type",
                f"{where}: tools of type {str(kind)[:80]!r} are not known; there are function, custom, namespace and "
                "mcp, for servers that --tool-server names",
            )


def _of_namespace(tool: Item, where: str, left_out: LeftOut) -> Iterator[ClientTool]:
    name, inner = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not isinstance(inner, list):
        raise bad_field(where, f"{where} must have a name and tools")
    for index, each in enumerate(inner):
        at = f"{where}.tools[{index}]"
        if not isinstance(each, dict) or each.get("type") not in ("function", "custom"):
            raise bad_field(f"{at}.type", f"{at} must be of type function or custom")
        for own in _of(each, at, left_out):
            function = {**own.function["function"], "name": name_in(name, own.name)}
            yield own._replace(function={"type": "function", "function": function}, namespace=name)


def name_in(namespace: str | None, name: str) -> str:
    """The name that the model sees."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


def _function(tool: Item) -> Item:
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _custom(tool: Item, where: str) -> Item:
    form = tool.get("format") or {"type": "text"}
    about = tool.get("description") or ""
    if not isinstance(form, dict) or form.get("type") not in ("text", "grammar") or not isinstance(about, str):
        raise bad_field(f"{where}.format", f"{where}.format must be {{type: text}} or {{type: grammar, ...}}")
    if form["type"] == "grammar":
        about = f"{about}\nThe input is a text of this grammar ({form.get('syntax')}):\n{form.get('definition')}"
    return {"type": "function", "function": {"name": tool.get("name"), "description": about, "parameters": _INPUT}}


def arguments_of(input: str) -> str:
    """The arguments of a custom tool's call as the model writes them: the inverse of `items.input_of`."""
    return json.dumps({"input": input}, ensure_ascii=False)
