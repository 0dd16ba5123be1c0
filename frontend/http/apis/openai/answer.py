"""What the answers of completions and chat completions have in common: constants, usage, and encoded events."""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from headrace.frontend.client.request_stream import RequestStream
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.http.apis.openai.bodies import (
    ChatChoice,
    CompletionChoice,
    PromptTokensDetails,
    RequestTimes,
    TokenSpelling,
    Usage,
)
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.server.errors import error_event
from headrace.frontend.http.server.generation import Answer
from headrace.frontend.text.formats.parser import OutputParser

TEXT = "\x00text\x00"
"""Stands for the text in a chunk that `text_event` encodes."""
_TEXT_JSON = msgspec.json.encode(TEXT)
encode = msgspec.json.Encoder().encode
TextEvent = list[bytes]
"""An encoded event in which only the text changes: what is around it. `encode(text).join` makes the event."""


class AnswerContext(NamedTuple):
    """What an answer follows from, in every API."""

    request: Any
    """A GenerationRequest of the kind that the answer is for."""
    id: str
    engine: Engine
    options: ServeOptions
    make_parser: Callable[[], OutputParser] | None = None
    """Creates the parser of one output; None if it cannot contain reasoning or tool calls."""
    names_tool: bool = False
    """Whether tool_choice names the tool to call."""


class TextAnswer(Answer):
    """Writes generated text. Has what is the same in the whole response and in each of its events."""

    DONE = b"data: [DONE]\n\n"

    def __init__(self, context: AnswerContext) -> None:
        """Keeps nothing of the request but what the response depends on: its messages may be large."""
        request, id, engine, options, self.make_parser, self.names_tool = context
        self._tells_times = options.enable_per_request_metrics
        self.id, self.model, self.created = id, request.model or engine.names[0], int(time.time())
        stream_options = request.stream_options
        self.include_usage = stream_options is not None and stream_options.include_usage
        self.continuous_usage = (
            stream_options is not None and self.include_usage and stream_options.continuous_usage_stats
        )
        self.return_token_ids = bool(request.return_token_ids)
        self.asks_prompt_logprobs = request.prompt_logprobs is not None
        self._spells_ids = bool(request.return_tokens_as_token_ids)
        self.has_reasoning = getattr(request, "include_reasoning", None) is not False  # completions have none
        self.tokenizer = engine.connected.tokenizer

    @functools.cached_property
    def spell(self) -> TokenSpelling:
        """How tokens are written in log-probabilities."""
        return TokenSpelling(self.tokenizer, as_ids=self._spells_ids)

    def new_parser(self) -> OutputParser | None:
        return None if self.make_parser is None else self.make_parser()

    def failure(self, error: BaseException) -> bytes:
        return event(error_event(error)) + self.DONE

    def times(self, unknown: UnsetType | None = None) -> RequestTimes | UnsetType:
        """The times of an ended response; UNSET if they are off or there are several outputs, which share no times.

        unknown: the value of a time that is not known.
        """
        if not self._tells_times or len(self.streams) != 1 or self.streams[0].params.n != 1:
            return UNSET
        told = self.streams[0].metrics
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


def prompt_logprobs_are_complete(stream: RequestStream) -> bool:
    """Whether all log-probabilities of the prompt have arrived, or none were requested.

    With n > 1 the core computes them for the first output, and another output may begin before it.
    """
    return stream.params.prompt_logprobs is None or stream.num_prompt_logprobs == len(stream.prompt.token_ids or ())


def text_event(chunk: Any) -> TextEvent:
    """chunk: has TEXT wherever the text belongs."""
    return event(chunk).split(_TEXT_JSON)


_ENCODED_AT_ONCE = 256
"""Entries of a list that are encoded in one call; each may be a position's log-probabilities."""
_PIECE_BYTES = 128 << 10
_PLACE = f"\x00{uuid.uuid4().hex}\x00"
_PLACE_JSON = encode(_PLACE)


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
    first, *others = encode(value).split(_PLACE_JSON)
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
            yield encode(piece)[1:-1]
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


def event(chunk: Any) -> bytes:
    return b"data: " + encode(chunk) + b"\n\n"
