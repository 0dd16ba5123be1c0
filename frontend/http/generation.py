"""Runs one HTTP request's prompts on an engine: submits, waits for the end or the client's leaving, answers.

A client that leaves, a deadline that passes and a server that stops all end in the same place: `Running.abort`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Protocol

import msgspec

from headrace.frontend.api.prompts import Prompt, check_request
from headrace.frontend.api.sampling_params import SamplingParams
from headrace.frontend.client.request import RequestStream
from headrace.frontend.http.connection import Connection
from headrace.frontend.http.engines import Engine
from headrace.frontend.http.errors import ApiError, unavailable
from headrace.frontend.http.events import HEADERS, Chunks, EventStream, KeepAlive
from headrace.frontend.http.metrics import Pages, RequestMeter
from headrace.frontend.http.sampling import as_api_error
from headrace.ipc.failure import HeadraceError, InvalidRequestError

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

TURN_S = 0.005
"""How long one request may keep others waiting while its prompts are submitted."""
HOLD_S = 1.0
"""How long a stream's status line waits for the first news, so that what is refused at once gets its own status."""


class Job(msgspec.Struct):
    """One prompt to run."""

    name: str
    prompt: Prompt
    params: SamplingParams
    priority: int


class ResponseText(Chunks, Protocol):
    """Writes a response in both its forms."""

    def attach(self, streams: Sequence[RequestStream]) -> None:
        """Comes first, with the submitted jobs in order."""
        ...

    def whole(self) -> bytes: ...


class PreparedRequest(msgspec.Struct):
    """A request decoded, checked and tokenised: what to run, where, and how to answer."""

    engine: Engine
    jobs: list[Job]
    answer: ResponseText
    streams: bool


class Running:
    """The submitted jobs of one request, which end together."""

    def __init__(self, prepared: PreparedRequest, meter: RequestMeter) -> None:
        if prepared.engine.client is None:  # it was there when the request was prepared
            raise unavailable("the engine is not running", code="engine_dead")
        self._prepared, self._client = prepared, prepared.engine.client
        self._meter = meter
        self.error: HeadraceError | None = None
        self.events: EventStream | None = None
        self.news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done with the first step that brought something, or the end."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.streams: list[RequestStream] = []
        self._num_running = len(prepared.jobs)

    async def submit(self) -> None:
        """Raises ApiError before anything is sent, or EngineDeadError. Other requests have their turn in between."""
        jobs = self._prepared.jobs
        pace = _Pace()
        for index, job in enumerate(jobs):
            try:
                check_request(job.prompt, job.params, self._client.welcome)
                if job.name in self._client.requests:
                    raise InvalidRequestError(f"a request with the id {job.name!r} is running; ids must be unique")
            except InvalidRequestError as error:
                raise as_api_error(error, index, len(jobs)) from error
            await pace.step()
        self._prepared.engine.note_work()
        for job in jobs:
            stream = self._client.submit(job.name, job.prompt, job.params, job.priority)
            stream.on_step, stream.on_done = self._on_step, self._on_done
            self.streams.append(stream)
            await pace.step()

    def abort(self) -> None:
        """Ends what still runs; the engine frees it at once."""
        if self.events is not None:
            self.events.close()
        for stream in self.streams:
            self._client.abort_stream(stream)
            # What refers to itself would wait for the garbage collector, which is told to come seldom.
            stream.on_step = stream.on_done = None

    def _on_step(self, stream: RequestStream, now_s: float) -> None:
        self._meter.on_step(stream, now_s)
        if not self.news.done():
            self.news.set_result(None)
        if self.events is not None:
            self.events.on_step(stream)

    def _on_done(self, stream: RequestStream) -> None:
        """Comes before the last `on_step`, and alone when the request failed."""
        self._meter.on_done(stream)
        self._num_running -= 1
        if stream.error is not None and self.error is None:
            self.error = stream.error
            if not self.news.done():
                self.news.set_result(None)
            if self.events is not None:
                self.events.fail(stream.error)
        if (self._num_running == 0 or self.error is not None) and not self.ended.done():
            self.ended.set_result(None)


class _Pace:
    """Gives other work of the event loop its turn within many small pieces of one request's."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    async def step(self) -> None:
        if time.monotonic() - self._began_s > TURN_S:
            await asyncio.sleep(0)
            self._began_s = time.monotonic()


class Generator:
    """Answers prepared requests."""

    def __init__(self, keep_alive: KeepAlive, request_timeout_s: float, pages: Pages) -> None:
        self._keep_alive, self._timeout_s, self._pages = keep_alive, request_timeout_s, pages
        self._running: set[Running] = set()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def end_all(self, error: HeadraceError) -> None:
        """Ends every request with this error: streams get it as their last event."""
        for running in list(self._running):
            running.error = running.error or error
            if running.events is not None:
                running.events.fail(error)
            for each in (running.news, running.ended):
                if not each.done():
                    each.set_result(None)

    async def answer(self, prepared: PreparedRequest, connection: Connection, receive: Receive, send: Send) -> None:
        """Runs it and sends the response. Raises ApiError and HeadraceError while nothing has been sent."""
        self._pages.count("http_requests")
        running = Running(prepared, RequestMeter(self._pages.engines[prepared.engine.index]))
        self._running.add(running)
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            deadline_s = time.monotonic() + self._timeout_s if self._timeout_s else None
            await running.submit()
            prepared.answer.attach(running.streams)
            if prepared.streams:
                await self._stream(prepared, running, connection, gone, deadline_s, send)
            elif await _first_of(running.ended, gone, deadline_s):
                if running.error is not None:
                    raise running.error
                await send_json(send, 200, prepared.answer.whole())
        finally:
            if gone.done():
                self._pages.count("http_disconnects")
            running.abort()
            running.events = None
            self._running.discard(running)
            gone.cancel()

    async def _stream(
        self,
        prepared: PreparedRequest,
        running: Running,
        connection: Connection,
        gone: asyncio.Future[None],
        deadline_s: float | None,
        send: Send,
    ) -> None:
        events = EventStream(connection, prepared.answer)
        events.attach(running.streams)
        hold_s = time.monotonic() + HOLD_S
        try:
            if not await _first_of(running.news, gone, min(hold_s, deadline_s or hold_s)):
                return
        except ApiError:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise
        if running.error is not None:
            raise running.error
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        self._keep_alive.add(events)
        try:
            running.events = events
            if running.error is not None:  # while the start was sent
                events.fail(running.error)
            events.open()
            try:
                if not await _first_of(events.ended, gone, deadline_s):
                    return
            except ApiError as error:
                events.fail(error)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            events.close()
            self._keep_alive.remove(events)


async def send_json(
    send: Send, status: int, body: bytes, headers: Sequence[tuple[bytes, bytes]] = (), *, more_body: bool = False
) -> None:
    fixed = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    await send({"type": "http.response.body", "body": body, "more_body": more_body})


async def _until_gone(receive: Receive) -> None:
    """Returns when the client has left. The body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _first_of(done: asyncio.Future[None], gone: asyncio.Future[None], deadline_s: float | None) -> bool:
    """True once `done` is, False when the client left. Raises ApiError at the deadline."""
    timeout_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
    await asyncio.wait((done, gone), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if done.done():
        return True
    if gone.done():
        return False
    raise ApiError(
        504,
        "the request took longer than this server allows (its option request_timeout); ask for fewer tokens",
        type="timeout_error",
        code="timeout",
    )
