"""What each route does with a field that its own requests lack but that is known elsewhere.

    fields of the requests' structs        own, on their routes
    NEUTRAL_OF, MESSAGES_NEUTRAL, ...      of OpenAI's, vLLM's and Anthropic's APIs: refused, or without effect
    FOREIGN                                of other servers' APIs: taken as an own field, refused, or without effect
    fields of this server's other routes   refused by name where they ask for something

So a name that is known anywhere is never ignored in silence.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.frontend.http.anthropic.messages import MESSAGES_NEUTRAL, CountTokensRequest, MessagesRequest
from headrace.frontend.http.ollama_requests import OLLAMA_NEUTRAL, OllamaChatRequest, OllamaGenerateRequest
from headrace.frontend.http.openai.decoder import Others
from headrace.frontend.http.openai.embeddings import EMBEDDING_NEUTRAL, EmbeddingRequest
from headrace.frontend.http.openai.foreign_fields import FOREIGN, Neutral, SameAs
from headrace.frontend.http.openai.requests import (
    NEUTRAL,
    NEUTRAL_OF,
    ChatBatchRequest,
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from headrace.frontend.request.parameters.sampling_params import FIELDS

GENERATING: Mapping[type[msgspec.Struct], str] = types.MappingProxyType(
    {
        CompletionRequest: "completions",
        ChatCompletionRequest: "chat completions",
        ChatBatchRequest: "batches of chats",
        ResponsesRequest: "responses",
        MessagesRequest: "Anthropic's messages",
        OllamaChatRequest: "Ollama's chats",
        OllamaGenerateRequest: "Ollama's completions",
    }
)
"""The requests that generate text, and what they are called."""
_ALL: Mapping[type[msgspec.Struct], str] = types.MappingProxyType({**GENERATING, EmbeddingRequest: "embeddings"})
_OLLAMAS = (OllamaChatRequest, OllamaGenerateRequest)
_ASKS_FOR_NOTHING: Mapping[str, tuple[Any, ...]] = types.MappingProxyType(
    {
        **{name: (field.default,) for name, field in FIELDS.items()},
        **{"n": (1,), "best_of": (1,), "length_penalty": (1,), "top_logprobs": (0,), "logprobs": (False, 0)},
        **{"include_reasoning": (True,), "add_generation_prompt": (True,), "parallel_tool_calls": (True,)},
        **{"tool_choice": ("none", "auto"), "truncation": ("disabled",), "reasoning_effort": (), "enable_thinking": ()},
    }
)
_IN_OPTIONS = "Ollama's requests have options"
_NOTHING: tuple[Any, ...] = (False, [], {}, "")
_OF_PROMPTS = frozenset(
    {
        *("chat_template", "chat_template_kwargs", "enable_thinking", "reasoning_effort", "verbosity", "documents"),
        *("tools", "tool_choice", "add_special_tokens", "add_generation_prompt", "continue_final_message"),
        *("system", "instructions", "prompt", "messages", "input", "thinking", "think", "reasoning", "suffix"),
        *("truncate_prompt_tokens", "truncation_side", "output_config"),
    }
)
"""Fields on which the tokens of a prompt depend, besides those by which a request would choose what is read."""
_NO_COUNT = Neutral("no count depends on it", is_harmless=True)


_SPECIAL: Mapping[type[msgspec.Struct], Mapping[str, Neutral]] = types.MappingProxyType(
    {**NEUTRAL_OF, **MESSAGES_NEUTRAL, **OLLAMA_NEUTRAL}
)
"""By kind of request, the fields of its own API that it lacks."""


def _of_other_routes(own: type[msgspec.Struct]) -> dict[str, Neutral]:
    """The fields of the other routes that generate text or embed it, and those that they lack."""
    found: dict[str, Neutral] = {}
    for kind, called in _ALL.items():
        for name in kind.__struct_fields__:
            values = _ASKS_FOR_NOTHING.get(name, _NOTHING)
            where = _IN_OPTIONS if own in _OLLAMAS else "this route has none"
            found.setdefault(name, Neutral(f"it is a field of {called}; {where}", values))
    for table in (*_SPECIAL.values(), EMBEDDING_NEUTRAL):
        for name, other in table.items():
            found.setdefault(name, other)
    return found


def _of_counts(own: type[msgspec.Struct], generating: type[msgspec.Struct]) -> dict[str, Neutral | SameAs]:
    """For a route that counts a prompt's tokens: most fields of the request that would generate from it do not
    matter."""
    found = dict(_others(generating))
    for name in generating.__struct_fields__:
        found.setdefault(name, Neutral("this route has none", _NOTHING) if name in _OF_PROMPTS else _NO_COUNT)
    for name, other in found.items():
        if isinstance(other, SameAs) and name not in _OF_PROMPTS:
            found[name] = _NO_COUNT
    return found


def _others(kind: type[msgspec.Struct]) -> Mapping[str, Neutral | SameAs]:
    foreign: dict[str, Neutral | SameAs] = dict(FOREIGN)
    if kind in _OLLAMAS:
        found = _of_other_routes(kind)
        foreign = {
            name: found.get(name, Neutral(f"it is a field of other servers; {_IN_OPTIONS}", _NOTHING))
            if isinstance(other, SameAs)
            else other
            for name, other in foreign.items()
        }
    return {**_of_other_routes(kind), **foreign, **NEUTRAL, **_SPECIAL[kind]}


def _table(kind: type[msgspec.Struct], others: Mapping[str, Neutral | SameAs]) -> Mapping[str, Neutral | SameAs]:
    return types.MappingProxyType({n: other for n, other in others.items() if n not in kind.__struct_fields__})


def _of_embeddings() -> Mapping[str, Neutral]:
    """All fields of requests that generate, and of other servers, are refused where they ask for something."""
    found = {**_of_other_routes(EmbeddingRequest), **NEUTRAL}
    foreign = {
        name: other if isinstance(other, Neutral) else Neutral("it is a field of other servers", _NOTHING)
        for name, other in FOREIGN.items()
    }
    return {**foreign, **found, **EMBEDDING_NEUTRAL}


OTHERS: Others = types.MappingProxyType(
    {
        **{kind: _table(kind, _others(kind)) for kind in GENERATING},
        CountTokensRequest: _table(CountTokensRequest, _of_counts(CountTokensRequest, MessagesRequest)),
        EmbeddingRequest: _table(EmbeddingRequest, _of_embeddings()),
        TokenizeRequest: _table(TokenizeRequest, _of_counts(TokenizeRequest, ChatCompletionRequest)),
    }
)
"""By kind of request, the fields that it lacks and what they mean there."""
