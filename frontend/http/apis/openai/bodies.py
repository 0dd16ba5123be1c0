"""Structs of response bodies, with fields in the order in which they are written, and helpers that fill them."""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import Container, Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from headrace.frontend.client.request import RequestStream
from headrace.frontend.http.apis.openai.requests import GenerationRequest
from headrace.frontend.http.server.errors import error_event
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
    parent: None
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


_TEXT = "\x00text\x00"
_TEXT_JSON = msgspec.json.encode(_TEXT)
_encode = msgspec.json.Encoder().encode


class Answer:
    """Constants of one response, which are the same in its whole form and in each of its events."""

    def __init__(
        self, request: GenerationRequest, id: str, model: str, tokenizer: Tokenizer | None, *, tells_times: bool
    ) -> None:
        """model: the model's name in the response. tells_times: whether the response has `metrics`."""
        self._tells_times = tells_times
        self.id, self.model, self.created = id, model, int(time.time())
        options = request.stream_options
        self.include_usage = options is not None and options.include_usage
        self.continuous_usage = self.include_usage and options is not None and options.continuous_usage_stats
        self.return_token_ids = bool(request.return_token_ids)
        self.has_reasoning = getattr(request, "include_reasoning", None) is not False  # completions have none
        self.tokenizer = tokenizer
        self.spell = TokenSpelling(tokenizer, as_ids=bool(request.return_tokens_as_token_ids))

    def times(self, streams: Sequence[RequestStream], unknown: UnsetType | None = None) -> RequestTimes | UnsetType:
        """The times of an ended response; UNSET if they are off or there are several outputs, which share no times.

        unknown: the value of a time that is not known.
        """
        if not self._tells_times or len(streams) != 1 or streams[0].params.n != 1:
            return UNSET
        told = streams[0].metrics
        count, prefill_s, decode_s = told.num_generation_tokens, told.prefill_s, told.decode_s
        whole_s = None if prefill_s is None or decode_s is None else prefill_s + decode_s
        times = {
            "time_to_first_token_ms": _ms(prefill_s),
            "generation_time_ms": _ms(decode_s),
            "queue_time_ms": _ms(told.queued_s),
            "mean_itl_ms": _ms(decode_s / (count - 1)) if decode_s is not None and count > 1 else None,
            "tokens_per_second": count / whole_s if whole_s else None,
        }
        return RequestTimes(**{name: unknown if value is None else value for name, value in times.items()})

    def no_usage(self) -> UnsetType | None:
        """The usage of an event without counts: null if a later event has them, else absent."""
        return None if self.include_usage else UNSET


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def usage_of(streams: Sequence[RequestStream]) -> Usage:
    """The exact usage: all tokens of the prompts, and all tokens that were sampled for them."""
    num_prompt = sum(len(stream.prompt.token_ids or ()) for stream in streams)
    num_output = sum(len(sequence.token_ids) for stream in streams for sequence in stream.sequences)
    cached = sum(stream.num_cached_tokens or 0 for stream in streams)
    return Usage(num_prompt, num_prompt + num_output, num_output, PromptTokensDetails(cached))


def usage_so_far(stream: RequestStream, num_output: int) -> Usage:
    """The usage of one unfinished output."""
    num_prompt = len(stream.prompt.token_ids or ())
    return Usage(num_prompt, num_prompt + num_output, num_output)


def prompt_is_told(stream: RequestStream) -> bool:
    """Whether all log-probabilities of the prompt have arrived, or none were requested.

    With n > 1 the core computes them for the first output, and another output may begin before it.
    """
    return stream.params.prompt_logprobs is None or stream.num_prompt_logprobs == len(stream.prompt.token_ids or ())


class TextEvent:
    """An event in which only the text changes: the rest is encoded once."""

    __slots__ = ("_parts",)

    def __init__(self, chunk_with_text: Any) -> None:
        """chunk_with_text: has `TextEvent.PLACE` wherever the text belongs."""
        self._parts = (b"data: " + _encode(chunk_with_text) + b"\n\n").split(_TEXT_JSON)

    PLACE = _TEXT

    def of(self, text: str) -> bytes:
        return _encode(text).join(self._parts)


_ENCODED_AT_ONCE = 256
"""Entries of a list that are encoded in one call; each may be a position's log-probabilities."""
_PIECE_BYTES = 128 << 10
_PLACE = f"\x00{uuid.uuid4().hex}\x00"
_PLACE_JSON = _encode(_PLACE)


def encoded(response: msgspec.Struct) -> list[bytes]:
    """The response as msgspec encodes it, in pieces, so that other threads run in between.

    Consumes the response's choices and long lists, since freeing one at once takes as long as encoding it.
    """
    pieces: list[bytes] = []
    waiting: list[bytes] = []
    num_bytes = 0
    for part in _encoded(response):
        waiting.append(part)
        num_bytes += len(part)
        if num_bytes > _PIECE_BYTES:
            pieces.append(b"".join(waiting))
            waiting, num_bytes = [], 0
    return [*pieces, b"".join(waiting)]


def _encoded(value: msgspec.Struct) -> Iterator[bytes]:
    """The encoded parts of a struct, which may have choices and long lists at any depth."""
    taken: list[list[Any]] = []
    _take_lists(value, taken)
    first, *others = _encode(value).split(_PLACE_JSON)
    yield first
    for inside, after in zip(taken, others, strict=True):
        inside.reverse()
        separator = b"["
        while inside:
            yield separator
            separator = b","
            if isinstance(inside[-1], CompletionChoice | ChatChoice):
                yield from _encoded(inside.pop())
                continue
            piece = inside[: -_ENCODED_AT_ONCE - 1 : -1]
            del inside[-_ENCODED_AT_ONCE:]
            yield _encode(piece)[1:-1]
        yield b"]"
        yield after


def _take_lists(value: msgspec.Struct, taken: list[list[Any]]) -> None:
    """Moves the lists that are encoded in pieces to `taken`, in order, and leaves a mark in their place."""
    for name in value.__struct_fields__:
        inside = getattr(value, name)
        if isinstance(inside, msgspec.Struct):
            _take_lists(inside, taken)
        elif isinstance(inside, list) and (name == "choices" or len(inside) > _ENCODED_AT_ONCE) and inside:
            taken.append(inside)
            setattr(value, name, _PLACE)


class OpenAIEvents:
    """The end of streams in OpenAI's APIs."""

    DONE = b"data: [DONE]\n\n"

    def failure(self, error: BaseException) -> bytes:
        return event(error_event(error)) + self.DONE


def event(chunk: Any) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"
