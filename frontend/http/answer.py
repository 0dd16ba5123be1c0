"""What both completion APIs answer with in common: ids, times, usage, and events with their fixed parts made once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from headrace.frontend.client.request import RequestStream
from headrace.frontend.http.logprobs import TokenSpelling
from headrace.frontend.http.requests import GenerationRequest
from headrace.frontend.http.responses import PromptTokensDetails, Usage
from headrace.frontend.text.tokenizer import Tokenizer

_TEXT = "\x00text\x00"
_TEXT_JSON = msgspec.json.encode(_TEXT)
_encode = msgspec.json.Encoder().encode


class Answer:
    """One response's constants: the same in its whole form and in each of its events."""

    def __init__(self, request: GenerationRequest, id: str, model: str, tokenizer: Tokenizer | None) -> None:
        """`model` is the name that the answer gives."""
        self.id, self.model, self.created = id, model, int(time.time())
        options = request.stream_options
        self.include_usage = options is not None and options.include_usage
        self.continuous_usage = self.include_usage and options is not None and options.continuous_usage_stats
        self.return_token_ids = bool(request.return_token_ids)
        self.tokenizer = tokenizer
        self.spell = TokenSpelling(tokenizer, as_ids=bool(request.return_tokens_as_token_ids))

    def no_usage(self) -> UnsetType | None:
        """The usage field of an event that does not count: null where a later one does, absent where none does."""
        return None if self.include_usage else UNSET


def usage_of(streams: Sequence[RequestStream]) -> Usage:
    """Exact: every token of the prompts, and every token that was sampled for them."""
    num_prompt = sum(len(stream.prompt.token_ids or ()) for stream in streams)
    num_output = sum(len(sequence.token_ids) for stream in streams for sequence in stream.sequences)
    cached = sum(stream.num_cached_tokens or 0 for stream in streams)
    return Usage(num_prompt, num_prompt + num_output, num_output, PromptTokensDetails(cached))


def usage_so_far(stream: RequestStream, num_output: int) -> Usage:
    """Of one output while it grows."""
    num_prompt = len(stream.prompt.token_ids or ())
    return Usage(num_prompt, num_prompt + num_output, num_output)


def prompt_is_told(stream: RequestStream) -> bool:
    """Whether the log-probabilities of the whole prompt have come, where they were asked for.

    With n > 1 the core computes them for the first output, and another may begin before it.
    """
    return stream.prompt_logprobs is None or len(stream.prompt_logprobs) == len(stream.prompt.token_ids or ())


class TextEvent:
    """An event of which only the text changes: everything around it is encoded once."""

    __slots__ = ("_head", "_tail")

    def __init__(self, chunk_with_text: Any) -> None:
        """Of a chunk that holds `TextEvent.PLACE` where the text goes."""
        head, tail = _encode(chunk_with_text).split(_TEXT_JSON)
        self._head, self._tail = b"data: " + head, tail + b"\n\n"

    PLACE = _TEXT

    def of(self, text: str) -> bytes:
        return self._head + _encode(text) + self._tail


def event(chunk: Any) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"
