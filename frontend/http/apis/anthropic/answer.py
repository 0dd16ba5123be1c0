"""Answers of POST /v1/messages, Anthropic's API, and errors in its form.

An answer is written as content blocks, whole or as events:

    message_start, (content_block_start, content_block_delta ..., content_block_stop) for each block, message_delta,
    message_stop
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.frontend.client.request_stream import RequestStream, SequenceState
from headrace.frontend.http.apis.anthropic.tools import UNRESOLVED
from headrace.frontend.http.apis.openai.answer import AnswerContext, TextAnswer
from headrace.frontend.http.apis.responses.items import as_encrypted
from headrace.frontend.http.server.errors import ApiError, ContextLengthError
from headrace.frontend.request.message import call_id, num_reasoning_tokens
from headrace.frontend.request.outputs import CompletionOutput
from headrace.frontend.text.formats.events import AnswerPart
from headrace.frontend.text.formats.parser import OutputParser

SIGNATURE = "headrace:"
"""Prefix of the signatures of thinking blocks that this server wrote."""
UNSUPPORTED_THREAD = "thread_unsupported_request"
"""Anthropic's code of an error, at which clients send the whole conversation."""


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


class MessagesAnswer(TextAnswer):
    """Writes the response, whole or streamed, of a request with one output."""

    def __init__(self, context: AnswerContext, *, omits_thinking: bool, cached_block_tokens: int) -> None:
        """cached_block_tokens: tokens of the blocks in which prefixes are cached; 0 if none are."""
        super().__init__(context)
        self._calls_once = context.request.parallel_tool_calls is False
        self._cached_block_tokens, self._omits_thinking = cached_block_tokens, omits_thinking
        self._thoughts: list[str] = []
        self._num_closed = 0  # entries of _thoughts that are in closed blocks
        self._parser = self.new_parser() or OutputParser(None, None)
        self._began = False
        self._num_blocks, self._open = 0, ("", -1)  # of the open block: its kind, and the index of its tool call

    def whole(self) -> list[bytes]:
        (stream,) = self.streams
        (sequence,) = stream.sequences
        output = sequence.read(delta=False, tokenizer=stream.tokenizer)
        blocks: list[dict[str, Any]] = []
        for told in self._read(output):
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
        response = MessagesResponse(self.id, self.model, blocks, reason, sequence_text, usage)
        return [msgspec.json.encode(response)]

    def delta(self, stream: RequestStream, sequence: SequenceState) -> bytes:
        output = sequence.read(delta=True, tokenizer=stream.tokenizer)
        parts = [] if self._began else [self._start()]
        self._began = True
        for told in self._read(output):
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

    def _read(self, output: CompletionOutput) -> list[AnswerPart]:
        events = self._parser.read(output.text, output.finish_reason, output.stop_reason)
        return [each for each in events if each.call <= 0 or not self._calls_once]

    def _start(self) -> bytes:
        message = MessagesResponse(self.id, self.model, [], None, None, self._usage(0))
        return _event("message_start", message=message)

    def _block_of(self, told: AnswerPart) -> tuple[str, int]:
        return ("tool_use", told.call) if told.call >= 0 else ("thinking" if told.reasoning else "text", -1)

    def _events_of(self, told: AnswerPart) -> list[bytes]:
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
        if self._parser.num_calls and not self._parser.is_cut_by(stop_reason):
            return "tool_use", None
        return ("stop_sequence", stop_reason) if isinstance(stop_reason, str) else ("end_turn", None)

    def _signature(self, thinking: str) -> str:
        """Clients send back only signed thinking blocks. The signature holds the text if the block omits it."""
        return SIGNATURE + (as_encrypted(thinking) if self._omits_thinking else "")

    def _usage(self, num_output: int, *, ends: bool = False) -> MessagesUsage:
        """Anthropic's counts: input_tokens excludes tokens that come from the prefix cache, or are cached now."""
        (stream,) = self.streams
        num_prompt, cached, block = (
            len(stream.prompt.token_ids or ()),
            stream.num_cached_tokens or 0,
            self._cached_block_tokens,
        )
        # A block is cached once it is full, and an equal prompt computes its last token again.
        created = max(0, (num_prompt - 1) // block * block - cached) if block else 0
        usage = MessagesUsage(num_prompt - cached - created, num_output, cached, created)
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


_DETAILS = (UNSUPPORTED_THREAD, UNRESOLVED)
"""Codes of errors that Anthropic's clients find in the error's details."""


def error_body(error: ApiError) -> bytes:
    """An error in Anthropic's format."""
    kind, message = _ERROR_TYPES.get(error.status, "invalid_request_error"), error.body.message
    if isinstance(error, ContextLengthError):
        message = _too_long(error)
    told: dict[str, Any] = {"type": kind, "message": message}
    if error.body.code in _DETAILS:
        told["details"] = {"error_code": error.body.code}
    return msgspec.json.encode({"type": "error", "error": told})


def _too_long(error: ContextLengthError) -> str:
    """In Anthropic's words: agents read the numbers, and try again with fewer tokens or a shorter conversation."""
    if error.num_new:
        return (
            f"input length and `max_tokens` exceed context limit: {error.num_prompt} + {error.num_new} > "
            f"{error.limit}, decrease input length or `max_tokens` and try again"
        )
    return f"prompt is too long: {error.num_prompt} tokens > {error.limit - 1} maximum"
