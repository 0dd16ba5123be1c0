"""The bodies of requests. A field stands here once: decoding, its checks and the OpenAPI document come from it.

Ranges of sampling fields are `SamplingParams`'. None is the same as leaving a field out.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

T = TypeVar("T")
# Bounds of lists that are worked through one by one. Lists of token ids have those of a body (large_bodies.py).
Few = Annotated[list[T], Meta(max_length=1024)]
Many = Annotated[list[T], Meta(max_length=16384)]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: Annotated[bool, Meta(description="End the stream with an event that counts its tokens")] = False
    continuous_usage_stats: Annotated[bool, Meta(description="Count the tokens so far in every event")] = False
    include_obfuscation: Annotated[bool | None, Meta(description="Taken, and not read: events are not padded")] = None


class GenerationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat completions share."""

    model: Annotated[str | None, Meta(description="One of /v1/models; the first of them when left out")] = None
    n: Annotated[int | None, Meta(description="Outputs for each prompt")] = None
    max_tokens: Annotated[int | None, Meta(description="Most tokens to generate")] = None
    min_tokens: Annotated[int | None, Meta(description="Tokens to generate before any stop condition counts")] = None
    temperature: Annotated[float | None, Meta(description="0 is greedy; default: the model's own, else 1")] = None
    top_p: Annotated[float | None, Meta(description="Keep the likeliest tokens that make up this share")] = None
    top_k: Annotated[int | None, Meta(description="Keep this many of the likeliest tokens; 0 or -1 keeps all")] = None
    min_p: Annotated[float | None, Meta(description="Keep tokens at least this likely, relative to the best")] = None
    presence_penalty: Annotated[float | None, Meta(description="-2 to 2: off the logit of tokens generated")] = None
    frequency_penalty: Annotated[float | None, Meta(description="-2 to 2: the same, times how often")] = None
    repetition_penalty: Annotated[float | None, Meta(description="Over 0: divides the logits of tokens seen")] = None
    logit_bias: Annotated[dict[str, float] | None, Meta(description="Token id: -100 to 100, added to its logit")] = None
    allowed_token_ids: Annotated[list[int] | None, Meta(description="The only tokens to choose from")] = None
    bad_words: Annotated[Few[str] | None, Meta(description="Words that are not to be generated")] = None
    seed: Annotated[int | None, Meta(description="Makes the output reproducible")] = None
    stop: Annotated[str | list[str] | None, Meta(description="Texts that end the output, and are not in it")] = None
    stop_token_ids: Annotated[Few[int] | None, Meta(description="Tokens that end the output")] = None
    ignore_eos: Annotated[bool | None, Meta(description="Go on after an end-of-sequence token")] = None
    include_stop_str_in_output: Annotated[bool | None, Meta(description="Keep the stop string in the output")] = None
    skip_special_tokens: Annotated[bool | None, Meta(description="Leave special tokens out of the text")] = None
    spaces_between_special_tokens: Annotated[bool | None, Meta(description="Only true is supported")] = None
    prompt_logprobs: Annotated[int | None, Meta(description="Likeliest tokens to report per prompt token")] = None
    add_special_tokens: Annotated[bool | None, Meta(description="Add special tokens to the prompt, such as BOS")] = None
    stream: Annotated[bool | None, Meta(description="Send the output as server-sent events while it grows")] = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int | None, Meta(description="Smaller is sooner, under the policy `priority`")] = None
    cache_salt: Annotated[str | None, Meta(description="Cached prefixes are shared only under the same salt")] = None
    request_id: Annotated[str | None, Meta(description="Name of the request; also the header X-Request-Id")] = None
    return_token_ids: Annotated[bool | None, Meta(description="Give token ids besides the text")] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, Meta(description="Spell tokens in logprobs as token_id:NUMBER")
    ] = None


class CompletionRequest(GenerationRequest):
    """POST /v1/completions"""

    prompt: Annotated[
        str | list[str | int | list[int]],
        Meta(description="A text, a list of token ids, or a list of either"),
    ]
    echo: Annotated[bool | None, Meta(description="Begin the output with the prompt")] = None
    best_of: Annotated[int | None, Meta(description="Only the value of n is supported")] = None
    logprobs: Annotated[int | None, Meta(description="Likeliest tokens to report per token, besides its own")] = None


class ChatMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: str
    content: Annotated[
        str | Many[str | dict[str, Any]] | None, Meta(description="A text, or parts like {type: text, text: ...}")
    ] = None
    name: str | None = None
    tool_calls: Few[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    # An assistant's message comes back as the server gave it, with fields that say nothing.
    refusal: None = None
    annotations: Few[Any] | None = None
    audio: None = None
    function_call: None = None
    # What clients keep beside a message, or hint to other servers.
    id: Annotated[Any, Meta(description="Taken, and not read")] = None
    cache_control: Annotated[Any, Meta(description="Taken, and not read: equal prefixes are cached without it")] = None


UNREAD_IN_MESSAGES = ("id", "cache_control")


# How a conversation becomes a prompt.
GenerationPrompt = Annotated[bool | None, Meta(description="Begin an answer; default: unless continue_final_message")]
ContinueFinal = Annotated[bool | None, Meta(description="Go on with the last message")]
Template = Annotated[str | None, Meta(description="A template's name or, where the server trusts requests, its text")]
TemplateVariables = Annotated[dict[str, Any] | None, Meta(description="What else the template sees")]
Tools = Annotated[Few[dict[str, Any]] | None, Meta(description="Passed to the template")]


class ChatCompletionRequest(GenerationRequest):
    """POST /v1/chat/completions"""

    messages: Many[ChatMessage]
    max_completion_tokens: Annotated[int | None, Meta(description="Most tokens to generate")] = None
    logprobs: Annotated[bool | None, Meta(description="Report log-probabilities")] = None
    top_logprobs: Annotated[int | None, Meta(description="Likeliest tokens to report, with logprobs")] = None
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: ContinueFinal = None
    chat_template: Template = None
    chat_template_kwargs: TemplateVariables = None
    enable_thinking: Annotated[bool | None, Meta(description="The template's variable of that name")] = None
    tools: Tools = None
    tool_choice: Annotated[str | dict[str, Any] | None, Meta(description="auto, or none to leave tools out")] = None
    documents: Annotated[Few[dict[str, Any]] | None, Meta(description="Passed to the template")] = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: of a text, or of a conversation's prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: Many[ChatMessage] | None = None
    add_special_tokens: Annotated[bool | None, Meta(description="Default: true for a text, false for messages")] = None
    return_token_strs: bool | None = None
    add_generation_prompt: GenerationPrompt = None
    continue_final_message: ContinueFinal = None
    chat_template: Template = None
    chat_template_kwargs: TemplateVariables = None
    tools: Tools = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize"""

    tokens: list[int]
    model: str | None = None
