"""uvicorn's HTTP connection, with limits on time and size, and a way for streams to write without a task.

The events of streams are written from the engine client's callback, thousands per second. An ASGI `send` for each would
cost a task switch and a dictionary; `write_chunk` costs one write. It is used only between the start and the end of a
response, which both go through ASGI.

All bytes outside bodies are counted: headers, trailers, chunk extensions. Data that arrives while a request is being
answered is buffered unparsed; past MAX_HEADER_BYTES of it, reading pauses.

A client that closes its sending side after a request may still read the answer, or may have left: TCP tells both in the
same way. So the connection stays open, and something that every client skips (an interim response, or a stream's
comment) is written from time to time: a client that has left resets the connection.

While the server drains, the last response to what has arrived says `Connection: close`. An idle connection stays open
for a moment, since closing it would lose a request that is on its way: a proxy resends no POST that it has sent once.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState as UvicornState

from headrace.frontend.http.server.errors import ApiError, unavailable
from headrace.ipc.process.resources import file_limit

logger = logging.getLogger(__name__)
EXTENSION, HOSTS = "headrace.connection", "headrace.hosts"
"""In a scope's extensions: the connection, and each HOST[:PORT] that the request names, in its header Host or a request
target in absolute form (RFC 9112, 3.2.2)."""
MOST_SPARE_FILES = 64
_SAYS_FULL_EVERY_S = 10.0
MAX_HEADER_BYTES = 64 << 10
_TOO_LARGE = f"the {{what}} are larger than {MAX_HEADER_BYTES} bytes"
MAX_PIPELINED = 16
"""Most pipelined requests of one connection that may wait while an earlier one is answered."""
DISCARD_S = 5.0
"""How long what a client sends after a refusal is read and discarded: closing at once would reset the connection, and
the client would lose the answer."""
MOST_JOINED_BYTES = 64 << 10
"""Size up to which the first part of a body is copied to leave with the head."""
_FIRST_PROBE_S, _LONGEST_PROBE_S = 0.02, 5.0
"""Time between two writes to a client that has closed its sending side; doubled each time."""
_NO_MORE_TIME = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.SERVICE_UNAVAILABLE)
_UPGRADE_HEADERS = (b"upgrade", b"connection", b"http2-settings")


class Connections(UvicornState):
    """What the connections of a server share."""

    is_draining = False
    _said_full_s = -math.inf
    _dated_s = 0

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        """Those of each response: the date, made when it is asked for, as an idle server has no use for a clock."""
        if (now_s := int(time.time())) != self._dated_s:
            self._dated_s, self._dated = now_s, [(b"date", formatdate(now_s, usegmt=True).encode())]
        return self._dated

    @default_headers.setter
    def default_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._dated = headers

    def is_full(self, descriptor: int) -> bool:
        """Whether a connection with this file descriptor, the lowest that was free, takes one of those that are kept
        for other uses. Logs it now and then."""
        limit = file_limit()
        spare = min(MOST_SPARE_FILES, limit // 4)
        if descriptor < limit - spare:
            return False
        now_s = time.monotonic()
        if now_s - self._said_full_s > _SAYS_FULL_EVERY_S:
            self._said_full_s = now_s
            logger.warning(
                "%d connections are open, and this process may have %d files (RLIMIT_NOFILE), of which %d are kept for "
                "engines, stores and logs: further connections get a 503. Raise the hard limit: ulimit -Hn, systemd's "
                "LimitNOFILE, or --ulimit nofile of containers",
                *(len(self.connections), limit, spare),
            )
        return True

    def drain(self) -> None:
        """From now on responses close their connections, but for those that have begun already."""
        self.is_draining = True
        for each in self.connections:
            if isinstance(each, Connection):
                each.close_after_last()

    @property
    def have_requests(self) -> bool:
        """Whether a request is arriving, waiting or being answered on any of them."""
        return any(isinstance(each, Connection) and each.has_request for each in self.connections)


class Connection(HttpToolsProtocol):
    """One client's connection. A class attribute of a subclass sets its limits (see `with_limits`)."""

    read_timeout_s = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.on_writable: Callable[[], None] | None = None
        self.on_half_closed: Callable[[], None] | None = None
        """Writes something that the client skips: called while a response that has begun goes to a client that has
        closed its sending side."""
        self._probe_timer: asyncio.TimerHandle | None = None
        self._has_eof = False
        self._num_unframed_bytes = 0  # of headers, trailers and the like, since the last body data
        self._is_in_headers = self._is_in_body = False
        self._ahead = bytearray()  # received while a request was being answered
        self._header_timer: asyncio.TimerHandle | None = None
        self._reader_timer: asyncio.TimerHandle | None = None
        self._discard_timer: asyncio.TimerHandle | None = None  # set once a refusal has been written
        self._answering: RequestResponseCycle | None = None
        """The request whose handler began last; `cycle` is the one that was parsed last, which may be a later one."""
        self._on_gone: Callable[[], None] | None = None
        self._held: HeldHead | None = None
        """Of `_answering`'s response."""
        self._is_last_closing = False
        """`_answering` closes the connection because the server drains, not because its client asked for that."""
        self.refusal: ApiError | None = None
        """The error because of which nothing more is read from this connection."""
        self._await_headers()
        socket = transport.get_extra_info("socket")
        state = self.server_state
        self._shared = state if isinstance(state, Connections) else Connections()
        if socket is not None and self._shared.is_full(socket.fileno()):
            self._refuse(unavailable("this server has as many connections as it may", code="too_many_connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_are_here()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
        if self._probe_timer is not None:
            self._probe_timer.cancel()
        if self._discard_timer is not None:
            self._discard_timer.cancel()
        self._ahead.clear()
        self.on_writable = self.on_half_closed = None
        if self._answering is not None:
            self._disconnect(self._answering)
        super().connection_lost(exc)
        # uvicorn leaves this timer of a connection that was reset, and with it everything that the connection holds.
        self._unset_keepalive_if_required()

    def _disconnect(self, cycle: RequestResponseCycle) -> None:
        """Marks the client as gone: what the handler still writes is discarded, and its waits for data end."""
        if not cycle.response_complete:
            cycle.disconnected = True
        cycle.message_event.set()
        if cycle is self._answering:
            self._tell_gone()

    @property
    def has_whole_body(self) -> bool:
        """Whether the request that is being answered has arrived in full."""
        return self._answering is not None and not self._answering.more_body

    def watch(self, on_gone: Callable[[], None] | None) -> None:
        """Calls `on_gone` once the client of the request that is being answered has disconnected. None: no longer."""
        self._on_gone = on_gone
        if on_gone is None or self._answering is None:
            return
        self.flow.resume_reading()  # which a large body may have paused
        if self._answering.disconnected:
            self._tell_gone()

    def _tell_gone(self) -> None:
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            on_gone()

    @property
    def has_request(self) -> bool:
        """Whether a request is arriving, waiting or being answered."""
        if self._discard_timer is not None:
            return False
        is_in_headers = self._header_timer is not None and self._num_unframed_bytes > 0
        return is_in_headers or bool(self._ahead) or (self.cycle is not None and not self.cycle.response_complete)

    def close_after_last(self) -> None:
        """Lets the response to the last request that has arrived say that the connection closes, unless it has begun:
        then the next request is answered."""
        cycle = self._answering
        if cycle is None or cycle.response_started:
            return
        if cycle.keep_alive and not (self.pipeline or self._ahead):
            cycle.keep_alive, self._is_last_closing = False, True
        elif self._is_last_closing and self.pipeline:  # parsed with the one before it
            cycle.keep_alive, self._is_last_closing = True, False

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client has closed its sending side. If its request is incomplete, it can still read the error, and if it
        is complete, the response. Returns whether the connection stays open."""
        if self._discard_timer is not None:
            return False  # it has sent all that had to be discarded
        is_in_headers = self._header_timer is not None and self._num_unframed_bytes > 0
        if is_in_headers or self._is_in_body:
            self._refuse(ApiError(400, "the connection was closed before the request was complete"))
        self._has_eof = self._is_answering and not self.transport.is_closing()
        if self._has_eof:
            self._probe(_FIRST_PROBE_S)
        return self._has_eof

    def _probe(self, pause_s: float) -> None:
        """Writes to a client that may have left, now and again after pauses."""
        cycle = self._answering
        if self.transport.is_closing() or cycle is None:
            return
        if cycle.response_started:
            if self.on_half_closed is not None and not cycle.response_complete:
                self.on_half_closed()
        elif cycle.scope["http_version"] == "1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._probe_timer = self.loop.call_later(pause_s, self._probe, min(2 * pause_s, _LONGEST_PROBE_S))

    def data_received(self, data: bytes) -> None:
        if self.refusal is not None:
            return  # it is written after the responses before it
        self._unset_keepalive_if_required()
        if not self._ahead and not self._is_answering:
            self._parse(data)
            return
        self._ahead += data
        if len(self._ahead) > MAX_HEADER_BYTES:
            self.flow.pause_reading()

    @property
    def _is_answering(self) -> bool:
        """A request has arrived in full, and its response is not complete."""
        return self.cycle is not None and not self.cycle.more_body and not self.cycle.response_complete

    def _parse(self, data: bytes) -> None:
        if self._header_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_headers()
        self._num_unframed_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._parse_without_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            self._refuse(self.refusal or self._parse_error(error))
            return
        if self._num_unframed_bytes > MAX_HEADER_BYTES:
            what = "trailers or chunk extensions" if self._is_in_body else "headers"
            self._refuse(ApiError(431, _TOO_LARGE.format(what=what)))

    def _parse_error(self, error: httptools.HttpParserError) -> ApiError:
        what = "the end of the request's body cannot be told" if self._is_in_body else "this is not an HTTP request"
        is_ours = isinstance(error, httptools.HttpParserCallbackError)  # its text means nothing to a client
        return ApiError(400, what if is_ours else f"{what}: {error}")

    def _parse_without_upgrade(self, rest: bytes) -> None:
        """Parses a request for a protocol upgrade again, without its upgrade headers. rest: its body.

        A server may ignore Upgrade (RFC 9110, 7.8), but the parser cannot: it would skip the body.
        """
        method, url, headers = self.scope["method"], self.url, self.headers
        self.parser = httptools.HttpRequestParser(self)
        kept = [b"%b: %b\r\n" % header for header in headers if header[0] not in _UPGRADE_HEADERS]
        if any(name == b"connection" and b"close" in value.lower() for name, value in headers):
            kept.append(b"connection: close\r\n")
        self._parse(b"%b %b HTTP/1.1\r\n%b\r\n%b" % (method.encode(), url, b"".join(kept), rest))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_headers = True
        self._num_header_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._num_header_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_headers:  # no route reads trailers
            self._num_header_bytes += len(name) + len(value) + len(b": \r\n")
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._headers_are_here()
        self._num_unframed_bytes = 0
        self._is_in_headers = False
        hosts = self._check_headers()
        if self.parser.should_upgrade():
            self.scope["method"] = self.parser.get_method().decode("ascii")
            return
        if not self.url.startswith(b"/") and (authority := _authority(self.url)) is not None:
            hosts.append(authority)
        extensions: dict[str, Any] = {EXTENSION: self, HOSTS: hosts}
        self.scope["extensions"] = extensions
        super().on_headers_complete()
        self._is_in_body = True
        if self._shared.is_draining:
            self.close_after_last()

    def _check_headers(self) -> list[str]:
        """Returns the value of the header Host, if there is one."""
        if self._num_header_bytes > MAX_HEADER_BYTES:  # all in one read, else `_parse` has counted them
            self._stop_parsing(431, _TOO_LARGE.format(what="headers"))
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._stop_parsing(505, "HTTP/1.1 is spoken here")
        hosts: list[str] = []
        codings: list[bytes] = []
        for name, value in self.headers:
            if name == b"host":
                hosts.append(value.decode("latin-1"))
            elif name == b"transfer-encoding":
                codings.append(value.strip().lower())
        if len(hosts) > 1 or (not hosts and version == "1.1"):
            self._stop_parsing(400, "a request has one Host header")
        # Request smuggling: a proxy that delimits a body differently would miss a request, so only one way is accepted.
        if codings and version == "1.0":
            self._stop_parsing(400, "HTTP/1.0 has no Transfer-Encoding")
        if codings not in ([], [b"chunked"]):
            self._stop_parsing(501, "chunked is the only Transfer-Encoding that is known here")
        if self.parser.get_method() == b"CONNECT":
            self._stop_parsing(405, "this is no proxy")
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop_parsing(429, f"more than {MAX_PIPELINED} requests wait on this connection")
        return hosts

    def _stop_parsing(self, status: int, message: str) -> None:
        self.refusal = ApiError(status, message)
        raise self.refusal

    def on_body(self, body: bytes) -> None:
        if body:
            self._num_unframed_bytes = 0
        if self.cycle is not None:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_body = False
        if self.cycle is not None and not self.parser.should_upgrade():
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering, self._is_last_closing = cycle, False
        if self._shared.is_draining:
            self.close_after_last()
        super()._start_asgi_task(cycle, app if cycle.scope["http_version"] == "1.1" else _WithoutChunks(cycle, app))

    def on_response_complete(self) -> None:
        is_last = not self.pipeline
        if self._held is not None:  # still with the head in it after a HEAD request
            self._held.flush()
            self._held = None
        super().on_response_complete()
        if self.refusal is not None:
            if is_last:
                self._write_refusal(self.refusal)
        elif self._ahead:
            self.loop.call_soon(self._parse_ahead)
        elif self._has_eof and is_last:
            self.transport.close()

    def _parse_ahead(self) -> None:
        if self.transport.is_closing() or self._is_answering:
            return
        data, self._ahead = bytes(self._ahead), bytearray()
        self._unset_keepalive_if_required()
        self._parse(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None
        if self.on_writable is not None:
            self.on_writable()

    def hold_head(self) -> None:
        """Lets the head of the response that begins now leave with the first part of its body, which follows at once:
        one call of the system, which wakes the client once."""
        cycle: Any = self._answering
        if cycle is not None:
            cycle.transport = self._held = HeldHead(self.transport)

    def write_chunk(self, data: bytes) -> None:
        """Writes a part of a response that has begun and has no length. Never blocks: see `congested`."""
        if not self.transport.is_closing():
            is_chunked = self._answering is not None and self._answering.chunked_encoding
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if is_chunked else data)

    @property
    def congested(self) -> bool:
        """The client reads too slowly: more data would pile up in memory. `on_writable` is called when that ends."""
        return bool(self.flow.write_paused)

    def _await_reader(self) -> None:
        self._reader_timer = self.loop.call_later(
            self.read_timeout_s, self._look_at_reader, self.transport.get_write_buffer_size()
        )

    def _look_at_reader(self, num_bytes_before: int) -> None:
        """Aborts the connection of a client that has read nothing since the last look."""
        if self.transport.get_write_buffer_size() < num_bytes_before:
            self._await_reader()
        else:
            self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # closing would wait for a client that does not read
        else:
            super().timeout_keep_alive_handler()

    def _await_headers(self) -> None:
        self._num_unframed_bytes = 0
        self._header_timer = self.loop.call_later(self.read_timeout_s, self._headers_are_late)

    def _headers_are_here(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_are_late(self) -> None:
        self._header_timer = None
        if self.transport.is_closing():
            return
        if self._num_unframed_bytes == 0:  # the client has sent nothing
            self.transport.close()
        else:
            self._refuse(ApiError(408, f"the headers of the request took longer than {self.read_timeout_s:g} s"))

    def _refuse(self, refusal: ApiError) -> None:
        """Answers an invalid or incomplete request with an error, after the requests before it, and closes."""
        self._headers_are_here()
        if self.transport.is_closing():
            return
        self.refusal = refusal
        broken = self.cycle if self._is_in_body else None
        if broken is not None and broken.response_started:  # its handler has begun to answer already
            self.transport.close()
            return
        if broken is not None:
            self._disconnect(broken)
            if self._answering is not broken:
                self.pipeline.popleft()  # the last one received
        answering = self._answering
        if answering is None or answering is broken or answering.response_complete:
            self._write_refusal(refusal)

    def _write_refusal(self, refusal: ApiError) -> None:
        if self.transport.is_closing():
            return
        body = refusal.json()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[refusal.status] + head + body)
        # A client that was too slow, or one connection too many, gets no more time. TLS cannot close one side alone.
        if refusal.status in _NO_MORE_TIME or self._has_eof or not self.transport.can_write_eof():
            self.transport.close()
            return
        self._ahead.clear()
        self.flow.resume_reading()
        self.transport.write_eof()
        self._discard_timer = self.loop.call_later(DISCARD_S, self.transport.close)


class HeldHead:
    """What a response's cycle uses of a transport. What is written first waits for what is written next."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.is_closing = transport.is_closing
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        if self._head is None:
            self._head = data
            return
        if len(data) <= MOST_JOINED_BYTES:
            data, self._head = self._head + data, b""
        self.flush()
        self._transport.write(data)

    def flush(self) -> None:
        if self._head:
            self._transport.write(self._head)
        self._head = b""

    def close(self) -> None:
        self.flush()
        self._transport.close()


class _WithoutChunks:
    """Wraps the application for a client of HTTP/1.0, which knows no chunks: a response without a length ends with the
    connection."""

    def __init__(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._cycle, self._app, self._is_plain = cycle, app, False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def plain(message: Any) -> None:
            cycle = self._cycle
            if message["type"] == "http.response.start" and not _has_length(message):
                self._is_plain = True
                cycle.response_started, cycle.chunked_encoding, cycle.keep_alive = True, False, False
                lines = [b"%b: %b\r\n" % each for each in (*cycle.default_headers, *message["headers"])]
                head = STATUS_LINE[message["status"]] + b"".join(lines) + b"connection: close\r\n\r\n"
                if not cycle.disconnected:
                    cycle.transport.write(head)
                return
            if self._is_plain and not cycle.disconnected:
                if cycle.flow.write_paused:
                    await cycle.flow.drain()
                cycle.transport.write(message.get("body", b""))
                message = {**message, "body": b""}
            await send(message)

        await self._app(scope, receive, plain)


def _authority(target: bytes) -> str | None:
    """HOST[:PORT] of a request target in absolute form."""
    _, separator, rest = target.partition(b"://")
    if not separator:
        return None
    return re.split(rb"[/?#]", rest, maxsplit=1)[0].rpartition(b"@")[2].decode("latin-1")


def _has_length(message: Any) -> bool:
    return message["status"] in (204, 304) or any(name.lower() == b"content-length" for name, _ in message["headers"])


def with_limits(read_timeout_s: float) -> type[Connection]:
    """The connection class for a server with these limits."""
    limits: dict[str, Any] = {"read_timeout_s": read_timeout_s}
    return type("Connection", (Connection,), limits)
