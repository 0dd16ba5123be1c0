"""The events of requests on one connection, written as steps come, without a task switch per token:

    core's step --> RequestTable.on_step --> RequestStream.on_step --> EventStream --> connection.write_chunk

All events of one step for one connection leave in one write. A client that does not read stops the writing, not the
core: new tokens stay in the request's lists and are sent later, as one larger event. During silence, comments are sent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from headrace.frontend.client.request_stream import RequestStream, SequenceState
from headrace.frontend.http.server.connection import Connection
from headrace.ipc.failure import let_interrupts_pass

if TYPE_CHECKING:
    from headrace.frontend.http.server.generation import Answer

logger = logging.getLogger(__name__)

TURN_S = 0.005
"""How long one request may block the event loop while its prompts are submitted or its events written."""
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx and similar proxies then forward events at once
]


class StreamForm(NamedTuple):
    """The format of a streamed response: its headers and its keep-alive comment."""

    headers: list[tuple[bytes, bytes]]
    keep_alive: bytes
    """Sent during silence; empty: nothing is."""


EVENTS = StreamForm(HEADERS, KEEP_ALIVE)


class Silent(Protocol):
    """A stream that keep-alive comments hold open while it writes nothing."""

    last_write_s: float

    def keep_alive(self) -> None: ...


class EventStream:
    """Writes the events of one or more requests to one connection. Everything happens in the engine client's loop."""

    def __init__(self, connection: Connection, answer: Answer) -> None:
        self._connection, self._answer = connection, answer
        self._streams: Sequence[RequestStream] = ()
        self._choices: list[tuple[RequestStream, SequenceState]] = []  # outputs whose end has not been sent
        self._is_open = False
        self._is_flush_due = False
        self._error: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self.last_write_s = time.monotonic()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done once the last event has been written."""

    def attach(self, streams: Sequence[RequestStream]) -> None:
        """Called first, with the streams of the submitted requests."""
        self._streams = streams
        self._choices = []
        for stream in streams:
            for sequence in stream.sequences:
                self._choices.append((stream, sequence))

    def open(self) -> None:
        """Called when the response has begun: writes the output so far, and later output as it arrives."""
        self._is_open = True
        self._connection.on_writable, self._connection.on_half_closed = self._flush, self.keep_alive
        self._flush()

    def close(self) -> None:
        """Stops writing."""
        self._is_open = False
        self._connection.on_writable = self._connection.on_half_closed = None

    def on_step(self, stream: RequestStream) -> None:
        if not self._is_open:
            return
        if len(self._streams) == 1:
            self._flush()
        elif not self._is_flush_due:  # other requests of this connection may have output of the same step
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def fail(self, error: BaseException) -> None:
        """Ends the stream with an error event."""
        if self._error is None:
            self._error = error
            if self._is_open:
                self._flush()

    def keep_alive(self) -> None:
        if self._is_open and self._answer.form.keep_alive and not self._connection.congested:
            self._write(self._answer.form.keep_alive)

    def _flush(self) -> None:
        self._is_flush_due = False
        if not self._is_open or self._connection.congested:
            return
        try:
            self._write_news()
        except BaseException as error:  # raising would end the caller, the loop of all requests
            let_interrupts_pass(error)
            logger.exception("an event could not be written")
            self._error = self._error or error
            self._write(self._answer.failure(error))
            self._finish()

    def _write_news(self) -> None:
        if len(self._choices) == 1 and self._error is None:
            ((stream, sequence),) = self._choices
            if sequence.finish_reason is None:  # as mostly, there is nothing to weigh
                if sequence.has_news() and (data := self._answer.delta(stream, sequence)):
                    self._write(data)
                return
        parts: list[bytes] = []
        ended = []
        end_s = time.monotonic() + TURN_S
        for index, choice in enumerate(self._choices):
            if parts and time.monotonic() > end_s:  # yields to other requests; the rest comes first next time
                self._choices = self._choices[index:] + self._choices[:index]
                self._is_flush_due = True
                self._loop.call_later(TURN_S, self._flush)  # other requests may need several turns of the loop
                break
            stream, sequence = choice
            if sequence.has_news() and (data := self._answer.delta(stream, sequence)):
                parts.append(data)
                if sequence.finish_reason is not None:
                    ended.append(choice)
        if ended:
            gone = set(map(id, ended))
            self._choices = [choice for choice in self._choices if id(choice) not in gone]
        if self._error is not None:
            parts.append(self._answer.failure(self._error))
        elif not self._choices:
            parts.append(self._answer.end())
        else:
            if parts:
                self._write(parts[0] if len(parts) == 1 else b"".join(parts))
            return
        self._write(b"".join(parts))
        self._finish()

    def _write(self, data: bytes) -> None:
        self.last_write_s = time.monotonic()
        self._connection.write_chunk(data)

    def _finish(self) -> None:
        self.close()
        if not self.ended.done():
            self.ended.set_result(None)


class KeepAlive:
    """Has open streams send comments during silence. Runs a timer only while streams are open."""

    def __init__(self, silence_s: float) -> None:
        """silence_s: the longest time without an event or a comment."""
        self._silence_s = silence_s
        self._streams: set[Silent] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: Silent) -> None:
        self._streams.add(stream)
        if self._timer is None:
            self._schedule()

    def remove(self, stream: Silent) -> None:
        self._streams.discard(stream)

    def _schedule(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._silence_s / 2, self._look)

    def _look(self) -> None:
        self._timer = None
        now_s = time.monotonic()
        for stream in list(self._streams):
            if now_s - stream.last_write_s > self._silence_s / 2:  # streams are checked twice per silence_s
                stream.keep_alive()
        if self._streams:
            self._schedule()
