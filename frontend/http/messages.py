"""POST /v1/messages: Anthropic's API, served by the code of chat completions.

A request is converted to a chat completion (`as_chat`); the answer is written as content blocks, whole or as events:

    message_start, (content_block_start, content_block_delta ..., content_block_stop) for each block, message_delta,
    message_stop
"""

from __future__ import annotations

import functools
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from headrace.frontend.api.parameters.structured_outputs import RETIRED
from headrace.frontend.client.request import RequestStream, SequenceState
from headrace.frontend.fleet.pool import Engine
from headrace.frontend.http.errors import ApiError, bad_field, renamed
from headrace.frontend.http.openai.chat import ChatParts, prepare_chat
from headrace.frontend.http.openai.foreign_fields import ANY, Neutral
from headrace.frontend.http.openai.generation import PreparedRequest
from headrace.frontend.http.openai.requests import (
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
from headrace.frontend.http.openai.responses import Answer, ModelCard
from headrace.frontend.http.responses_api.items import as_encrypted, from_encrypted
from headrace.frontend.text.formats.message import call_id, num_reasoning_tokens
from headrace.frontend.text.formats.parser import Event, OutputParser

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
_SIGNATURE = "headrace:"
"""Prefix of the signatures of thinking blocks that this server wrote."""

# --- the request ------------------------------------------------------------------------------------------------------


class InputMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Many[dict[str, Any]]


class MessagesTool(msgspec.Struct, kw_only=True):
    """Anthropic's other fields of tools (cache_control, defer_loading, eager_input_streaming) are accepted and ignored:
    the model sees all tools, and calls are streamed as they are generated."""

    name: str
    input_schema: dict[str, Any] = {}
    description: str | None = None
    strict: bool | None = None
    input_examples: Few[dict[str, Any]] | None = None
    allowed_callers: Few[str] | None = None
    type: str | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens"""

    messages: Many[InputMessage]
    model: str | None = None
    system: Annotated[str | Many[dict[str, Any]] | None, Meta(description="What comes before the messages")] = None
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

    max_tokens: Annotated[int, Meta(description="Most tokens to generate")]
    stop_sequences: Few[str] | None = None
    metadata: Annotated[dict[str, Any] | None, Meta(description="Taken, and not read")] = None
    service_tier: Annotated[str | None, Meta(description="Taken, and not read: there is one tier")] = None


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
_FIELDS: Mapping[str, Neutral] = types.MappingProxyType(
    {
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
        "thread": Neutral("conversations are not kept; send all of it"),
    }
)
MESSAGES_NEUTRAL: Mapping[type[msgspec.Struct], Mapping[str, Neutral]] = types.MappingProxyType(
    {CountTokensRequest: _FIELDS, MessagesRequest: _FIELDS}
)


class CountTokensResponse(msgspec.Struct):
    input_tokens: int


class ClaudeModel(msgspec.Struct, tag_field="type", tag="model"):
    """A model in Anthropic's format."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    lifecycle: str = "active"

    @classmethod
    def of(cls, card: ModelCard) -> ClaudeModel:
        created = datetime.fromtimestamp(card.created, UTC).isoformat().replace("+00:00", "Z")
        return cls(card.id, card.id, created, card.max_model_len, card.max_model_len)


class ClaudeModels(msgspec.Struct):
    """All models, on one page."""

    data: list[ClaudeModel]
    first_id: str | None
    last_id: str | None
    has_more: bool = False

    @classmethod
    def of(cls, cards: Sequence[ModelCard]) -> ClaudeModels:
        ids = [card.id for card in cards]
        return cls([ClaudeModel.of(card) for card in cards], *((ids[0], ids[-1]) if ids else (None, None)))


def as_chat(request: CountTokensRequest) -> ChatCompletionRequest:
    """The same request as a chat completion. Raises ApiError, which names the field."""
    messages: list[ChatMessage] = []
    if request.system:
        messages.append(ChatMessage(role="system", content=_texts(request.system, "system")))
    for index, message in enumerate(request.messages):
        messages += _messages_of(message, f"messages[{index}].content")
    tools = [_tool_of(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or ())]
    choice, several = _choice_of(request.tool_choice)
    thinking = thinking_of(request)
    effort, form = _output_config_of(request.output_config)
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


def _messages_of(message: InputMessage, where: str) -> list[ChatMessage]:
    """Converts a message's blocks. Tool results become separate messages, before the user's text."""
    if isinstance(message.content, str):
        return [ChatMessage(role=message.role, content=message.content)]
    results, thoughts, calls = [], [], []
    texts: list[str | dict[str, Any]] = []
    for index, block in enumerate(message.content):
        at = f"{where}[{index}]"
        match block.get("type"):
            case "text":
                texts.append({"type": "text", "text": _field(block, "text", at)})
            case "tool_result":
                content = block.get("content")
                text = "" if content is None else _texts(content, f"{at}.content")
                results.append(ChatMessage(role="tool", content=text, tool_call_id=_field(block, "tool_use_id", at)))
            case "tool_use":
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
                function = {"name": _field(block, "name", at), "arguments": arguments}
                calls.append({"id": _field(block, "id", at), "type": "function", "function": function})
            case "thinking":
                thoughts.append(_field(block, "thinking", at) or _omitted(block, at))
            case "redacted_thinking":
                pass  # encrypted by its writer, so it cannot be read here
            case kind:
                raise bad_field(at, f"{at}: content of type {str(kind)[:80]!r} is not supported: the model reads text")
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


def _omitted(block: dict[str, Any], where: str) -> str:
    """The thinking that an answer omitted, decoded from the signature that the client sends back; empty for other
    servers' signatures, which cannot be read. Raises ApiError for a damaged one."""
    signature = block.get("signature")
    if not isinstance(signature, str) or not signature.startswith(_SIGNATURE):
        return ""
    try:
        return from_encrypted(signature.removeprefix(_SIGNATURE))
    except ValueError:
        raise bad_field(f"{where}.signature", f"{where}.signature is not as this server wrote it") from None


def _texts(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_field(where, f"{where} must be a text or a list of {{type: text, text: ...}}")
    for index, block in enumerate(content):
        if not isinstance(block, dict) or block.get("type") != "text":
            raise bad_field(f"{where}[{index}]", f"{where}[{index}] must be {{type: text, text: ...}}")
    return "\n".join(_field(block, "text", f"{where}[{index}]") for index, block in enumerate(content))


def _field(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise bad_field(f"{where}.{name}", f"{where}.{name} must be a text")
    return value


def _tool_of(tool: MessagesTool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise bad_field(f"{where}.type", f"{where}: tools of type {tool.type[:80]!r} are run by Anthropic, not here")
    if tool.allowed_callers is not None and "direct" not in tool.allowed_callers:
        raise bad_field(f"{where}.allowed_callers", f"{where}.allowed_callers lacks direct: no code is run here")
    schema = tool.input_schema | ({"examples": tool.input_examples} if tool.input_examples else {})
    function = {"name": tool.name, "description": tool.description or "", "parameters": schema}
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
    if display not in (None, "summarized", "omitted"):
        raise bad_field("thinking.display", "thinking.display must be summarized or omitted")
    budget = request.thinking.get("budget_tokens") if kind == "enabled" else None
    if budget is not None and (not isinstance(budget, int) or isinstance(budget, bool) or budget < 0):
        raise bad_field("thinking.budget_tokens", "thinking.budget_tokens must be an integer that is not negative")
    return Thinking(kind != "disabled", budget, display == "omitted")


def prepare_messages(
    request: MessagesRequest, engine: Engine, parts: ChatParts, name: str, tenant: str
) -> PreparedRequest:
    """Checks and tokenises a request, ready to be run. Raises ApiError and InvalidRequestError."""
    thinking, chat = thinking_of(request), as_chat(request)
    make_answer = functools.partial(MessagesAnswer, omits_thinking=thinking.is_omitted)
    with renamed(_OWN_NAMES):
        prepared = prepare_chat(chat, engine, parts, name, tenant, make_answer, "msg_")
    if prepared.form_field == "response_format":
        prepared.form_field = "output_config.format"
    return prepared


def _output_config_of(config: dict[str, Any] | None) -> tuple[Effort | None, dict[str, Any] | None]:
    """Anthropic's output_config as OpenAI's reasoning_effort and response_format. Raises ApiError."""
    config = config or {}
    effort, form = one_of(Effort, "output_config.effort", config.get("effort")), config.get("format")
    if form is None:
        return effort, None
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise bad_field("output_config.format", "output_config.format must be {type: json_schema, schema: ...}")
    return effort, {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"]}}


# --- the answer -------------------------------------------------------------------------------------------------------


class ThinkingDetails(msgspec.Struct):
    thinking_tokens: int


class MessagesUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    output_tokens_details: ThinkingDetails | None = None


class MessagesResponse(msgspec.Struct):
    id: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessagesUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class MessagesAnswer:
    """Writes the response, whole or streamed (a `generation.ResponseText`), of a request with one output."""

    def __init__(
        self,
        request: ChatCompletionRequest,
        answer: Answer,
        role: str,
        make_reader: Callable[[], OutputParser] | None,
        *,
        omits_thinking: bool = False,
    ) -> None:
        self._request, self._answer, self._omits_thinking = request, answer, omits_thinking
        self._thoughts: list[str] = []
        self._num_closed = 0  # entries of _thoughts that are in closed blocks
        self._reader = OutputParser(None, None) if make_reader is None else make_reader()
        self._streams: Sequence[RequestStream] = ()
        self._began = False
        self._num_blocks, self._open = 0, ("", -1)  # of the open block: its kind, and the index of its tool call
        self._sequence: SequenceState | None = None

    def attach(self, streams: Sequence[RequestStream]) -> None:
        self._streams = streams

    def whole(self) -> list[bytes]:
        (stream,) = self._streams
        (sequence,) = stream.sequences
        output = sequence.read(delta=False, tokenizer=stream.tokenizer)
        blocks: list[dict[str, Any]] = []
        for told in self._read(output.text, ends=True):
            kind, _ = self._block_of(told)
            self._thoughts.append(told.reasoning)
            if kind == "tool_use" and told.name:
                blocks.append({"type": kind, "id": call_id(told), "name": told.name, "input": told.arguments})
            elif kind == "tool_use":
                blocks[-1]["input"] += told.arguments
            elif blocks and blocks[-1]["type"] == kind:
                blocks[-1][kind] += told.content or told.reasoning
            else:
                blocks.append({"type": kind, kind: told.content or told.reasoning})
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = call_input(block["input"])
            elif block["type"] == "thinking":
                block["signature"] = self._signature(block["thinking"])
                block["thinking"] = "" if self._omits_thinking else block["thinking"]
        reason, sequence_text = self._stop(output.finish_reason, output.stop_reason)
        usage = self._usage(len(output.token_ids), ends=True)
        response = MessagesResponse(self._answer.id, self._answer.model, blocks, reason, sequence_text, usage)
        return [msgspec.json.encode(response)]

    def delta(self, stream: RequestStream, sequence: SequenceState) -> bytes:
        self._sequence = sequence
        output = sequence.read(delta=True, tokenizer=stream.tokenizer)
        parts = [] if self._began else [self._start()]
        self._began = True
        for told in self._read(output.text, ends=output.finish_reason is not None):
            parts += self._events_of(told)
        if output.finish_reason is not None:
            parts += self._close()
            reason, stop_sequence = self._stop(output.finish_reason, output.stop_reason)
            parts.append(
                _event(
                    "message_delta",
                    delta={"stop_reason": reason, "stop_sequence": stop_sequence},
                    usage=self._usage(len(sequence.token_ids), ends=True),
                )
            )
        return b"".join(parts)

    def end(self) -> bytes:
        return _event("message_stop")

    def failure(self, error: BaseException) -> bytes:
        return b"event: error\ndata: " + error_body(ApiError.of(error)) + b"\n\n"

    def _read(self, text: str, *, ends: bool) -> list[Event]:
        events = self._reader.feed(text) + (self._reader.finish() if ends else [])
        return [each for each in events if each.call <= 0 or self._request.parallel_tool_calls is not False]

    def _start(self) -> bytes:
        message = MessagesResponse(self._answer.id, self._answer.model, [], None, None, self._usage(0))
        return _event("message_start", message=message)

    def _block_of(self, told: Event) -> tuple[str, int]:
        return ("tool_use", told.call) if told.call >= 0 else ("thinking" if told.reasoning else "text", -1)

    def _events_of(self, told: Event) -> list[bytes]:
        block, parts = self._block_of(told), []
        if block != self._open:
            parts = self._close()
            content: dict[str, Any] = {"type": block[0]}
            match block[0]:
                case "tool_use":
                    content |= {"id": call_id(told), "name": told.name, "input": {}}
                case "thinking":
                    content |= {"thinking": "", "signature": ""}
                case _:
                    content |= {"text": ""}
            self._open = block
            parts.append(_event("content_block_start", index=self._num_blocks, content_block=content))
        delta: dict[str, Any] = {"type": "text_delta", "text": told.content}
        if block[0] == "tool_use":
            delta = {"type": "input_json_delta", "partial_json": told.arguments}
        elif block[0] == "thinking":
            delta = {"type": "thinking_delta", "thinking": told.reasoning}
            self._thoughts.append(told.reasoning)
            if self._omits_thinking:
                return parts
        if told.content or told.reasoning or told.arguments:
            parts.append(_event("content_block_delta", index=self._num_blocks, delta=delta))
        return parts

    def _close(self) -> list[bytes]:
        if not self._open[0]:
            return []
        parts = []
        if self._open[0] == "thinking":
            signed = self._signature("".join(self._thoughts[self._num_closed :]))
            self._num_closed = len(self._thoughts)
            delta = {"type": "signature_delta", "signature": signed}
            parts.append(_event("content_block_delta", index=self._num_blocks, delta=delta))
        parts.append(_event("content_block_stop", index=self._num_blocks))
        self._num_blocks, self._open = self._num_blocks + 1, ("", -1)
        return parts

    def _stop(
        self, finish_reason: str | None, stop_reason: int | str | None
    ) -> tuple[Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"], str | None]:
        if finish_reason == "length":
            return "max_tokens", None
        if self._reader.num_calls and not self._reader.is_cut_by(stop_reason):
            return "tool_use", None
        return ("stop_sequence", stop_reason) if isinstance(stop_reason, str) else ("end_turn", None)

    def _signature(self, thinking: str) -> str:
        """Clients send back only signed thinking blocks. The signature holds the text if the block omits it."""
        return _SIGNATURE + (as_encrypted(thinking) if self._omits_thinking else "")

    def _usage(self, num_output: int, *, ends: bool = False) -> MessagesUsage:
        """Anthropic's counts: input_tokens excludes tokens from the prefix cache."""
        (stream,) = self._streams
        cached = stream.num_cached_tokens or 0
        usage = MessagesUsage(len(stream.prompt.token_ids or ()) - cached, num_output, cached)
        if ends:
            thinking = num_reasoning_tokens(stream.tokenizer, "".join(self._thoughts), num_output)
            usage.output_tokens_details = ThinkingDetails(thinking)
        return usage


def call_input(text: str) -> Any:
    """The arguments of a tool call as JSON; {"": text} if what the model wrote is not JSON."""
    try:
        msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return {"": text}
    return msgspec.Raw((text or "{}").encode())  # unchanged, so that numbers of any size stay exact


def _event(type: str, **fields: Any) -> bytes:
    return b"event: " + type.encode() + b"\ndata: " + msgspec.json.encode({"type": type, **fields}) + b"\n\n"


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError) -> bytes:
    """An error in Anthropic's format."""
    kind = _ERROR_TYPES.get(error.status, "invalid_request_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.body.message}})
