"""Structs of response bodies, with fields in the order in which they are written, and helpers that fill them."""

from __future__ import annotations

import codecs
from collections.abc import Container, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from headrace.frontend.request.outputs import Logprob, LogprobsOfPosition, ToolCall
from headrace.frontend.text.tokenizer import Tokenizer


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    """Only in whole responses and at the end of streams."""
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Only in responses whose reasoning is parsed."""


class RequestTimes(msgspec.Struct):
    """vLLM's `metrics` of a response, in milliseconds. An unknown value is null in a whole response, and omitted in a
    stream."""

    time_to_first_token_ms: float | UnsetType | None
    """From the first scheduling to the first token."""
    generation_time_ms: float | UnsetType | None
    """From the first token to the last."""
    queue_time_ms: float | UnsetType | None
    mean_itl_ms: float | UnsetType | None
    """The mean time from one token to the next (inter-token latency)."""
    tokens_per_second: float | UnsetType | None
    """All output tokens over the time from the first scheduling to the last token."""


class PromptLogprob(msgspec.Struct, gc=False):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""One entry for each prompt token, by token id; the first is null."""


# --- completions ---------------------------------------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]

    def followed_by(self, other: CompletionLogprobs) -> CompletionLogprobs:
        return CompletionLogprobs(
            self.text_offset + other.text_offset,
            self.token_logprobs + other.token_logprobs,
            self.tokens + other.tokens,
            self.top_logprobs + other.top_logprobs,
        )


class CompletionChoice(msgspec.Struct):
    """A choice, whole or (in a stream) its new part. As in vLLM, a whole one has null for what was not requested."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType | None = UNSET

    def name_all(self) -> None:
        """Sets unset fields to null, before the choice is sent whole."""
        for name in ("prompt_logprobs", "prompt_token_ids", "token_ids"):
            if getattr(self, name) is UNSET:
                setattr(self, name, None)


class CompletionResponse(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: RequestTimes | UnsetType = UNSET


# --- chat completions ----------------------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class FunctionDelta(msgspec.Struct):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """The first delta of a call has its id and name, later ones more of its arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class AssistantMessage(msgspec.Struct):
    role: str
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | None = None
    reasoning_content: str | UnsetType = UNSET
    """The older name of `reasoning`, which clients still read."""


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatResponse(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | UnsetType | None = UNSET
    metrics: RequestTimes | UnsetType = UNSET


class Delta(msgspec.Struct):
    content: str | UnsetType = UNSET
    role: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    """Only in a choice's last event."""
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_text: str | UnsetType | None = UNSET
    metrics: RequestTimes | UnsetType = UNSET


# --- the rest ------------------------------------------------------------------------------------------------------


class ModelCard(msgspec.Struct):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    """Of a LoRA adapter, the model that it is for; `root` is its path."""
    max_model_len: int
    default_sampling_params: dict[str, float | int | list[int]]
    """Defaults of the model's own configuration for fields that a request omits."""


class ModelList(msgspec.Struct):
    object: str
    data: list[ModelCard]


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None = None


class DetokenizeResponse(msgspec.Struct):
    prompt: str


class TokenizerInfoResponse(msgspec.Struct):
    tokenizer_class: str
    model_max_length: int
    chat_template: str | None
    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None


LOWEST = -9999.0
"""Written for minus infinity, which JSON lacks; the same number as vLLM's."""


class TokenSpelling:
    """Writes tokens in log-probabilities: as their text, or as token_id:NUMBER."""

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool) -> None:
        self._tokenizer = None if as_ids else tokenizer

    def __call__(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.decode_token(token_id)

    def bytes_of(self, token_id: int) -> list[int]:
        """A token's UTF-8 bytes, possibly a part of a character; those of all tokens together are the text."""
        return list(self(token_id).encode() if self._tokenizer is None else self._tokenizer.token_bytes(token_id))


class TextOffsets:
    """Where the tokens of a text begin in it, in characters. Tokens that are parts of one character begin where that
    does."""

    def __init__(
        self, spell: TokenSpelling, after: TextOffsets | None = None, without: Container[int] = frozenset()
    ) -> None:
        """after: the offsets of the text before this one. without: tokens that the text lacks."""
        self._spell, self._without = spell, without
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0
        if after is not None:
            self._decoder.setstate(after._decoder.getstate())
            self._offset = after._offset

    def next(self, token_id: int) -> int:
        """The offset of the next token."""
        begin = self._offset
        if token_id not in self._without:
            self._offset += len(self._decoder.decode(bytes(self._spell.bytes_of(token_id))))
        return begin


def completion_logprobs(
    token_ids: Sequence[int], positions: Sequence[LogprobsOfPosition | None], spell: TokenSpelling, offsets: TextOffsets
) -> CompletionLogprobs:
    """Log-probabilities of adjacent tokens, which are the next ones of `offsets`."""
    result = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token_id, position in zip(token_ids, positions, strict=True):
        result.text_offset.append(offsets.next(token_id))
        result.tokens.append(spell(token_id))
        if position is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        result.token_logprobs.append(_finite(position[token_id]))
        top: dict[str, float] = {}
        for each, logprob in position.items():
            top.setdefault(spell(each), _finite(logprob))
        result.top_logprobs.append(top)
    return result


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[LogprobsOfPosition], spell: TokenSpelling, num_top: int | None
) -> ChatLogprobs:
    """Log-probabilities with the `num_top` likeliest tokens per position; None: with all that the engine reported."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        told = (each for each in position.items() if num_top is None or (each[1].rank or 0) <= num_top)
        likeliest = sorted(told, key=lambda each: each[1].rank or 0)
        content.append(
            TokenLogprob(
                token=spell(token_id),
                logprob=_finite(position[token_id]),
                bytes=spell.bytes_of(token_id),
                top_logprobs=[
                    TopLogprob(spell(each), _finite(logprob), spell.bytes_of(each))
                    for each, logprob in likeliest[:num_top]
                ],
            )
        )
    return ChatLogprobs(content)


def prompt_logprobs(positions: Sequence[LogprobsOfPosition | None]) -> PromptLogprobs:
    return [
        None
        if position is None
        else {
            str(token_id): PromptLogprob(_finite(logprob), logprob.rank, logprob.decoded_token)
            for token_id, logprob in position.items()
        }
        for position in positions
    ]


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, LOWEST)
