"""Runs one HTTP request's prompts on an engine: submits them, waits until they end or the client leaves, and answers.

A client that leaves, a deadline that passes and a server that stops all end a request through `Running.abort`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor
from typing import Any, Protocol

import msgspec

from headrace.frontend.api.beam_search import BeamSearchParams
from headrace.frontend.client.pooling_stream import PoolingStream
from headrace.frontend.client.request import RequestListener, RequestStream
from headrace.frontend.fleet.decisions import ANYWHERE, Affinity
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.http.server.errors import SPELLINGS, ApiError, as_api_error, respelt
from headrace.frontend.http.server.event_stream import EVENTS, TURN_S, Chunks, EventStream, KeepAlive, StreamForm
from headrace.frontend.http.server.exchange import Exchange, Receive, send_pieces
from headrace.frontend.http.server.metrics import Pages
from headrace.frontend.http.server.request_log import note
from headrace.frontend.http.server.selection import OutputSelection, likeliest, search
from headrace.frontend.request.checks import CheckedRequest, check
from headrace.frontend.request.parameters.pooling_params import PoolingParams
from headrace.frontend.request.parameters.sampling_params import SamplingParams
from headrace.frontend.request.prompts import Prompt
from headrace.frontend.tracing.tracer import follow
from headrace.ipc.failure import (
    EngineDeadError,
    HeadraceError,
    InvalidRequestError,
    QueueFullError,
    let_interrupts_pass,
)

logger = logging.getLogger(__name__)


class Listener(Protocol):
    """Receives the events of a `Running`'s engine requests, in the engine client's event loop."""

    def on_step(self, stream: RequestStream) -> None: ...

    def fail(self, error: BaseException) -> None: ...

    def close(self) -> None:
        """The last call: no event follows."""
        ...


INLINE_TOKENS = 2000
"""Answers of at most this many tokens, top log-probabilities included, are encoded in the event loop."""
HOLD_S = 1.0
"""How long a stream's status line waits for the first output, so that an early error gets its HTTP status."""


class Job(msgspec.Struct):
    """One prompt to run; `name` is its request id at the engine."""

    name: str
    prompt: Prompt
    params: SamplingParams
    priority: int
    affinity: Affinity = ANYWHERE
    pooling: PoolingParams | None = None
    """Set if the prompt's hidden states are pooled instead."""


class ResponseText(Chunks, Protocol):
    """Writes a response, either whole or as the events of a stream."""

    def attach(self, streams: Sequence[RequestStream]) -> None:
        """Called first, with the streams of the submitted jobs, in the order of the jobs."""
        ...

    def whole(self) -> list[bytes]:
        """The whole response, in consecutive pieces."""
        ...


class PreparedRequest(msgspec.Struct):
    """A request that was decoded, checked and tokenised: its jobs, their engine, and what writes the response."""

    engine: Engine
    jobs: list[Job]
    answer: ResponseText
    streams: bool
    form_field: str = "structured_outputs"
    """The field in which the request asks for structured output: error messages name it."""
    selection: OutputSelection | None = None
    """How outputs are chosen among the computed ones (best_of, beams); None: all are returned."""
    form: StreamForm = EVENTS
    """The format of a streamed response."""


class Running(RequestListener):
    """The submitted jobs of one HTTP request. An error of one ends them all."""

    def __init__(self, engine: Engine, jobs: Sequence[Job], pool: EnginePool, form_field: str) -> None:
        """form_field: see PreparedRequest. Raises EngineDeadError if the engine is gone."""
        if engine.client is None:  # it has gone since the request was prepared
            raise EngineDeadError("the engine is not running")
        self.engine, self._jobs, self._facts = engine, jobs, engine.client
        self._pool, self._form_field = pool, form_field
        self.error: HeadraceError | None = None
        self.events: Listener | None = None
        self.news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done at the first output, or at the end."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.streams: list[RequestStream] = []
        self._num_running = len(jobs)

    async def submit(self) -> None:
        """Submits the jobs in turns with other work. Raises ApiError before any is sent, EngineDeadError."""
        jobs = self._jobs
        pace = Pace()
        requests: list[CheckedRequest] = []
        for index, job in enumerate(jobs):
            try:
                requests.append(check(job.name, job.prompt, job.pooling or job.params, self._facts, job.priority))
            except InvalidRequestError as error:
                raise as_api_error(error, index, len(jobs)) from error
            await pace.step()
        model = self.engine.names[0]
        for job, request in zip(jobs, requests, strict=True):
            if request.name in self._pool:  # two clients may choose the same id; each gets its response under it
                request = msgspec.structs.replace(request, name=f"{job.name}-{uuid.uuid4().hex}")
            stream = self._pool.submit(request, self, model=model, affinity=job.affinity)
            follow(stream)
            self.streams.append(stream)
            await pace.step()

    def abort(self) -> None:
        """Aborts the jobs that still run; the engine frees their blocks at once."""
        if self.events is not None:
            self.events.close()
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
        except BaseException as error:  # the HTTP request must end too
            let_interrupts_pass(error)
            logger.exception("the end of a request could not be handled")
            self._fail(HeadraceError(f"the end of the request could not be handled: {type(error).__name__}: {error}"))
        if (self._num_running == 0 or self.error is not None) and not self.ended.done():
            self.ended.set_result(None)

    def _fail(self, error: HeadraceError) -> None:
        self.error = error
        if not self.news.done():
            self.news.set_result(None)
        if self.events is not None:
            self.events.fail(error)

    def _named(self, error: HeadraceError) -> HeadraceError:
        """The same error, with fields under the names that the request's body has for them."""
        if not isinstance(error, InvalidRequestError) or error.failure is None:
            return error
        return respelt(error, {**SPELLINGS, "structured_outputs": self._form_field})


class RunningSearch(Running):
    """Beam searches in place of one request's jobs. `streams` is filled once all searches have ended."""

    def __init__(self, prepared: PreparedRequest, beams: BeamSearchParams, pool: EnginePool, pages: Pages) -> None:
        super().__init__(prepared.engine, prepared.jobs, pool, prepared.form_field)
        self._beams, self._pages = beams, pages
        self._task: asyncio.Task[list[RequestStream]] | None = None

    async def submit(self) -> None:
        searching = search(self._jobs, self._beams, self._pool, self.engine.names[0], self._facts)
        self._task = asyncio.ensure_future(searching)
        self._task.add_done_callback(self._on_found)

    def abort(self) -> None:
        if self._task is not None:
            self._task.cancel()
        super().abort()

    def _on_found(self, task: asyncio.Task[list[RequestStream]]) -> None:
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
        meter = self._pages.meter(self.engine.index)
        for stream in self.streams:
            meter.on_done(stream)
        for each in (self.news, self.ended):
            if not each.done():
                each.set_result(None)


class Pace:
    """Yields to the event loop at least every TURN_S while many small pieces of one request's work are done."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    async def step(self) -> None:
        if time.monotonic() - self._began_s > TURN_S:
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
        self._running: set[Running] = set()

    @property
    def num_running(self) -> int:
        return len(self._running)

    def end_all(self, error: HeadraceError) -> None:
        """Ends every request with this error; streams send it as their last event."""
        for running in list(self._running):
            running.error = running.error or error
            if running.events is not None:
                running.events.fail(error)
            for each in (running.news, running.ended):
                if not each.done():
                    each.set_result(None)

    @contextlib.asynccontextmanager
    async def running(self, engine: Engine, jobs: Sequence[Job], form_field: str) -> AsyncIterator[Running]:
        """Submits jobs, and aborts them when the block is left. Raises ApiError and HeadraceError."""
        async with self._counted(Running(engine, jobs, self._pool, form_field)) as running:
            yield running

    @contextlib.asynccontextmanager
    async def _counted(self, running: Running) -> AsyncIterator[Running]:
        self._pages.count("http_requests")
        self._running.add(running)
        note(running)
        try:
            await running.submit()
            yield running
        except QueueFullError:
            self._pages.count_rejection(running.engine.index)
            raise
        finally:
            running.abort()
            running.events = None
            self._running.discard(running)

    @contextlib.asynccontextmanager
    async def reader(self, receive: Receive) -> AsyncIterator[asyncio.Future[None]]:
        """Yields a future that is done once the client has disconnected."""
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            yield gone
        finally:
            if gone.done():
                self._pages.count("http_disconnects")
            gone.cancel()

    async def _whole(self, prepared: PreparedRequest, streams: Sequence[RequestStream]) -> list[bytes]:
        """The whole answer, once all streams have ended; a large one is encoded in a worker thread."""
        if sum(map(_num_told, streams)) <= INLINE_TOKENS:
            return prepared.answer.whole()

        def write() -> list[bytes]:
            answer = prepared.answer.whole()
            for stream in streams:
                stream.drop_logprobs()
            return answer

        return await asyncio.get_running_loop().run_in_executor(self._threads, write)

    async def complete(self, prepared: PreparedRequest) -> bytes:
        """Runs a request without a connection and returns its whole answer. Raises ApiError and HeadraceError."""
        selection = prepared.selection
        async with self._jobs_of(prepared) as running:
            await running.ended
            if running.error is not None:
                raise running.error
            if selection is not None and selection.beams is None:
                likeliest(running.streams, selection.num_outputs)
            prepared.answer.attach(running.streams)
            return b"".join(await self._whole(prepared, running.streams))

    def _jobs_of(self, prepared: PreparedRequest) -> contextlib.AbstractAsyncContextManager[Running]:
        selection = prepared.selection
        if selection is not None and selection.beams is not None:
            return self._counted(RunningSearch(prepared, selection.beams, self._pool, self._pages))
        return self.running(prepared.engine, prepared.jobs, prepared.form_field)

    def deadline_s(self) -> float | None:
        """The deadline of a request that begins now (monotonic); None without a limit."""
        return time.monotonic() + self._timeout_s if self._timeout_s else None

    async def answer(self, prepared: PreparedRequest, exchange: Exchange) -> None:
        """Runs a request and sends its response. Raises ApiError and HeadraceError only while nothing has been sent."""
        deadline_s = self.deadline_s()
        selection = prepared.selection
        async with self.reader(exchange.receive) as gone, self._jobs_of(prepared) as running:
            if selection is not None:
                if not await first_of(running.ended, gone, deadline_s):
                    return
                if running.error is not None:
                    raise running.error
                if selection.beams is None:
                    likeliest(running.streams, selection.num_outputs)
            prepared.answer.attach(running.streams)
            if prepared.streams:
                await self._stream(prepared, running, exchange, gone, deadline_s)
            elif await first_of(running.ended, gone, deadline_s):
                if running.error is not None:
                    raise running.error
                await send_pieces(exchange.send, await self._whole(prepared, running.streams))

    async def _stream(
        self,
        prepared: PreparedRequest,
        running: Running,
        exchange: Exchange,
        gone: asyncio.Future[None],
        deadline_s: float | None,
    ) -> None:
        events = EventStream(exchange.connection, prepared.answer, prepared.form)
        events.attach(running.streams)
        hold_s = time.monotonic() + HOLD_S
        try:
            if not await first_of(running.news, gone, min(hold_s, deadline_s or hold_s)):
                return
        except ApiError:
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise
        if running.error is not None:
            raise running.error
        await exchange.send({"type": "http.response.start", "status": 200, "headers": prepared.form.headers})
        self.keep_alive.add(events)
        try:
            running.events = events
            if running.error is not None:  # it failed while the start of the response was sent
                events.fail(running.error)
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


def _num_told(stream: RequestStream) -> int:
    """How many tokens an answer reports, top log-probabilities included, or values of vectors."""
    if isinstance(stream, PoolingStream):
        return len(stream.vectors or ())
    params = stream.params
    num_outputs = sum(len(sequence.token_ids) for sequence in stream.sequences) * (1 + max(params.logprobs or 0, 0))
    return num_outputs + stream.num_prompt_logprobs * params.n * (1 + max(params.prompt_logprobs or 0, 0))


async def _until_gone(receive: Receive) -> None:
    """Returns when the client has disconnected. The body has to be read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def first_of(done: asyncio.Future[Any], gone: asyncio.Future[None], deadline_s: float | None) -> bool:
    """True once `done` is, False when the client left. Raises ApiError at the deadline."""
    timeout_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
    await asyncio.wait((done, gone), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if done.done():
        return True
    if gone.done():
        return False
    raise took_too_long()


def took_too_long() -> ApiError:
    return ApiError(
        504,
        "the request took longer than this server allows (its option request_timeout); ask for fewer tokens",
        type="timeout_error",
        code="timeout",
    )
