"""POST /v1/messages: Anthropic's API, served by the code of chat completions.

A request is converted to a chat completion (`as_chat`); answer.py writes the answer.
"""

from __future__ import annotations

import functools
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.anthropic.answer import SIGNATURE, UNSUPPORTED_THREAD, MessagesAnswer
from headrace.frontend.http.apis.anthropic.known_tools import known_tool
from headrace.frontend.http.apis.anthropic.tools import OfferedTools
from headrace.frontend.http.apis.openai.chat import ChatParts, prepare_chat
from headrace.frontend.http.apis.openai.requests import (
    NEUTRAL,
    ChatCompletionRequest,
    ChatMessage,
    Documents,
    Effort,
    Few,
    Many,
    SharedFields,
    SpecialTokens,
    Template,
    TemplateVariables,
    one_of,
)
from headrace.frontend.http.apis.responses.items import from_encrypted
from headrace.frontend.http.server.decoding.foreign_fields import ANY, Neutral
from headrace.frontend.http.server.errors import bad_field, text_in
from headrace.frontend.http.server.generation import PreparedRequest, prepared_as
from headrace.frontend.http.server.tool_results import readable
from headrace.frontend.request.parameters.structured_outputs import RETIRED
from headrace.frontend.text.instructions import ROLES as INSTRUCTING
from headrace.ipc.struct_types import threadsafe

_THINKING = ("enabled", "adaptive", "between_tools", "disabled")
_OWN_NAMES: Mapping[str, str] = types.MappingProxyType(
    {
        "stop": "stop_sequences",
        "max_completion_tokens": "max_tokens",
        "reasoning_effort": "output_config.effort",
        "response_format": "output_config.format",
    }
)
"""Anthropic's names of chat completions' fields."""


class InputMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[
        str | Many[dict[str, Any]] | None, Meta(description="A text, or blocks; a system message may have none")
    ] = None
    clear_at: Annotated[
        Literal["next_user_message", "never"] | None,
        Meta(description="next_user_message: a system message is left out once a user message follows"),
    ] = None
    output_config: Annotated[
        dict[str, Any] | None, Meta(description="{effort: ...} of a system message, for the turn that it stands in")
    ] = None


class MessagesTool(msgspec.Struct, kw_only=True):
    """Anthropic's other fields of tools (cache_control, eager_input_streaming) are accepted and ignored: prefixes are
    cached, and calls are streamed as they are generated."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    input_examples: Few[dict[str, Any]] | None = None
    allowed_callers: Few[str] | None = None
    type: str | None = None
    defer_loading: bool | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens"""

    messages: Many[InputMessage]
    model: str | None = None
    system: Annotated[str | Many[dict[str, Any]] | None, Meta(description="System prompt, before the messages")] = None
    tools: Few[MessagesTool] | None = None
    tool_choice: Annotated[dict[str, Any] | None, Meta(description="{type: auto, any, none or tool, name}")] = None
    thinking: Annotated[
        dict[str, Any] | None,
        Meta(description="{type: enabled, budget_tokens: ...}, adaptive, between_tools or disabled; display: omitted"),
    ] = None
    output_config: Annotated[
        dict[str, Any] | None, Meta(description="{effort: ..., format: {type: json_schema, schema: ...}}")
    ] = None
    # Fields of chat completions that change the prompt.
    chat_template: Template = None
    chat_template_kwargs: TemplateVariables = None
    documents: Documents = None
    add_special_tokens: SpecialTokens = None


class MessagesFields(CountTokensRequest, kw_only=True):
    """Anthropic's further fields of POST /v1/messages."""

    max_tokens: Annotated[int, Meta(description="Maximum number of tokens to generate")]
    stop_sequences: Few[str] | None = None
    metadata: Annotated[dict[str, Any] | None, Meta(description="Accepted without effect")] = None
    service_tier: Annotated[str | None, Meta(description="Accepted without effect: there is one service tier")] = None


_HAS_OWN_FORM = frozenset(
    {
        *("messages", "max_completion_tokens", "max_tokens", "stop", "tools", "tool_choice", "parallel_tool_calls"),
        *("add_generation_prompt", "continue_final_message", "enable_thinking", "reasoning_effort", "thinking_budget"),
        *("response_format", *RETIRED, "guided_decoding_backend", "thinking_token_budget", "verbosity"),
        # What an answer in Anthropic's form has no place for.
        *("n", "use_beam_search", "length_penalty", "logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids"),
        *("echo", "stream_options", "include_reasoning", "return_token_ids", "return_tokens_as_token_ids"),
        "return_prompt_text",
    }
)
"""Fields of chat completions that Anthropic's API has in another form, or not at all. It takes the others as well."""
_OF_PROMPT = ("chat_template", "chat_template_kwargs", "documents", "add_special_tokens")
_HINTS = typing.get_type_hints(ChatCompletionRequest, include_extras=True)
PASSED_ON = tuple(
    name
    for name in ChatCompletionRequest.__struct_fields__
    if name not in _HAS_OWN_FORM and name not in MessagesFields.__struct_fields__
)
"""Fields that chat completions declare, and that have the same meaning here."""

if TYPE_CHECKING:

    class MessagesRequest(MessagesFields, SharedFields):
        pass
else:
    MessagesRequest = msgspec.defstruct(
        "MessagesRequest",
        [(name, _HINTS[name], None) for name in PASSED_ON],
        bases=(MessagesFields,),
        module=__name__,
        kw_only=True,
        forbid_unknown_fields=True,
    )
    """POST /v1/messages"""

_HERE_ALONE = "requests are answered by this server alone"
NOT_SUPPORTED: Mapping[str, Neutral] = types.MappingProxyType(
    {
        **NEUTRAL,
        "cache_control": Neutral("equal prefixes are cached without being asked to", is_harmless=True),
        # Claude Code always sends it. An edit would only save tokens: an unedited conversation is read as it is.
        "context_management": Neutral("conversations are read as they stand", is_harmless=True),
        "diagnostics": Neutral("there are none", is_harmless=True),
        "inference_geo": Neutral(_HERE_ALONE, is_harmless=True),
        "speed": Neutral("there is one speed", ("standard",), is_harmless=True),
        "user_profile_id": Neutral("nothing depends on it", (ANY,)),
        "workspace_id": Neutral("nothing depends on it", (ANY,)),
        "billing_policy": Neutral("nothing is billed", is_harmless=True),
        "fallback_credit_token": Neutral(_HERE_ALONE, is_harmless=True),
        "compaction": Neutral("conversations are read as they stand"),
        "container": Neutral("tools are run by the client"),
        "fallbacks": Neutral(_HERE_ALONE, ([],)),
        "instructions": Neutral("messages have system", ("",)),
        "mcp_servers": Neutral("tools are run by the client", ([],)),
        "output_format": Neutral("retired by Anthropic; use output_config.format"),
        "thread": Neutral("conversations are not kept; send all of it", code=UNSUPPORTED_THREAD),
    }
)


def as_chat(request: CountTokensRequest) -> ChatCompletionRequest:
    """The same request as a chat completion. Raises ApiError, which names the field."""
    messages: list[ChatMessage] = []
    if request.system:
        messages.append(ChatMessage(role="system", content=_texts(request.system, "system")))
    offered = OfferedTools(_defined_tool)
    # If all are deferred, there is none that could find another.
    defers = not all(tool.defer_loading for tool in request.tools or ())
    for index, tool in enumerate(request.tools or ()):
        is_offered = not (tool.defer_loading and defers)
        offered.declare(tool.name, _tool_of(tool, f"tools[{index}]"), is_offered=is_offered)
    last_user = max((index for index, each in enumerate(request.messages) if each.role == "user"), default=-1)
    for index, message in enumerate(request.messages):
        read = _messages_of(message, f"messages[{index}]", offered)
        if message.clear_at != "next_user_message" or index > last_user:
            messages += read
    choice, several = _choice_of(request.tool_choice)
    tools = offered.at_end([choice["function"]["name"]] if isinstance(choice, dict) else ())
    thinking = thinking_of(request)
    effort, form = _output_config_of(request.output_config)
    effort = _effort_of_turn(request.messages) or effort
    more = {name: getattr(request, name) for name in _OF_PROMPT}
    if isinstance(request, MessagesRequest):
        more |= {name: getattr(request, name) for name in PASSED_ON}
        more |= {"max_completion_tokens": request.max_tokens, "stop": request.stop_sequences}
    continues = bool(request.messages) and request.messages[-1].role == "assistant"
    return ChatCompletionRequest(
        model=request.model,
        messages=messages,
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=several,
        continue_final_message=continues or None,
        enable_thinking=thinking.is_enabled,
        thinking_budget=thinking.budget_tokens,
        reasoning_effort=effort,
        response_format=form,
        **more,
    )


_SERVERS_CALLS = ("server_tool_use", "mcp_tool_use")


def _messages_of(message: InputMessage, where: str, offered: OfferedTools[dict[str, Any]]) -> list[ChatMessage]:
    """Converts a message's blocks. Tool results become separate messages, before the user's text."""
    _check_message(message, where)
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    results, thoughts, calls = [], [], []
    texts: list[str | dict[str, Any]] = []
    for index, block in enumerate(message.content or ()):
        at = f"{where}.content[{index}]"
        match block.get("type"):
            case "tool_result":
                text = _result_text(block.get("content"), f"{at}.content", offered)
                results.append(ChatMessage(role="tool", content=text, tool_call_id=text_in(block, "tool_use_id", at)))
            case "tool_use":
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                function = {"name": text_in(block, "name", at), "arguments": arguments}
                calls.append({"id": text_in(block, "id", at), "type": "function", "function": function})
            case "thinking":
                thoughts.append(text_in(block, "thinking", at) or _omitted(block, at))
            case "redacted_thinking":
                pass  # encrypted by its writer, so it cannot be read here
            case "tool_addition" | "tool_removal":
                offered.change(block, at)
            case str() as kind if kind in _SERVERS_CALLS or kind.endswith("_tool_result"):
                pass  # what Anthropic's servers did for the text that follows
            case _:
                texts.append({"type": "text", "text": _text_of(block, at)})
    if not (texts or thoughts or calls):
        return results
    return [
        *results,
        ChatMessage(
            role=message.role,
            content=texts or None,
            tool_calls=calls or None,
            reasoning_content="".join(thoughts) or None,
        ),
    ]


def _check_message(message: InputMessage, where: str) -> None:
    """Raises ApiError for fields that the message's role does not have, or for no content."""
    instructs = message.role in INSTRUCTING
    for name in ("clear_at", "output_config"):
        if getattr(message, name) is not None and not instructs:
            raise bad_field(f"{where}.{name}", f"{where}.{name} is a field of messages with the role system")
    if message.content is None and not (instructs and message.output_config):
        raise bad_field(f"{where}.content", f"{where}.content is required", "missing_required_parameter")


def _effort_of_turn(messages: Sequence[InputMessage]) -> Effort | None:
    """The effort that a system message asks for in the last turn, which begins at the user's last words."""
    effort: Effort | None = None
    for index, message in enumerate(messages):
        if message.role == "user" and not _gives_results_alone(message):
            effort = None
        config = message.output_config or {}
        effort = one_of(Effort, f"messages[{index}].output_config.effort", config.get("effort")) or effort
    return effort


def _gives_results_alone(message: InputMessage) -> bool:
    return isinstance(message.content, list) and all(block.get("type") == "tool_result" for block in message.content)


def _result_text(content: Any, where: str, offered: OfferedTools[dict[str, Any]]) -> str:
    """What a tool gave. A tool that it found is offered from here on, and named."""
    if not isinstance(content, list):
        return "" if content is None else _texts(content, where)
    blocks: list[Any] = []
    for index, block in enumerate(content):
        if isinstance(block, dict) and block.get("type") == "tool_reference":
            at = f"{where}[{index}]"
            name = text_in(block, "tool_name", at)
            offered.refer(name, f"{at}.tool_name")
            block = {"type": "text", "text": f"The tool {name} can be called now."}
        blocks.append(readable(block))
    return _texts(blocks, where)


def _omitted(block: dict[str, Any], where: str) -> str:
    """The thinking that an answer omitted, decoded from the signature that the client sends back; empty for other
    servers' signatures, which cannot be read. Raises ApiError for a damaged one."""
    signature = block.get("signature")
    if not isinstance(signature, str) or not signature.startswith(SIGNATURE):
        return ""
    try:
        return from_encrypted(signature.removeprefix(SIGNATURE))
    except ValueError:
        raise bad_field(f"{where}.signature", f"{where}.signature is not as this server wrote it") from None


def _texts(content: Any, where: str, *, are_inner: bool = False) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_field(where, f"{where} must be a text or a list of {{type: text, text: ...}}")
    return "\n".join(_text_of(each, f"{where}[{index}]", is_inner=are_inner) for index, each in enumerate(content))


def _text_of(block: Any, where: str, *, is_inner: bool = False) -> str:
    """What the model reads of a block: a text, or a document or search result of texts. Raises ApiError. is_inner: it
    is in one of those, which do not nest."""
    if not isinstance(block, dict):
        raise bad_field(where, f"{where} must be {{type: text, text: ...}}")
    match kind := block.get("type"), block.get("source"):
        case "text", _:
            return text_in(block, "text", where)
        case "document", {"type": "text", "data": str() as text} if not is_inner:
            parts = [block.get("title"), block.get("context"), text]
        case "document", {"type": "content", "content": content} if not is_inner:
            text = _texts(content, f"{where}.source.content", are_inner=True)
            parts = [block.get("title"), block.get("context"), text]
        case "search_result", source if not is_inner:
            parts = [block.get("title"), source, _texts(block.get("content"), f"{where}.content", are_inner=True)]
        case _:
            raise bad_field(
                where, f"{where}: content of type {str(kind)[:80]!r} is not supported: the model reads text"
            )
    return "\n".join(part for part in parts if isinstance(part, str) and part)


def _defined_tool(definition: Any, where: str) -> tuple[str, dict[str, Any]]:
    """The name and the tool of a definition within the conversation. Raises ApiError."""
    try:
        tool = msgspec.convert(definition, threadsafe(MessagesTool))
    except msgspec.ValidationError as error:
        raise bad_field(where, f"{where}: {error}") from None
    return tool.name, _tool_of(tool, where)


def _tool_of(tool: MessagesTool, where: str) -> dict[str, Any]:
    known = None
    if tool.type not in (None, "custom") and (known := known_tool(tool.type)) is None:
        raise bad_field(
            f"{where}.type",
            f"{where}: tools of type {tool.type[:80]!r} are not supported: Anthropic runs them, or they show images",
        )
    if known is None and tool.input_schema is None:
        raise bad_field(
            f"{where}.input_schema",
            f"{where}.input_schema: Field required: the JSON schema of the tool's input, under this name",
        )
    description, input_schema = known or (tool.description or "", tool.input_schema or {})
    if tool.allowed_callers is not None and "direct" not in tool.allowed_callers:
        raise bad_field(f"{where}.allowed_callers", f"{where}.allowed_callers lacks direct: no code is run here")
    schema = input_schema | ({"examples": tool.input_examples} if tool.input_examples else {})
    function = {"name": tool.name, "description": description, "parameters": schema}
    return {"type": "function", "function": function | ({"strict": True} if tool.strict else {})}


def _choice_of(choice: dict[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool | None]:
    """Anthropic's tool_choice as OpenAI's tool_choice and parallel_tool_calls. Raises ApiError."""
    if choice is None:
        return None, None
    several = False if choice.get("disable_parallel_tool_use") else None
    match choice.get("type"):
        case "auto" | "none" as same:
            return same, several
        case "any":
            return "required", several
        case "tool":
            if not isinstance(choice.get("name"), str):
                raise bad_field(
                    "tool_choice.name", "tool_choice needs the name of a tool: give {type: tool, name: ...}"
                )
            return {"type": "function", "function": {"name": choice.get("name")}}, several
    raise bad_field("tool_choice", "tool_choice must be {type: auto}, {type: any}, {type: none} or {type: tool, name}")


class Thinking(NamedTuple):
    """A request's settings of thinking."""

    is_enabled: bool | None = None
    """None: the chat template decides."""
    budget_tokens: int | None = None
    is_omitted: bool = False
    """Thinking blocks are returned without their text."""


def thinking_of(request: CountTokensRequest) -> Thinking:
    """Checks the field `thinking`. Raises ApiError, which names the field."""
    if request.thinking is None:
        return Thinking()
    kind, display = request.thinking.get("type"), request.thinking.get("display")
    if kind not in _THINKING:
        raise bad_field("thinking.type", f"thinking.type must be one of {', '.join(_THINKING)}")
    if display not in (None, "summarized", "omitted", "updates"):
        raise bad_field("thinking.display", "thinking.display must be summarized, omitted or updates")
    budget = request.thinking.get("budget_tokens") if kind == "enabled" else None
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 0):
        raise bad_field("thinking.budget_tokens", "thinking.budget_tokens must be an integer that is not negative")
    # Updates are what the model writes between calls, which is its text here; its reasoning is not among them.
    return Thinking(kind != "disabled", budget, display in ("omitted", "updates"))


def prepare_messages(
    request: MessagesRequest, engine: Engine, id: str, parts: ChatParts, tenant: str
) -> PreparedRequest:
    """Checks and tokenises a request, ready to be run. Raises ApiError and InvalidRequestError."""
    thinking, chat = thinking_of(request), as_chat(request)
    welcome = engine.connected.welcome
    make_answer = functools.partial(
        MessagesAnswer,
        omits_thinking=thinking.is_omitted,
        cached_block_tokens=welcome.block_size if welcome.enable_prefix_caching else 0,
    )
    return prepared_as(_OWN_NAMES, lambda: prepare_chat(chat, engine, id, parts, tenant, make_answer))


def _output_config_of(config: dict[str, Any] | None) -> tuple[Effort | None, dict[str, Any] | None]:
    """Anthropic's output_config as OpenAI's reasoning_effort and response_format. Raises ApiError."""
    config = config or {}
    effort, form = one_of(Effort, "output_config.effort", config.get("effort")), config.get("format")
    if form is None:
        return effort, None
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise bad_field("output_config.format", "output_config.format must be {type: json_schema, schema: ...}")
    return effort, {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}
