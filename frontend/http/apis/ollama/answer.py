"""Answers of Ollama's /api/chat and /api/generate: one JSON object, or lines of JSON objects, and errors in its form.

The last line has the counts:

    {"message": {"content": "Yes"}, "done": false} ... {"message": {"content": ""}, "done": true, "eval_count": 7}
"""

from __future__ import annotations

import datetime
from typing import Any

import msgspec

from headrace.frontend.client.request_stream import RequestStream, SequenceState
from headrace.frontend.http.apis.anthropic.answer import call_input
from headrace.frontend.http.apis.openai.answer import AnswerContext, TextAnswer
from headrace.frontend.http.apis.openai.bodies import TokenLogprob, chat_logprobs
from headrace.frontend.http.server.errors import ApiError
from headrace.frontend.http.server.event_stream import StreamForm
from headrace.frontend.request.message import call_id
from headrace.frontend.request.outputs import CompletionOutput
from headrace.frontend.text.formats.events import AnswerPart
from headrace.frontend.text.formats.parser import OutputParser

LINES = StreamForm([(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-cache")], keep_alive=b"")


class OllamaFunction(msgspec.Struct):
    name: str
    arguments: Any


class OllamaCall(msgspec.Struct):
    id: str
    function: OllamaFunction


class OllamaAnswerMessage(msgspec.Struct, omit_defaults=True):
    role: str
    content: str
    thinking: str = ""
    tool_calls: list[OllamaCall] = []


class OllamaLine(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The whole answer, or a part of it; the last one also has counts, and durations in nanoseconds."""

    model: str
    created_at: str
    done: bool
    logprobs: list[TokenLogprob] | None = None
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaChatLine(OllamaLine):
    message: OllamaAnswerMessage


class OllamaGenerateLine(OllamaLine):
    response: str
    thinking: str = ""
    tool_calls: list[OllamaCall] = []


class OllamaAnswer(TextAnswer):
    """Writes the response, whole or streamed, of a request with one output.

    A tool call is written once it is complete, since Ollama sends its arguments as an object.
    """

    form = LINES

    def __init__(self, context: AnswerContext, *, is_chat: bool, num_top_logprobs: int | None) -> None:
        """is_chat: write text within a message. num_top_logprobs: None if no log-probabilities were requested."""
        super().__init__(context)
        self._is_chat, self._num_top = is_chat, num_top_logprobs
        self._parser = self.new_parser() or OutputParser(None, None)
        self._call: tuple[AnswerPart, list[str]] | None = None
        """The tool call whose arguments are incomplete, and the parts of its arguments so far."""
        self._logprobs: list[TokenLogprob] = []
        """Log-probabilities of tokens that have not been written yet."""

    def whole(self) -> list[bytes]:
        (stream,) = self.streams
        (sequence,) = stream.sequences
        output = sequence.read(delta=False, tokenizer=stream.tokenizer)
        told = OllamaAnswerMessage("assistant", "")
        for part in self._read(output):
            told.content += part.content
            told.thinking += part.thinking
            told.tool_calls = [*told.tool_calls, *part.tool_calls]
        return [msgspec.json.encode(self._line(told, output, sequence))]

    def delta(self, stream: RequestStream, sequence: SequenceState) -> bytes:
        output = sequence.read(delta=True, tokenizer=stream.tokenizer)
        lines = [self._line(part) for part in self._read(output)]
        if output.finish_reason is not None:
            lines.append(self._line(OllamaAnswerMessage("assistant", ""), output, sequence))
        return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)

    def end(self) -> bytes:
        return b""

    def failure(self, error: BaseException) -> bytes:
        return error_body(ApiError.of(error)) + b"\n"

    def _read(self, output: CompletionOutput) -> list[OllamaAnswerMessage]:
        """The new output, each part of one kind: text, thinking or a tool call."""
        if output.logprobs is not None and self._num_top is not None:
            told = chat_logprobs(output.token_ids, output.logprobs, self.spell, self._num_top)
            self._logprobs += told.content
        parts = []
        for event in self._parser.read(output.text, output.finish_reason, output.stop_reason):
            if event.call >= 0 and not event.name:
                assert self._call is not None, "its name came before"
                self._call[1].append(event.arguments)
                continue
            parts += self._complete_call()
            if event.name:
                self._call = event, [event.arguments]
            else:
                parts.append(OllamaAnswerMessage("assistant", event.content, thinking=event.reasoning))
        return parts + (self._complete_call() if output.finish_reason is not None else [])

    def _complete_call(self) -> list[OllamaAnswerMessage]:
        if self._call is None:
            return []
        (event, arguments), self._call = self._call, None
        function = OllamaFunction(event.name, call_input("".join(arguments)))
        return [OllamaAnswerMessage("assistant", "", tool_calls=[OllamaCall(call_id(event), function)])]

    def _line(
        self, part: OllamaAnswerMessage, output: CompletionOutput | None = None, sequence: SequenceState | None = None
    ) -> OllamaLine:
        """output and sequence: only for the last line, which has the counts."""
        line = line_of(self.model, part, is_chat=self._is_chat)
        line.logprobs, self._logprobs = self._logprobs or None, []
        if output is not None and sequence is not None:
            (stream,) = self.streams
            total_s, first_s = stream.metrics.total_s or 0.0, stream.first_token_s or 0.0
            line.done, line.done_reason = True, output.finish_reason
            line.total_duration, line.load_duration = _nanoseconds(total_s), 0
            line.prompt_eval_count, line.prompt_eval_duration = (
                len(stream.prompt.token_ids or ()),
                _nanoseconds(first_s),
            )
            line.eval_count, line.eval_duration = len(sequence.token_ids), _nanoseconds(total_s - first_s)
        return line


def line_of(model: str, part: OllamaAnswerMessage, *, is_chat: bool) -> OllamaLine:
    now = time_text(datetime.datetime.now(datetime.UTC).timestamp())
    if is_chat:
        return OllamaChatLine(model=model, created_at=now, done=False, message=part)
    return OllamaGenerateLine(
        model=model,
        created_at=now,
        done=False,
        response=part.content,
        thinking=part.thinking,
        tool_calls=part.tool_calls,
    )


def time_text(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)


def error_body(error: ApiError) -> bytes:
    """An error in Ollama's format."""
    return msgspec.json.encode({"error": error.body.message})
