"""Runs one HTTP request's prompts on an engine: submits them, waits until they end or the client leaves, and answers.

A client that leaves, a deadline that passes and a server that stops all end a request through `PreparedRequest.abort`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Protocol

import msgspec

from headrace.frontend.client.pooling_stream import PoolingStream
from headrace.frontend.client.request_stream import RequestListener, RequestStream, SequenceState
from headrace.frontend.fleet.decisions import ANYWHERE, Affinity
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.http.server.errors import SPELLINGS, ApiError, renamed, respelt
from headrace.frontend.http.server.event_stream import EVENTS, TURN_S, EventStream, KeepAlive, StreamForm
from headrace.frontend.http.server.exchange import JSON, Exchange, Headers, send_pieces
from headrace.frontend.http.server.metrics import Pages
from headrace.frontend.http.server.request_log import note
from headrace.frontend.http.server.selection import OutputSelection, likeliest, search
from headrace.frontend.request.checks import CheckedRequest
from headrace.frontend.tracing.tracer import with_trace
from headrace.ipc.failure import (
    HeadraceError,
    InvalidRequestError,
    QueueFullError,
    let_interrupts_pass,
)

logger = logging.getLogger(__name__)


class StreamWriter(Protocol):
    """Writes the outputs of a `PreparedRequest` as they come, in the engine client's event loop: an `EventStream`, or a
    response's run."""

    def on_step(self, stream: RequestStream) -> None: ...

    def fail(self, error: BaseException) -> None: ...

    def close(self) -> None:
        """The last call: no event follows."""
        ...


INLINE_TOKENS = 2000
"""Answers of at most this many tokens, top log-probabilities included, are encoded in the event loop."""
HOLD_S = 1.0
"""How long a stream's status line waits for the first output, so that an early error gets its HTTP status."""


class Answer:
    """How the answer to a request is written: whole or, where an API streams, as the events of a stream."""

    form: StreamForm = EVENTS
    """The format of a streamed answer."""
    headers: Headers = JSON
    """Of a whole answer, besides its length."""
    streams: Sequence[RequestStream] = ()

    def attach(self, streams: Sequence[RequestStream]) -> None:
        """Called first, with the streams of the submitted prompts, in their order."""
        self.streams = streams

    def whole(self) -> list[bytes]:
        """The whole response, in consecutive pieces, once all streams have ended."""
        raise NotImplementedError

    def delta(self, stream: RequestStream, sequence: SequenceState) -> bytes:
        """The events with the new part of one output; empty if it cannot be sent yet."""
        raise NotImplementedError

    def end(self) -> bytes:
        """The events after the end of the last output."""
        raise NotImplementedError

    def failure(self, error: BaseException) -> bytes:
        """The last event of a stream that failed."""
        raise NotImplementedError


class PreparedRequest(RequestListener):
    """A request that was decoded, tokenised and checked, ready to run: what the engine is asked for, and what writes
    the response. A `Generator` runs it; an error of one of its requests at the engine ends it."""

    def __init__(
        self,
        engine: Engine,
        id: str,
        requests: Sequence[CheckedRequest],
        answer: Answer,
        *,
        is_streamed: bool = False,
        affinity: Affinity = ANYWHERE,
        form_field: str = "structured_outputs",
        selection: OutputSelection | None = None,
    ) -> None:
        """id: of the HTTP request. requests: one for each prompt. is_streamed: the answer is sent as events.
        form_field: the body's field that asks for structured output, which error messages name. selection: how outputs
        are chosen among the computed ones (best_of, beams); None: all are returned."""
        self.engine, self.id, self.requests, self.answer = engine, id, requests, answer
        self.is_streamed, self.affinity = is_streamed, affinity
        self.form_field, self.selection = form_field, selection
        self.then: Callable[[Sequence[RequestStream]], Sequence[CheckedRequest]] | None = None
        """Makes of the results of `requests` those that run after them and are answered: called once."""
        # While it runs:
        self.streams: list[RequestStream] = []
        self.error: HeadraceError | None = None
        self.events: StreamWriter | None = None
        self.news: asyncio.Future[None]
        """Done at the first output, or at the end."""
        self.ended: asyncio.Future[None]
        self._num_running = 0
        self._pool: EnginePool | None = None
        self._next: Callable[[Sequence[RequestStream]], Sequence[CheckedRequest]] | None = None
        self._search: asyncio.Task[list[RequestStream]] | None = None

    async def submit(self, pool: EnginePool, pages: Pages) -> None:
        """Submits the requests, which `streams` stand for from then on, in turns with other work. Raises
        EngineDeadError, QueueFullError."""
        loop = asyncio.get_running_loop()
        self.error, self.streams = None, []
        self._next = self.then
        self.news, self.ended = loop.create_future(), loop.create_future()
        client, requests, self.requests = self.engine.connected, self.requests, ()
        if self.selection is not None and self.selection.beams is not None:
            self._search = asyncio.ensure_future(search(self, requests, self.selection, pool, client))
            self._search.add_done_callback(functools.partial(self._on_found, pages))
            return
        turn, count = LoopTurn(), len(requests)
        self._num_running = count
        self._pool = pool
        for request in requests:
            self._submit(request, pool)
            if count > 1:
                await turn.step()
        if count == len(pool) and (table := self.streams[-1].table) is not None:
            table.flush()  # no other request runs, so that they wait for none of this turn

    def abort(self) -> None:
        """Aborts the requests that still run; the engine frees their blocks at once."""
        if self.events is not None:
            self.events.close()
            self.events = None
        if self._search is not None:
            self._search.cancel()
        for stream in self.streams:
            stream.abort()
            # Breaks reference cycles: the garbage collector runs too rarely to free them soon.
            stream.listener = None
            stream.sequences.clear()

    def on_step(self, stream: RequestStream, now_s: float) -> None:
        if not self.news.done():
            self.news.set_result(None)
        if self.events is not None:
            self.events.on_step(stream)

    def on_done(self, stream: RequestStream) -> None:
        self._num_running -= 1
        try:
            if stream.error is not None and self.error is None:
                self._fail(self._named(stream.error))
            elif self._num_running == 0 and self.error is None and self._pool is not None:
                self._go_on(self._pool)
        except HeadraceError as error:
            self._fail(error)
        except BaseException as error:  # the HTTP request must end too
            let_interrupts_pass(error)
            logger.exception("the end of a request could not be handled")
            self._fail(HeadraceError(f"the end of the request could not be handled: {type(error).__name__}: {error}"))
        if (self._num_running == 0 or self.error is not None) and not self.ended.done():
            self.ended.set_result(None)

    def _go_on(self, pool: EnginePool) -> None:
        """Submits what comes after the requests that have ended, if anything does."""
        if self._next is None:
            return
        following, self._next, self.streams = self._next(self.streams), None, []
        self._num_running = len(following)
        for request in following:
            self._submit(request, pool)

    def _submit(self, request: CheckedRequest, pool: EnginePool) -> None:
        if request.name in pool:  # two clients may choose the same id; each gets its response under it
            request = msgspec.structs.replace(request, name=f"{request.name}-{uuid.uuid4().hex}")
        stream = pool.submit(with_trace(request), self, model=self.engine.names[0], affinity=self.affinity)
        self.streams.append(stream)

    def _fail(self, error: HeadraceError) -> None:
        self.error = error
        if not self.news.done():
            self.news.set_result(None)
        if self.events is not None:
            self.events.fail(error)

    def end(self, error: HeadraceError) -> None:
        """Ends it with this error; a stream sends it as its last event."""
        self.error = self.error or error
        if self.events is not None:
            self.events.fail(error)
        self._wake_all()

    def _wake_all(self) -> None:
        for each in (self.news, self.ended):
            if not each.done():
                each.set_result(None)

    def _named(self, error: HeadraceError) -> HeadraceError:
        """The same error, with fields under the names that the request's body has for them."""
        if not isinstance(error, InvalidRequestError) or error.failure is None:
            return error
        return respelt(error, {**SPELLINGS, "structured_outputs": self.form_field})

    def _on_found(self, pages: Pages, task: asyncio.Task[list[RequestStream]]) -> None:
        if task.cancelled():
            return
        try:
            self.streams = task.result()
        except HeadraceError as error:
            self.error = error
        except BaseException as error:  # reported to those who wait for the search
            let_interrupts_pass(error)
            logger.exception("a beam search failed")
            self.error = HeadraceError(f"the beam search failed: {type(error).__name__}: {error}")
        meter = pages.meter(self.engine.index)
        for stream in self.streams:
            meter.on_done(stream)
        self._wake_all()


def id_of_prompt(id: str, index: int, count: int) -> str:
    """The engine's id for one of the prompts of a request: the request's own id where it is the only one."""
    return id if count == 1 else f"{id}-{index}"


def prepared_as(names: Mapping[str, str], prepare: Callable[[], PreparedRequest]) -> PreparedRequest:
    """What `prepare` makes, for an API that is served by another API's code: errors have the field names of the body,
    also later. `names` maps that API's field names to those."""
    with renamed(names):
        prepared = prepare()
    prepared.form_field = names.get(prepared.form_field, prepared.form_field)
    return prepared


class LoopTurn:
    """Yields to the event loop at least every TURN_S while many small pieces of one request's work are done."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._began_s > TURN_S

    async def step(self) -> None:
        if self.is_due:
            await asyncio.sleep(0)
            self._began_s = time.monotonic()


class Generator:
    """Runs prepared requests and sends their responses."""

    def __init__(
        self, keep_alive: KeepAlive, request_timeout_s: float, pages: Pages, pool: EnginePool, threads: Executor
    ) -> None:
        """threads: encode large answers."""
        self.keep_alive, self._timeout_s, self._pages, self._pool = keep_alive, request_timeout_s, pages, pool
        self._threads = threads
        self._running: set[PreparedRequest] = set()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def end_all(self, error: HeadraceError) -> None:
        """Ends every request with this error; streams send it as their last event."""
        for running in list(self._running):
            running.end(error)

    @contextlib.asynccontextmanager
    async def running(self, prepared: PreparedRequest) -> AsyncIterator[None]:
        """Submits a request, and aborts it when the block is left. Raises ApiError and HeadraceError."""
        self._pages.count("http_requests")
        self._running.add(prepared)
        note(prepared)
        try:
            await prepared.submit(self._pool, self._pages)
            yield
        except QueueFullError:
            self._pages.count_rejection(prepared.engine.index)
            raise
        finally:
            prepared.abort()
            self._running.discard(prepared)

    @contextlib.contextmanager
    def watch_client(self, exchange: Exchange) -> Iterator[asyncio.Future[None]]:
        """Yields a future that is done once the client has disconnected, which is counted. The body has been read."""
        gone = asyncio.get_running_loop().create_future()
        exchange.connection.watch(functools.partial(gone.set_result, None))
        try:
            yield gone
        finally:
            exchange.connection.watch(None)
            if gone.done():
                self._pages.count("http_disconnects")

    async def _whole(self, prepared: PreparedRequest) -> list[bytes]:
        """The whole answer of a request that has ended; a large one is encoded in a worker thread. Raises the error
        that ended it."""
        if prepared.error is not None:
            raise prepared.error
        streams = prepared.streams
        if prepared.selection is not None and prepared.selection.beams is None:
            likeliest(streams, prepared.selection.num_outputs)
        prepared.answer.attach(streams)
        if sum(map(_num_reported, streams)) <= INLINE_TOKENS:
            return prepared.answer.whole()

        def write() -> list[bytes]:
            answer = prepared.answer.whole()
            for stream in streams:
                stream.drop_logprobs()
            return answer

        return await asyncio.get_running_loop().run_in_executor(self._threads, write)

    async def complete(self, prepared: PreparedRequest) -> bytes:
        """Runs a request without a connection and returns its whole answer. Raises ApiError and HeadraceError; after
        QueueFullError it may be called again."""
        requests = prepared.requests
        try:
            async with self.running(prepared):
                await prepared.ended
                return b"".join(await self._whole(prepared))
        finally:
            prepared.requests = requests

    def deadline_s(self) -> float | None:
        """The deadline of a request that begins now (monotonic); None without a limit."""
        return time.monotonic() + self._timeout_s if self._timeout_s else None

    async def answer(self, prepared: PreparedRequest, exchange: Exchange) -> None:
        """Runs a request and sends its response. Raises ApiError and HeadraceError only while nothing has been sent."""
        deadline_s = self.deadline_s()
        with self.watch_client(exchange) as gone:
            async with self.running(prepared):
                if prepared.is_streamed and prepared.selection is None:
                    await self._stream(prepared, exchange, gone, deadline_s)
                elif await first_of(prepared.ended, gone, deadline_s):
                    if prepared.is_streamed:
                        await self._stream(prepared, exchange, gone, deadline_s)
                    else:
                        await send_pieces(exchange.send, await self._whole(prepared), prepared.answer.headers)

    async def _stream(
        self,
        prepared: PreparedRequest,
        exchange: Exchange,
        gone: asyncio.Future[None],
        deadline_s: float | None,
    ) -> None:
        if prepared.error is None:
            prepared.answer.attach(prepared.streams)
        events = EventStream(exchange.connection, prepared.answer)
        events.attach(prepared.streams)
        hold_s = time.monotonic() + HOLD_S
        try:
            if not await first_of(prepared.news, gone, min(hold_s, deadline_s or hold_s)):
                return
        except ApiError:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise
        if prepared.error is not None:
            raise prepared.error
        await exchange.send({"type": "http.response.start", "status": 200, "headers": prepared.answer.form.headers})
        self.keep_alive.add(events)
        try:
            prepared.events = events
            if prepared.error is not None:  # it failed while the start of the response was sent
                events.fail(prepared.error)
            events.open()
            try:
                if not await first_of(events.ended, gone, deadline_s):
                    return
            except ApiError as error:
                events.fail(error)
            await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            events.close()
            self.keep_alive.remove(events)


def _num_reported(stream: RequestStream) -> int:
    """How many tokens an answer reports, top log-probabilities included, or values of vectors."""
    if isinstance(stream, PoolingStream):
        return sum(len(part.values) for part in stream.parts)
    params = stream.params
    num_outputs = sum(len(sequence.token_ids) for sequence in stream.sequences) * (1 + max(params.logprobs or 0, 0))
    return num_outputs + stream.num_prompt_logprobs * params.n * (1 + max(params.prompt_logprobs or 0, 0))


async def first_of(done: asyncio.Future[None], gone: asyncio.Future[None], deadline_s: float | None) -> bool:
    """True once `done` is, False when the client left; `done` has a result then, too, so that the wait is for one
    future alone. At the deadline `done` is cancelled; raises ApiError."""
    is_first = True

    def on_gone(_: asyncio.Future[None]) -> None:
        nonlocal is_first
        if not done.done():
            is_first = False
            done.set_result(None)

    gone.add_done_callback(on_gone)
    try:
        if deadline_s is None:
            await done
        else:
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                await done
    except TimeoutError:
        raise took_too_long() from None
    finally:
        gone.remove_done_callback(on_gone)
    return is_first


def took_too_long() -> ApiError:
    return ApiError(
        504,
        "the request took longer than this server allows (its option request_timeout); ask for fewer tokens",
        type="timeout_error",
        code="timeout",
    )
