"""Request bodies of Ollama's API, and their conversion to chat completions or, with `raw`, to completions."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta

from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.openai.requests import (
    NEUTRAL,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    Few,
    Many,
)
from headrace.frontend.http.server.decoding.decoder import invalid_body
from headrace.frontend.http.server.decoding.foreign_fields import Neutral
from headrace.frontend.http.server.errors import bad_field, renamed
from headrace.ipc.struct_types import threadsafe

T = TypeVar("T", bound=msgspec.Struct)


class OllamaMessage(msgspec.Struct, kw_only=True):
    """Unknown fields of a message are treated as those of a body."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Few[Any] | None = None
    tool_calls: Few[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: Annotated[str, Meta(description="A served model, see GET /api/tags; with or without :latest")]
    stream: Annotated[bool | None, Meta(description="Stream the answer as lines of JSON; default: true")] = None
    format: Annotated[
        str | dict[str, Any] | None, Meta(description="Constraint on the output: json, or a JSON schema")
    ] = None
    options: Annotated[dict[str, Any] | None, Meta(description="Sampling: temperature, num_predict, stop, ...")] = None
    keep_alive: Annotated[float | str | None, Meta(description="Accepted without effect: the model stays loaded")] = (
        None
    )
    think: Annotated[bool | str | None, Meta(description="Whether to reason, or the effort: low, medium or high")] = (
        None
    )
    logprobs: Annotated[bool | None, Meta(description="Return the log-probabilities of the output tokens")] = None
    top_logprobs: Annotated[
        int | None, Meta(description="Number of most likely tokens to return per output token; needs logprobs: true")
    ] = None


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat"""

    message_kind: ClassVar[type[msgspec.Struct]] = OllamaMessage

    messages: Many[OllamaMessage] | None = None
    tools: Few[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """POST /api/generate"""

    prompt: str = ""
    system: str | None = None
    raw: Annotated[bool | None, Meta(description="Use the prompt as it is, without the chat template")] = None
    suffix: Annotated[str | None, Meta(description="Refused: fill-in-the-middle is not supported")] = None
    template: Annotated[str | None, Meta(description="Refused: use the model's template")] = None
    context: Annotated[list[int] | None, Meta(description="Refused: deprecated by Ollama, use /api/chat")] = None
    images: Annotated[Few[Any] | None, Meta(description="Refused: the model reads only text")] = None


class ShowRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /api/show"""

    model: str | None = None
    name: Annotated[str | None, Meta(description="The older name of model")] = None
    verbose: Annotated[bool | None, Meta(description="Accepted without effect")] = None


_OVERFLOW = "a conversation that does not fit is refused"
NOT_SUPPORTED: Mapping[str, Neutral] = types.MappingProxyType(
    {
        **NEUTRAL,
        **dict.fromkeys(("truncate", "shift"), Neutral(_OVERFLOW, is_harmless=True, is_noted=True)),
        "_debug_render_only": Neutral("POST /tokenize gives the tokens of a prompt", (False,)),
        **dict.fromkeys(("width", "height", "steps"), Neutral("models write text alone", (0,))),
    }
)
_SAME_OPTIONS = (
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "stop"),
    *("mirostat", "mirostat_tau", "mirostat_eta"),
)
_OF_LOADING = (
    *("numa", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "use_mmap", "use_mlock", "num_thread"),
    *("num_keep", "penalize_newline", "logits_all"),
)
"""Options that no answer depends on: how Ollama loads a model, what it keeps of a context that overflows (none does
here), and retired options that its examples still have."""
_NEUTRAL: Mapping[str, Any] = types.MappingProxyType({"tfs_z": 1, "vocab_only": False, "embedding_only": False})
"""Retired options, and the value at which they have no effect: others are refused."""
_PENALTIES: Mapping[str, tuple[str, float]] = types.MappingProxyType(
    {
        "repeat_penalty": ("repetition_penalty", 1),
        "presence_penalty": ("presence_penalty", 0),
        "frequency_penalty": ("frequency_penalty", 0),
    }
)
"""By Ollama's name: Headrace's field, and the value without effect. In Ollama, they apply to the last `repeat_last_n`
tokens."""
OWN_NAMES: Mapping[str, str] = types.MappingProxyType(
    {
        **{name: f"options.{name}" for name in _SAME_OPTIONS},
        **{ours: f"options.{name}" for name, (ours, _) in _PENALTIES.items()},
        "max_tokens": "options.num_predict",
        "reasoning_effort": "think",
        "response_format": "format",
    }
)
"""Of the fields of chat completions, for errors."""
OWN_NAMES_OF_COMPLETION: Mapping[str, str] = types.MappingProxyType({**OWN_NAMES, "logprobs": "top_logprobs"})
"""Of a completion's fields, whose `logprobs` is a number."""


def _sampling(options: dict[str, Any] | None, engine: Engine) -> dict[str, Any]:
    """Ollama's options as fields of a completion. Raises ApiError, which names the option."""
    fields: dict[str, Any] = {}
    given = {name: value for name, value in (options or {}).items() if value is not None}
    for name, value in given.items():
        where = f"options.{name}"
        if name in _SAME_OPTIONS:
            fields[name] = value
        elif name == "seed":
            fields["seed"] = None if _integer(value, where) < 0 else value
        elif name == "num_predict":
            if _integer(value, where) < 1 and value not in (-1, -2):
                raise bad_field(where, f"{where} is {value}; it must be 1 at least, or -1 or -2 for what fits")
            fields["max_tokens"] = None if value < 0 else value
        elif name == "num_ctx":
            limit = engine.connected.welcome.max_model_len
            if _integer(value, where) > limit:
                raise bad_field(where, f"num_ctx is {value}; this server's context is {limit} tokens")
        elif name in _PENALTIES:
            if given.get("repeat_last_n") != 0:
                fields[_PENALTIES[name][0]] = value
        elif name == "repeat_last_n":
            _integer(value, where)
            if value not in (0, -1) and (penalty := _penalty_in(given)) is not None:
                raise bad_field(
                    where,
                    f"{where} is {value}, and options.{penalty} counts every token here, not the last ones: give -1, "
                    "or 0 for no penalty, or leave it out",
                )
        elif name in _NEUTRAL and value == _NEUTRAL[name]:
            continue
        elif name not in _OF_LOADING:
            raise bad_field(where, f"options.{name[:80]} is not supported", "unknown_parameter")
    return fields


def options_without_effect(options: dict[str, Any] | None, engine: Engine) -> None:
    """Checks the options of a request that samples nothing, of which num_ctx may name the context alone. Raises
    ApiError."""
    for name, value in (options or {}).items():
        if name == "num_ctx":
            _sampling({name: value}, engine)
        elif value is not None and name not in _OF_LOADING and name not in _NEUTRAL:
            raise bad_field(f"options.{name[:80]}", f"options.{name[:80]} is of texts that are generated; leave it out")


def _penalty_in(options: Mapping[str, Any]) -> str | None:
    """The name of a penalty that is set to have an effect, if any."""
    return next((name for name, (_, nothing) in _PENALTIES.items() if options.get(name, nothing) != nothing), None)


def _integer(value: Any, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise bad_field(where, f"{where} must be an integer")
    return value


def _shared(request: OllamaRequest, engine: Engine) -> dict[str, Any]:
    """The fields that chat completions and completions have in common. Raises ApiError."""
    form: dict[str, Any] | None = None
    if isinstance(request.format, dict):
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": request.format}}
    elif request.format == "json":
        form = {"type": "json_object"}
    elif request.format:
        raise bad_field("format", "format must be json or a JSON schema")
    return {
        "model": served_name(request.model, (*engine.names, *engine.adapters)),
        "stream": request.stream is not False,
        "response_format": form,
        **_sampling(request.options, engine),
    }


def as_chat(
    request: OllamaRequest, messages: Sequence[OllamaMessage], tools: Any, engine: Engine
) -> ChatCompletionRequest:
    """The request as a chat completion. Raises ApiError, which names the field."""
    thinks = request.think
    fields = {
        **_shared(request, engine),
        "messages": [_message(each, f"messages[{index}]") for index, each in enumerate(messages)],
        "tools": tools or None,
        "enable_thinking": thinks if isinstance(thinks, bool) else None,
        "reasoning_effort": thinks if isinstance(thinks, str) else None,
        "logprobs": request.logprobs,
        "top_logprobs": request.top_logprobs if request.logprobs else None,
    }
    return _converted(fields, ChatCompletionRequest, OWN_NAMES)


def as_completion(request: OllamaGenerateRequest, engine: Engine) -> CompletionRequest:
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    fields = {**_shared(request, engine), "prompt": request.prompt, "logprobs": logprobs}
    return _converted(fields, CompletionRequest, OWN_NAMES_OF_COMPLETION)


def _converted(fields: dict[str, Any], kind: type[T], own_names: Mapping[str, str]) -> T:
    with renamed(own_names):
        try:
            return msgspec.convert(fields, threadsafe(kind))
        except msgspec.ValidationError as error:
            raise invalid_body(str(error), kind) from None


def _message(message: OllamaMessage, where: str) -> ChatMessage:
    if message.images:
        raise bad_field(f"{where}.images", f"{where}.images: the model reads text", "unsupported_parameter")
    calls = []
    for index, call in enumerate(message.tool_calls or ()):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            at = f"{where}.tool_calls[{index}]"
            raise bad_field(at, f"{at} must be {{function: {{name: ..., arguments: {{...}}}}}}")
        named = {"name": function["name"], "arguments": function.get("arguments") or {}}
        calls.append({"id": str(call.get("id") or f"call_{index}"), "type": "function", "function": named})
    return ChatMessage(
        role=message.role,
        content=message.content,
        name=message.tool_name,
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id,
        reasoning_content=message.thinking or None,
    )


def served_name(asked: str, names: Sequence[str]) -> str:
    """The served model that is meant: Ollama's clients add the tag :latest to names without one."""
    plain = asked.removesuffix(":latest")
    return plain if asked not in names and plain in names else asked
