"""uvicorn's HTTP connection, with time and size limits on headers, and a way for streams to write without a task.

A stream's events come from the client's callback, thousands a second. Each as an ASGI `send` would cost a task
switch and a dictionary; `write_chunk` costs one write. It is only used between the response's start and its end,
which both go through ASGI.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

EXTENSION = "headrace.connection"
MAX_HEADER_BYTES = 64 << 10


class Connection(HttpToolsProtocol):
    """One client's connection. A class attribute of a subclass sets its limits (see `with_limits`)."""

    read_timeout_s = 30.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.on_writable: Callable[[], None] | None = None
        self._header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_are_here()
        self.on_writable = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._header_timer is None and (self.cycle is None or self.cycle.response_complete):
            self._await_headers()
        if self._header_timer is not None:
            self._header_bytes += len(data)
        super().data_received(data)
        # What the parser took of a body with them does not count: then the headers are here.
        if self._header_timer is not None and self._header_bytes > MAX_HEADER_BYTES:
            self._refuse(431, b"the headers are larger than %d bytes" % MAX_HEADER_BYTES)

    def on_headers_complete(self) -> None:
        self._headers_are_here()
        self.scope["extensions"] = {EXTENSION: {"connection": self}}
        super().on_headers_complete()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.on_writable is not None:
            self.on_writable()

    def write_chunk(self, data: bytes) -> None:
        """Writes one chunk of a chunked response that has begun. Never blocks: see `congested`."""
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    @property
    def congested(self) -> bool:
        """The client does not read: more would pile up in memory. `on_writable` is called when that is over."""
        return bool(self.flow.write_paused)

    def abort(self) -> None:
        self.transport.abort()

    def _await_headers(self) -> None:
        self._header_bytes = 0
        self._header_timer = self.loop.call_later(self.read_timeout_s, self._headers_are_late)

    def _headers_are_here(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_are_late(self) -> None:
        self._header_timer = None
        if self.transport.is_closing():
            return
        if self._header_bytes == 0:  # connected, and said nothing
            self.transport.close()
        else:
            self._refuse(408, b"the headers of the request took longer than %g s" % self.read_timeout_s)

    def _refuse(self, status: int, message: bytes) -> None:
        self._headers_are_here()
        if self.transport.is_closing():
            return
        body = b'{"error":{"message":"%b","type":"invalid_request_error","param":null,"code":null}}' % message
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP at all, in the same shape as every other error."""
        self._refuse(400, b"this is not an HTTP request")


def with_limits(read_timeout_s: float) -> type[Connection]:
    """The connection class for a server with these limits."""
    limits: dict[str, Any] = {"read_timeout_s": read_timeout_s}
    return type("Connection", (Connection,), limits)
