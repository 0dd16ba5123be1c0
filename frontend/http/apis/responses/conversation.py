"""Converts the items of a Responses request to a conversation of chat completions.

`stored_form` brings items into the form in which they are stored and listed; `as_chat` makes messages of them.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from headrace.frontend.http.apis.openai.requests import (
    ChatCompletionRequest,
    ChatMessage,
    Effort,
    Verbosity,
    one_of,
)
from headrace.frontend.http.apis.responses.client_tools import arguments_of, name_in
from headrace.frontend.http.apis.responses.items import (
    APPROVAL_REQUEST,
    APPROVAL_RESPONSE,
    CUSTOM_CALL,
    Item,
    from_encrypted,
    mcp_call,
    new_id,
)
from headrace.frontend.http.apis.responses.requests import ResponsesRequest
from headrace.frontend.http.server.errors import ApiError, bad_field, text_in
from headrace.frontend.http.server.tool_results import readable

LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
INCLUDABLE = (
    LOGPROBS,
    ENCRYPTED,
    # For tools that are not run here, so responses have none of these.
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_SAME_NAMES = tuple(
    name
    for name in ResponsesRequest.__struct_fields__
    if name in ChatCompletionRequest.__struct_fields__
    and name not in ("stream", "stream_options", "tools", "tool_choice", "top_logprobs", "metadata", "store", "user")
)
_OUTPUTS: Mapping[str, str] = types.MappingProxyType(
    {"function_call_output": "function call output", "custom_tool_call_output": "custom tool call output"}
)
"""Outputs of calls that the client carries out, and their names in OpenAI's messages."""
_TRAINED_CALLS: Mapping[str, tuple[str, str]] = types.MappingProxyType(
    {
        "local_shell_call": ("local_shell", "action"),
        "shell_call": ("shell", "action"),
        "apply_patch_call": ("apply_patch", "operation"),
    }
)
"""Calls of tools that OpenAI's models are trained to call and clients run: the tool, and the field with the arguments.
A conversation that another model began has them; here they are calls of functions."""
_TRAINED_OUTPUTS = tuple(f"{name}_output" for name in _TRAINED_CALLS)
_HOSTED_CALLS = ("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call")
"""Items that say what OpenAI's servers did for an answer, which follows. Models read the answer alone."""
REFERENCE = "item_reference"
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def referred(given: str | list[Item]) -> list[str]:
    """The ids of stored items that the input refers to."""
    if isinstance(given, str):
        return []
    return [item["id"] for item in given if _is_reference(item) and isinstance(item.get("id"), str)]


def _is_reference(item: Item) -> bool:
    """The type may be left out: nothing else has an id alone."""
    return item.get("type") == REFERENCE or [name for name in item if item[name] is not None] == ["id"]


def stored_form(given: str | Sequence[Any], known: Mapping[str, Item], earlier: Sequence[Item] = ()) -> list[Item]:
    """The items with ids, and with content as lists of parts. Raises ApiError, which names the item.

    known: the stored items that the input refers to, by their ids. earlier: the conversation before the input; what it
    has is not repeated."""
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": given}]
    items: list[Item] = []
    there = {item["id"] for item in earlier}
    for index, item in enumerate(given):
        where = f"input[{index}]"
        if item.get("type") in _HOSTED_CALLS:
            continue
        if not _is_reference(item):
            items.append(_stored_item(item, where))
        elif (id := text_in(item, "id", where)) not in known:
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"Item with id {id!r:.200} not found. Items are not persisted when `store` is set to false, and the "
                "oldest make room for others: send the item itself.",
                param=where,
            )
        elif id in there:
            continue
        else:
            items.append(known[id])
        there.add(items[-1]["id"])
    return items


def _stored_item(item: Any, where: str) -> Item:
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "message":
        return _stored_message(item, where)
    if kind == "function_call":
        call = {name: text_in(item, name, where) for name in ("call_id", "name", "arguments")}
        return {"type": kind, "id": item.get("id") or new_id("fc"), **call, **_namespace(item), "status": "completed"}
    if kind in _TRAINED_CALLS:
        name, field = _TRAINED_CALLS[str(kind)]
        call = {"type": "function_call", "name": name, "arguments": _as_json(item.get(field))}
        return _stored_item({**call, "id": item.get("id"), "call_id": item.get("call_id")}, where)
    if kind in _TRAINED_OUTPUTS:
        said = item.get("output", item.get("status"))
        own = {"id": item.get("id"), "call_id": item.get("call_id") or item.get("id")}
        text = said if isinstance(said, str) else _as_json(said)
        return _stored_item({"type": "function_call_output", **own, "output": text}, where)
    if kind == CUSTOM_CALL:
        call = {name: text_in(item, name, where) for name in ("call_id", "name", "input")}
        return {"type": kind, "id": item.get("id") or new_id("ctc"), **call, **_namespace(item)}
    if kind in _OUTPUTS:
        output = item.get("output")
        if not isinstance(output, str):
            output = [
                _part(readable(part), "input_text", f"{where}.output") for part in _parts(output, f"{where}.output")
            ]
        prefix = "fco" if kind == "function_call_output" else "ctco"
        own = {"id": item.get("id") or new_id(prefix), "call_id": text_in(item, "call_id", where)}
        return {"type": kind, **own, "output": output, "status": "completed"}
    if kind == "reasoning":
        own = {"id": item.get("id") or new_id("rs"), "summary": item.get("summary") or []}
        return {"type": kind, **own, "content": [{"type": "reasoning_text", "text": _reasoning(item, where)}]}
    if kind == "mcp_call":
        call = {name: text_in(item, name, where) for name in ("server_label", "name", "arguments")}
        rest = {name: item.get(name) for name in ("approval_request_id", "output", "error")}
        return {"type": kind, "id": item.get("id") or new_id("mcp"), **call, **rest, "status": "completed"}
    if kind == APPROVAL_REQUEST:
        return {
            "type": kind,
            **{name: text_in(item, name, where) for name in ("id", "server_label", "name", "arguments")},
        }
    if kind == APPROVAL_RESPONSE:
        if not isinstance(item.get("approve"), bool):
            raise bad_field(f"{where}.approve", f"{where}.approve must be true or false")
        answer = {"approve": item["approve"], "reason": item.get("reason") and text_in(item, "reason", where)}
        own = {"id": item.get("id") or new_id("mcprr")}
        return {"type": kind, **own, "approval_request_id": text_in(item, "approval_request_id", where), **answer}
    if kind == "mcp_list_tools":  # the server lists the tools again
        known = {"id": item.get("id") or new_id("mcpl"), "server_label": text_in(item, "server_label", where)}
        return {"type": kind, **known, "tools": item.get("tools") or []}
    raise bad_field(
        f"{where}.type",
        f"{where}: items of type {str(kind)[:80]!r} are not supported; there are message, function_call, "
        "function_call_output, custom_tool_call, custom_tool_call_output, reasoning, mcp_call, mcp_approval_request, "
        "mcp_approval_response and item_reference",
    )


def _as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _namespace(item: Item) -> Item:
    name = item.get("namespace")
    return {"namespace": name} if isinstance(name, str) else {}


def _stored_message(item: Item, where: str) -> Item:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise bad_field(f"{where}.role", f"{where}.role must be user, assistant, system or developer")
    kind = "output_text" if role == "assistant" else "input_text"
    content = item.get("content")
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    where = f"{where}.content"
    parts = [_part(part, kind, f"{where}[{index}]") for index, part in enumerate(_parts(content, where))]
    own = {"id": item.get("id") or new_id("msg"), "role": role, "content": parts}
    return {"type": "message", **own, "status": "completed"}


def _parts(content: Any, where: str) -> list[Any]:
    if not isinstance(content, list):
        raise bad_field(where, f"{where} must be a text or a list of parts")
    return content


def _part(part: Any, kind: str, where: str) -> Item:
    if isinstance(part, dict) and part.get("type") == "refusal":
        return {"type": "refusal", "refusal": text_in(part, "refusal", where)}
    if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS:
        named = part.get("type") if isinstance(part, dict) else part
        raise bad_field(where, f"{where}: a part of type {str(named)[:80]!r} is not supported: models read text alone")
    more: Item = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": text_in(part, "text", where), **more}


def _reasoning(item: Item, where: str) -> str:
    """A reasoning item's text; empty for one that another server has encrypted, which cannot be read."""
    if item.get("content"):
        parts = _parts(item["content"], f"{where}.content")
        return "".join(_part(part, "input_text", f"{where}.content")["text"] for part in parts)
    if item.get("encrypted_content"):
        content = text_in(item, "encrypted_content", where)
        with contextlib.suppress(ValueError):
            return from_encrypted(content)
    return ""


def check_outputs_have_calls(asked: Sequence[Item], items: Sequence[Item]) -> None:
    """Raises ApiError, in OpenAI's words, for a tool output without its call in the conversation: models need both.

    asked: the request's input, which is the end of `items`, the conversation."""
    calls = {item["call_id"] for item in items if item["type"] in ("function_call", CUSTOM_CALL)}
    for item in asked:
        if item["type"] in _OUTPUTS and item["call_id"] not in calls:
            raise bad_field(
                "input",
                f"No tool call found for {_OUTPUTS[item['type']]} with call_id {item['call_id'][:200]}. Send the call "
                "before it, or name the response that made it as previous_response_id.",
            )


def approved_calls(asked: Sequence[Item], items: Sequence[Item], labels: Mapping[str, str]) -> list[Item]:
    """The calls that a request approves. Raises ApiError, which names the item.

    asked: the request's input, which is the end of `items`, the conversation. labels: by the name of each MCP tool, its
    server's label."""
    requests = {item["id"]: item for item in items if item["type"] == APPROVAL_REQUEST}
    answered = {item["approval_request_id"] for item in items if item["type"] == "mcp_call"}
    calls = []
    for index, item in enumerate(asked):
        if item["type"] != APPROVAL_RESPONSE:
            continue
        where, id = f"input[{index}].approval_request_id", item["approval_request_id"]
        if (request := requests.get(id)) is None:
            raise bad_field(
                where,
                f"{where}: no approval request has the id {id!r:.100}; name the response that asked as "
                "previous_response_id, or send its items",
            )
        if not item["approve"] or id in answered:
            continue
        if labels.get(request["name"]) != request["server_label"]:
            what = f"{request['name']!r:.100} of {request['server_label']!r:.100}"
            raise bad_field(where, f"{where} approves of a call of {what}, which is not among this request's tools")
        answered.add(id)
        calls.append(mcp_call(request["server_label"], request["name"], request["arguments"], approval_request_id=id))
    return calls


# --- messages ---------------------------------------------------------------------------------------------------------


def as_chat(request: ResponsesRequest, items: Sequence[Item], tools: list[Item] | None) -> ChatCompletionRequest:
    """The request as a chat completion. Raises ApiError, which names the field."""
    messages = _joined_systems(_messages(items), request.instructions)
    same = {name: getattr(request, name) for name in _SAME_NAMES}
    with_logprobs = LOGPROBS in (request.include or ()) or bool(request.top_logprobs)
    return ChatCompletionRequest(
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        tools=tools or None,
        # A response without tools has the choice "auto" in OpenAI's own answers, which come back as requests.
        tool_choice=_choice(request.tool_choice) if tools or request.tool_choice not in ("auto", "none") else None,
        reasoning_effort=one_of(Effort, "reasoning.effort", (request.reasoning or {}).get("effort")),
        verbosity=one_of(Verbosity, "text.verbosity", (request.text or {}).get("verbosity")),
        response_format=_response_format(request.text),
        logprobs=with_logprobs or None,
        top_logprobs=request.top_logprobs if with_logprobs else None,
        # Log-probabilities are sent with the text that they belong to, so output is read as it grows.
        stream=True if request.stream or with_logprobs else None,
        **same,
    )


def _messages(items: Sequence[Item]) -> list[ChatMessage]:
    """Converts items to messages. An assistant's reasoning, text and calls in a row become one message."""
    messages: list[ChatMessage] = []
    requests = {item["id"]: item for item in items if item["type"] == APPROVAL_REQUEST}
    for item in items:
        match item["type"]:
            case "message" if item["role"] == "assistant":
                mine = _open_message(messages)
                mine.content = (str(mine.content) if mine.content else "") + _joined(item["content"])
            case "message":
                role = "system" if item["role"] == "developer" else item["role"]
                messages.append(ChatMessage(role=role, content=_joined(item["content"])))
            case "reasoning":
                mine = _open_message(messages, is_new=True)
                mine.reasoning_content = _joined(item["content"]) or None
            case "function_call":
                _add_call(messages, item["call_id"], item)
            case "custom_tool_call":
                _add_call(messages, item["call_id"], {**item, "arguments": arguments_of(item["input"])})
            case "function_call_output" | "custom_tool_call_output":
                output = item["output"]
                text = output if isinstance(output, str) else _joined(output)
                messages.append(ChatMessage(role="tool", content=text, tool_call_id=item["call_id"]))
            case "mcp_call":
                _add_call(messages, item["id"], item)
                text = item["output"] if item["output"] is not None else f"error: {_said_of(item['error'])}"
                messages.append(ChatMessage(role="tool", content=text, tool_call_id=item["id"]))
            case "mcp_approval_response" if not item["approve"]:  # an approved call is an mcp_call
                if (request := requests.get(item["approval_request_id"])) is not None:  # else truncation dropped it
                    _add_call(messages, request["id"], request)
                    why = "the user did not approve of this call" + (f": {item['reason']}" if item["reason"] else "")
                    messages.append(ChatMessage(role="tool", content=why, tool_call_id=request["id"]))
    return [each for each in messages if each.content is not None or each.tool_calls or each.reasoning_content]


def _said_of(error: Any) -> str:
    """The text of an mcp_call's error."""
    content = error.get("content") if isinstance(error, dict) else None
    if isinstance(content, list):
        return _joined([part for part in content if isinstance(part, dict)])
    return error if isinstance(error, str) else _as_json(error)


def _open_message(messages: list[ChatMessage], *, is_new: bool = False) -> ChatMessage:
    """The last message if it is the assistant's, else (or if is_new) a new one, which is appended."""
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant" or is_new:
        last = ChatMessage(role="assistant")
        messages.append(last)
    return last


def _add_call(messages: list[ChatMessage], id: str, item: Item) -> None:
    mine = _open_message(messages)
    function = {"name": name_in(item.get("namespace"), item["name"]), "arguments": item["arguments"]}
    mine.tool_calls = [*(mine.tool_calls or ()), {"id": id, "type": "function", "function": function}]


def _joined(parts: Sequence[Item]) -> str:
    return "".join(part.get("text") or part.get("refusal") or "" for part in parts)


def _joined_systems(messages: list[ChatMessage], instructions: str | None) -> list[ChatMessage]:
    """Joins system messages at the beginning into one: templates accept only one, at the beginning."""
    begin = 0
    while begin < len(messages) and messages[begin].role == "system":
        begin += 1
    texts = [instructions] if instructions else []
    texts += [str(each.content) for each in messages[:begin]]
    system = [ChatMessage(role="system", content="\n\n".join(texts))] if texts else []
    return system + messages[begin:]


def turns_to_drop(items: Sequence[Item]) -> list[int]:
    """Places at which a conversation may begin when its oldest turns are dropped: user messages but the first."""
    starts = [place for place, item in enumerate(items) if item["type"] == "message" and item["role"] == "user"]
    return starts[1:]


def without_oldest(items: Sequence[Item], start: int) -> list[Item]:
    """The items from `start` on, and all system messages before."""
    kept = [item for item in items[:start] if item["type"] == "message" and item["role"] in ("system", "developer")]
    return kept + list(items[start:])


# --- options ----------------------------------------------------------------------------------------------------------


def _choice(choice: str | Item | None, where: str = "tool_choice") -> str | Item | None:
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind in ("auto", "none", "required"):
        return str(kind)
    if kind == "function" and isinstance(choice.get("function"), dict):  # as in chat completions
        choice = {**choice, **choice["function"]}
    if kind in ("function", "custom"):
        if not isinstance(choice.get("name"), str):
            raise bad_field(f"{where}.name", f"{where} needs the name of a tool: give {{type: {kind}, name: ...}}")
        return {"type": "function", "function": {"name": choice["name"]}}
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list) and choice["tools"]:
        tools = [
            _choice(each, f"{where}.tools[{index}]") if isinstance(each, dict) else each
            for index, each in enumerate(choice["tools"])
        ]
        if choice.get("mode") not in ("auto", "required"):
            raise bad_field(f"{where}.mode", f"{where}.mode must be auto or required")
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    raise bad_field(
        where,
        f"{where} must be none, auto, required, {{type: function, name: ...}} or {{type: allowed_tools, mode: ..., "
        "tools: [...]}, with one tool at least",
    )


def _response_format(text: Item | None) -> Item | None:
    """text.format as the response_format of chat completions. Raises ApiError."""
    if text is None:
        return None
    form = text.get("format")
    if form is None or (isinstance(form, dict) and form.get("type") == "text"):
        return None
    if isinstance(form, dict) and form.get("type") == "json_object":
        return {"type": "json_object"}
    if isinstance(form, dict) and form.get("type") == "json_schema" and isinstance(form.get("schema"), dict):
        named = {name: form[name] for name in ("name", "schema", "strict", "description") if form.get(name) is not None}
        return {"type": "json_schema", "json_schema": {"name": "answer", **named}}
    raise bad_field(
        "text.format", "text.format must be {type: text}, {type: json_object} or {type: json_schema, name, schema}"
    )


def check_include(include: Sequence[str] | None) -> None:
    for index, each in enumerate(include or ()):
        if each not in INCLUDABLE:
            known = ", ".join(INCLUDABLE)
            raise bad_field(f"include[{index}]", f"include[{index}] is {each[:80]!r}; known: {known}")


def size_of(request: ResponsesRequest, items: Sequence[Item], tools: Sequence[Item] | None) -> int:
    """Approximate bytes of a conversation and of the rest of its request: a measure of the work to process it."""
    rest = msgspec.structs.replace(request, input="", tools=None)
    return len(msgspec.json.encode((items, tools, rest)))
