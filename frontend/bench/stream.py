"""Reads one streamed completion: when each piece came, how many tokens there were, and what was wrong with it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headrace.frontend.bench.http_client import GARBAGE, ExchangeError

CUT_SHORT, NO_TOKENS, ERROR_EVENT = "cut short", "no tokens", "error event"
_MAX_ERROR_BYTES = 4000
_SHOWN = 300


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class CompletionStream:
    """A Reader of one answer of /v1/completions or /v1/chat/completions with `stream`.

    An event with a choice is a piece, as `vllm bench serve` counts them; one that only tells the role is none.
    """

    __slots__ = (
        "_buffer", "_decoder", "_error_body", "_is_done", "_keep_text", "_last_s", "_status",
        "first_s", "gaps_s", "num_output_tokens", "num_pieces", "num_prompt_tokens", "on_piece", "text",
    )  # fmt: skip

    def __init__(self, decoder: msgspec.json.Decoder[_Event], *, keep_text: bool = False) -> None:
        self._decoder, self._keep_text = decoder, keep_text
        self._status = 0
        self._buffer = b""
        self._error_body = b""
        self._is_done = False
        self._last_s = 0.0
        self.first_s: float | None = None
        """When the first piece came (time.perf_counter)."""
        self.gaps_s: list[float] = []
        """Between one piece and the next."""
        self.num_pieces = 0
        self.num_output_tokens: int | None = None
        self.num_prompt_tokens: int | None = None
        """As the server counted; None when it did not say."""
        self.text: list[str] = []

    @property
    def last_s(self) -> float:
        """When the last piece came."""
        return self._last_s

    def on_status(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self._status = status
        kind = headers.get(b"content-type", b"").lower()
        if status == 200 and b"json" in kind:
            raise ExchangeError(GARBAGE, "it answered with JSON where an event stream was asked for")

    def on_body(self, data: bytes, now_s: float) -> None:
        if self._status != 200:
            self._error_body = (self._error_body + data)[:_MAX_ERROR_BYTES]
            return
        self._buffer += data
        if b"\r" in data:
            self._buffer = self._buffer.replace(b"\r\n", b"\n")
        *events, self._buffer = self._buffer.split(b"\n\n")
        for event in events:
            self._on_event(event, now_s)

    def finish(self) -> None:
        """To be called at the end of the response. Raises ExchangeError unless it was a whole and proper answer."""
        if self._status != 200:
            raise ExchangeError(f"HTTP {self._status}", _sentence(self._error_body))
        if self._buffer.strip():
            self._on_event(self._buffer, self._last_s)
        if self.first_s is None:
            raise ExchangeError(NO_TOKENS, "the stream ended without a single piece")
        if not self._is_done:
            raise ExchangeError(CUT_SHORT, f"the stream ended after {self.num_pieces} pieces, without [DONE]")

    def _on_event(self, event: bytes, now_s: float) -> None:
        for line in event.split(b"\n"):
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == b"[DONE]":
                    self._is_done = True
                else:
                    self._on_data(data, now_s)
            elif line and not line.startswith((b":", b"event:", b"id:", b"retry:")):
                raise ExchangeError(GARBAGE, f"no line of an event stream: {_shown(line)}")

    def _on_data(self, data: bytes, now_s: float) -> None:
        try:
            event = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ExchangeError(GARBAGE, f"no event of the API ({error}): {_shown(data)}") from None
        if event.error and bytes(event.error) != b"null":
            raise ExchangeError(ERROR_EVENT, _sentence(data))
        if event.usage is not None:
            if event.usage.completion_tokens is not None:
                self.num_output_tokens = event.usage.completion_tokens
            if event.usage.prompt_tokens is not None:
                self.num_prompt_tokens = event.usage.prompt_tokens
        if not event.choices:
            return
        choice = event.choices[0]
        text = choice.text
        if choice.delta is not None:
            text = choice.delta.content or choice.delta.reasoning_content or choice.delta.reasoning
            if not text:
                return
        if self._keep_text and text:
            self.text.append(text)
        if self.first_s is None:
            self.first_s = now_s
        else:
            self.gaps_s.append(now_s - self._last_s)
        self._last_s = now_s
        self.num_pieces += 1


def event_decoder() -> msgspec.json.Decoder[_Event]:
    return msgspec.json.Decoder(_Event)


def _sentence(body: bytes) -> str:
    """What an error's body says: OpenAI's `error.message`, or its beginning."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _shown(body)
    error = decoded.get("error", decoded) if isinstance(decoded, dict) else decoded
    message = error.get("message", error.get("detail")) if isinstance(error, dict) else error
    return _shown(str(message or decoded).encode())


def _shown(data: bytes) -> str:
    text = data.decode("utf-8", "replace").strip()
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
