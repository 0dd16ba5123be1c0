"""A lean HTTP client for load generation: keep-alive connections, event streams, and a cause for every failure.

A `Connection` handles one exchange at a time. The socket's callback passes bytes directly to the exchange's reader,
with the time of their arrival, so that no task switch delays a timestamp.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from headrace.core.options.option import HIDDEN
from headrace.ipc.failure import OptionError
from headrace.ipc.struct_types import threadsafe

REFUSED, UNREACHABLE, CONNECT_TIMEOUT, TLS = "connection refused", "host unreachable", "connect timeout", "TLS"
DROPPED, GARBAGE, STALLED, TIMEOUT = "connection dropped", "garbage", "stalled", "request timeout"
OUT_OF_FILES = "out of file descriptors"


class ExchangeError(Exception):
    """An exchange failed. `cause` is one of a few texts, for counting; `detail` describes this failure."""

    def __init__(self, cause: str, detail: str = "") -> None:
        super().__init__(f"{cause}: {detail}" if detail else cause)
        self.cause, self.detail = cause, detail


class Reader(Protocol):
    """Receives a response while it arrives. Times are those of time.perf_counter. May raise ExchangeError."""

    def on_status(self, status: int, headers: Mapping[bytes, bytes]) -> None: ...
    def on_body(self, data: bytes, now_s: float) -> None: ...


class Target:
    """A server's address, and the headers of every request."""

    def __init__(self, base_url: str, headers: Mapping[str, str], *, insecure: bool = False) -> None:
        """Raises OptionError for an invalid address, and for headers that cannot be sent."""
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError as error:
            raise OptionError(f"--base-url={base_url}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise OptionError(f"--base-url={base_url}: it must be like http://127.0.0.1:8000")
        self.url = base_url.rstrip("/").removesuffix("/v1")  # as OpenAI's clients are given it
        self.host, self.port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self.tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            self.tls = ssl.create_default_context()
            if insecure:
                self.tls.check_hostname, self.tls.verify_mode = False, ssl.CERT_NONE
        for name, value in headers.items():
            if not name or not (name + value).isprintable() or ":" in name:
                raise OptionError(f"--header={name}={HIDDEN}: it must be KEY=VALUE of printable characters")
        lines = {"Host": parts.netloc.rpartition("@")[2], "Accept": "text/event-stream, application/json", **headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    def post(self, path: str, body: bytes, more_headers: str = "") -> bytes:
        """A whole POST request. more_headers: header lines, each with its line break."""
        headers = self._headers + more_headers
        head = f"POST {self._path}{path} HTTP/1.1\r\n{headers}Content-Type: application/json\r\n"
        return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body

    def get(self, path: str) -> bytes:
        return f"GET {self._path}{path} HTTP/1.1\r\n{self._headers}\r\n".encode()


class Connection(asyncio.Protocol):
    """One connection. `exchange` sends a request and passes its response to a reader."""

    def __init__(self) -> None:
        self.last_heard_s = 0.0
        self.began_s = 0.0
        self.reusable = False
        self.has_served = False
        self._heard_any = False
        self._transport: asyncio.Transport | None = None
        self._reader: Reader | None = None
        self._done: asyncio.Future[None] | None = None
        self._parser: Any = None
        self._headers: dict[bytes, bytes] = {}
        self._body_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the methods, but is no subclass
        with contextlib.suppress(OSError, AttributeError):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def heard_nothing(self) -> bool:
        """Whether the last exchange received no byte of an answer."""
        return not self._heard_any

    async def exchange(self, request: bytes, reader: Reader) -> None:
        """Sends the request, and returns when the response is complete. Raises ExchangeError, and then closes the
        connection."""
        assert self._transport is not None
        self._reader, self._headers, self.reusable, self._heard_any = reader, {}, False, False
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self.began_s = self.last_heard_s = time.perf_counter()
        self._transport.write(request)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._reader = self._parser = None
        self.has_served = True

    def fail(self, error: ExchangeError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._body_s = self.last_heard_s = time.perf_counter()
        self._heard_any = True
        if self._parser is None:  # data without a request
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__ or error.__cause__
            self.fail(cause if isinstance(cause, ExchangeError) else ExchangeError(GARBAGE, repr(cause or error)))
        except httptools.HttpParserError as error:
            self.fail(ExchangeError(GARBAGE, f"not HTTP: {error}"))

    def eof_received(self) -> None:
        return None

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if self._parser is not None and not self._headers_end_body():
            with contextlib.suppress(Exception):  # the end of the connection ends the body
                self.on_message_complete()
                return
        self.fail(ExchangeError(DROPPED, str(error) if error else "the server closed it in mid-answer"))

    # Callbacks of httptools.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._reader is not None:
            self._reader.on_status(self._parser.get_status_code(), self._headers)

    def on_body(self, data: bytes) -> None:
        if self._reader is not None:
            self._reader.on_body(data, self._body_s)

    def on_message_complete(self) -> None:
        if self._parser is not None and self._parser.get_status_code() < 200:
            return  # an interim response
        self.reusable = self.is_open and self._parser is not None and self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _headers_end_body(self) -> bool:
        """False if the response has begun and its body ends only with the connection."""
        return not self._headers or b"content-length" in self._headers or b"transfer-encoding" in self._headers


class Pool:
    """Connections to one target, opened when needed and kept. Ends exchanges that stall or take too long."""

    def __init__(self, target: Target, *, connect_timeout_s: float, stall_timeout_s: float, request_timeout_s: float):
        self._target = target
        self._connect_timeout_s, self._stall_s, self._request_s = connect_timeout_s, stall_timeout_s, request_timeout_s
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._watch: asyncio.Task[None] | None = None

    async def send(self, request: bytes, reader: Reader) -> None:
        """One exchange, on a kept connection or a new one. Raises ExchangeError."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_exchanges())
        while True:
            connection = self._take_idle() or await self._connect()
            was_kept = connection.has_served
            self._busy.add(connection)
            try:
                await connection.exchange(request, reader)
            except ExchangeError as error:
                # A server may close a kept connection just as it is used again: the request is sent again.
                if error.cause == DROPPED and was_kept and connection.heard_nothing:
                    continue
                raise
            finally:
                self._busy.discard(connection)
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()
            return

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        for connection in [*self._idle, *self._busy]:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> Connection:
        target, loop = self._target, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(Connection, target.host, target.port, ssl=target.tls)
        except TimeoutError:
            raise ExchangeError(CONNECT_TIMEOUT, f"no connection within {self._connect_timeout_s:g} s") from None
        except ssl.SSLError as error:
            raise ExchangeError(TLS, str(error)) from None
        except socket.gaierror as error:
            raise ExchangeError(UNREACHABLE, f"{target.host}: {error.strerror}") from None
        except ConnectionRefusedError as error:
            raise ExchangeError(REFUSED, str(error)) from None
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise ExchangeError(OUT_OF_FILES, "raise the limit (ulimit -n), or set --max-concurrency") from None
            cause = DROPPED if isinstance(error, ConnectionError) else UNREACHABLE
            raise ExchangeError(cause, str(error)) from None
        return connection

    async def _watch_exchanges(self) -> None:
        """Ends exchanges that are past their deadlines. A periodic check of all costs less than a timer per event."""
        period_s = min(0.25, self._stall_s / 4, self._request_s / 4)
        while True:
            await asyncio.sleep(period_s)
            now_s = time.perf_counter()
            for connection in list(self._busy):
                if now_s - connection.last_heard_s > self._stall_s:
                    connection.fail(ExchangeError(STALLED, f"nothing came for {self._stall_s:g} s"))
                elif now_s - connection.began_s > self._request_s:
                    connection.fail(ExchangeError(TIMEOUT, f"not done after {self._request_s:g} s"))


class Whole:
    """A Reader that collects a small response that is not a stream."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""

    def on_status(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self.status = status

    def on_body(self, data: bytes, now_s: float) -> None:
        self.body += data


CUT_SHORT, NO_TOKENS, ERROR_EVENT = "cut short", "no tokens", "error event"
_MAX_ERROR_BYTES = 4000
_SHOWN = 300


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _ChunkChoice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_ChunkChoice] = []
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class CompletionStream:
    """A Reader of one answer of /v1/completions or /v1/chat/completions with `stream`.

    An event with a choice counts as a piece, as in `vllm bench serve`, but not one that has only the role.
    """

    __slots__ = (
        "_buffer", "_decoder", "_error_body", "_is_done", "_keep_text", "_last_s", "_status",
        "first_s", "gaps_s", "num_output_tokens", "num_pieces", "num_prompt_tokens", "on_piece", "text",
    )  # fmt: skip

    def __init__(self, decoder: msgspec.json.Decoder[_Chunk], *, keep_text: bool = False) -> None:
        self._decoder, self._keep_text = decoder, keep_text
        self._status = 0
        self._buffer = b""
        self._error_body = b""
        self._is_done = False
        self._last_s = 0.0
        self.first_s: float | None = None
        """When the first piece arrived (time.perf_counter)."""
        self.gaps_s: list[float] = []
        """Times between consecutive pieces."""
        self.num_pieces = 0
        self.num_output_tokens: int | None = None
        self.num_prompt_tokens: int | None = None
        """Both counts are the server's; None if it did not report them."""
        self.text: list[str] = []

    @property
    def last_s(self) -> float:
        """When the last piece arrived (time.perf_counter)."""
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
        """Must be called at the end of the response. Raises ExchangeError unless the answer was complete and valid."""
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


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


class WholeAnswer(Whole):
    """A Reader of one answer that is not a stream, of vectors or scores. It has no tokens, and so no first one."""

    first_s: float | None = None
    last_s = 0.0
    num_pieces = 0
    num_output_tokens: int | None = None
    num_prompt_tokens: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.gaps_s: list[float] = []
        self.text: list[str] = []
        self._parts: list[bytes] = []

    def on_body(self, data: bytes, now_s: float) -> None:
        self._parts.append(data)
        self.last_s = now_s

    def finish(self) -> None:
        """Must be called at the end of the response. Raises ExchangeError unless it is an answer."""
        self.body = b"".join(self._parts)
        if self.status != 200:
            raise ExchangeError(f"HTTP {self.status}", _sentence(self.body[:_MAX_ERROR_BYTES]))
        try:
            usage = msgspec.json.decode(self.body, type=threadsafe(_Answer)).usage
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ExchangeError(GARBAGE, f"no answer of the API ({error}): {_shown(self.body[:_SHOWN])}") from None
        self.num_prompt_tokens = None if usage is None else usage.prompt_tokens


def event_decoder() -> msgspec.json.Decoder[_Chunk]:
    return msgspec.json.Decoder(threadsafe(_Chunk))


def _sentence(body: bytes) -> str:
    """The message in an error's body: OpenAI's `error.message`, or else the body's beginning."""
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
