"""The program of one of several HTTP processes. It gets its options over an inherited socket, and ends with its parent.

Its engine is the parent's, or one that somebody else runs. The parent reports the state of its own:

parent                                    HTTP process
  EngineUp(address)                  ->     connects, serves
  EngineDown(failure, comes_back)    ->     its requests wait if comes_back, else they end with the cause
  EngineUp(address)                  ->     connects again, sends the requests that waited
                                     <-   EngineLost(address, failure), if it was silent for too long
                                     <-   ScaleTo(size), when a client asks for another number of engines
  Scaled(why)                        ->     answers the client
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from headrace.frontend.client.client import CoreClient
from headrace.frontend.client.event_loop import run_async
from headrace.frontend.client.own_engine import CAUSE_GRACE_S
from headrace.frontend.client.transport import ZmqTransport
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.fleet.sources import Attached, Source
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.process.launch import say_engine_ended, say_engine_returned, set_up_server_logging
from headrace.frontend.http.process.server import EXIT_ERROR, MEETS_WITHIN_S, HttpServer, listen, url_of
from headrace.frontend.http.server.metrics import Pages
from headrace.ipc.failure import EngineDeadError, Failure, HeadraceError, OptionError
from headrace.ipc.messages import SCHEMA_HASH, ChildFailed, Message, Ready, Start, Stop
from headrace.ipc.process.child import die_with_parent, leave_signals_to_parent
from headrace.ipc.struct_types import threadsafe
from headrace.ipc.transport.channel import Channel, ChannelClosedError, obey_parent
from headrace.ipc.wait import Deadline

_LOOK_S = 0.05


class EngineUp(Message, frozen=True):
    """The engine is ready at this address."""

    address: str
    peer_timeout_s: float | None = None


class EngineDown(Message, frozen=True):
    """The engine has ended; `failure` is the cause."""

    failure: Failure
    comes_back: bool
    """An EngineUp will follow."""


class EngineLost(Message, frozen=True):
    """The connection to the engine at this address was lost, and no EngineDown has given the cause."""

    address: str
    failure: Failure


class EnginesThere(Message, frozen=True):
    """All engines are ready that the parent has started and coordinators announce."""

    num_engines: int


class ScaleTo(Message, frozen=True):
    """A client asked this process to change the number of engines, which the parent runs."""

    call: int
    size: int
    drain_timeout_s: float


class Scaled(Message, frozen=True):
    """The parent's answer to ScaleTo."""

    call: int
    why: str = ""
    """Why there are not as many as asked for; empty if there are. An HTTP process may not have met all of them yet."""
    is_refused: bool = False
    """There cannot be so many."""


class ParentScaler:
    """Asks the parent to change the number of engines, and waits for its answer."""

    def __init__(self, ask: Callable[[ScaleTo], None]) -> None:
        self._ask = ask
        self._pool: EnginePool | None = None
        self._calls = itertools.count()
        self._answers: dict[int, Scaled] = {}

    def note(self, answer: Scaled) -> None:
        """Thread-safe."""
        self._answers[answer.call] = answer

    def of(self, pool: EnginePool) -> ParentScaler:
        """Sets the pool, in which the engines are to be met."""
        self._pool = pool
        return self

    async def scale(self, size: int, drain_timeout_s: float) -> None:
        call = next(self._calls)
        self._ask(ScaleTo(call=call, size=size, drain_timeout_s=drain_timeout_s))
        while (answer := self._answers.pop(call, None)) is None:  # each of the parent's waits has an end
            await asyncio.sleep(_LOOK_S)
        if answer.why:
            raise (OptionError if answer.is_refused else HeadraceError)(answer.why)
        end_s = time.monotonic() + MEETS_WITHIN_S
        engines = [] if self._pool is None else self._pool.engines
        while sum(engine.usable for engine in engines) != size and time.monotonic() < end_s:
            await asyncio.sleep(_LOOK_S)


class ParentEngine(Source):
    """The parent's engine, whose state the parent reports. Everything but `tell` happens in the server's loop."""

    is_own = True

    def __init__(self, on_lost: Callable[[EngineLost], None]) -> None:
        """on_lost: sends a message to the parent."""
        self._on_lost = on_lost
        self.address = ""
        self._comes_back = True
        self._peer_timeout_s: float | None = None
        self._failure: Failure | None = None
        self._client: CoreClient | None = None
        self._news: collections.deque[EngineUp | EngineDown] = collections.deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_news = asyncio.Event()

    @property
    def comes_back(self) -> bool:
        return self._comes_back

    @property
    def is_awaited(self) -> bool:
        return self._comes_back

    def tell(self, news: EngineUp | EngineDown) -> None:
        """Accepts a message of the parent. Thread-safe; may be called before the loop runs."""
        self._news.append(news)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._take_news)

    async def open(self) -> CoreClient:
        """Waits for the engine and connects to it. Raises EngineDeadError with the cause if it will not come back."""
        self._loop = asyncio.get_running_loop()
        self._take_news()
        if self.address and self._client is not None and self._client.failure is not None:
            self._on_lost(EngineLost(address=self.address, failure=self._client.failure))
        while not self.address:
            if self._failure is not None and not self.comes_back:
                raise EngineDeadError.from_failure(self._failure)
            self._has_news.clear()
            await self._has_news.wait()
        # When the connection is lost, the client waits for the parent's message, which has the cause.
        self._client = CoreClient(ZmqTransport(self.address, self._peer_timeout_s), cause_grace_s=CAUSE_GRACE_S)
        await self._client.start()
        return self._client

    async def close(self, deadline_s: float) -> None:
        """Does nothing: the parent ends its engine."""

    def _take_news(self) -> None:
        while self._news:
            news = self._news.popleft()
            if isinstance(news, EngineUp):
                self.address, self._client = news.address, None
                self._peer_timeout_s = news.peer_timeout_s
                continue
            self.address, self._failure = "", news.failure
            self._comes_back = news.comes_back
            if self._client is not None:
                self._client.fail(news.failure)
                self._failure = self._client.failure  # the engine's own report of its failure, if it sent one
        self._has_news.set()


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the parent sends each process in its Start message."""

    server: ServeOptions
    """With the port that the parent bound."""
    parent_has_engine: bool
    """The parent runs the only engine and reports its state; else they are those that `server` names or coordinators
    announce."""
    coordinators: tuple[str, ...]
    why_fixed: str
    """Why the number of engines is fixed; empty if the parent can change it."""
    awaits_number: bool
    """The parent sends EnginesThere: this process is ready once it is connected to so many."""
    others_serve: bool
    """Other HTTP processes serve already: this one replaces another."""
    restarts_found: bool
    """The parent starts engines again that coordinators announce."""
    peer_timeout_s: float | None
    """For engines that `server` names or coordinators announce; that of the parent's only engine is in EngineUp."""
    pages_file: str
    num_processes: int
    index: int
    logs_stats: bool
    """Whether this process logs the engines' load."""


def main(fd: int) -> int:
    """Returns the exit status: that of HttpServer.run, or 1 if the start failed."""
    die_with_parent()
    leave_signals_to_parent()
    set_up_server_logging()
    channel = Channel.inherited(fd, Start | Stop | EngineUp | EngineDown | EnginesThere | Scaled)
    try:
        start = channel.receive(Deadline(10.0))
        if not isinstance(start, Start) or start.schema_hash != SCHEMA_HASH:
            raise HeadraceError("the program that started this HTTP process is of another version of Headrace")
        return _serve(msgspec.convert(start.options, threadsafe(WorkerOptions)), channel)
    except ChannelClosedError:
        return EXIT_ERROR  # the parent is gone
    except Exception as error:
        with contextlib.suppress(ChannelClosedError):
            channel.send(ChildFailed(failure=Failure.of(error, process="http", phase="start")))
        return EXIT_ERROR


def _serve(options: WorkerOptions, channel: Channel) -> int:
    began_s = time.monotonic()
    sock = listen(options.server, shared=True)

    def tell_parent(message: EngineLost | ScaleTo) -> None:
        with contextlib.suppress(ChannelClosedError):
            channel.send(message)

    kept = ParentEngine(tell_parent)
    sources: list[Source] = [kept]
    if not options.parent_has_engine:
        sources = [Attached(each, options.peer_timeout_s) for each in options.server.engine]
    pages = Pages(file=Path(options.pages_file), num_processes=options.num_processes, index=options.index)
    server = HttpServer(options.server, sock, pages)
    address = url_of(options.server, sock)

    def on_ready() -> None:
        with contextlib.suppress(ChannelClosedError):
            channel.send(Ready(address=address, startup_s={"attach": time.monotonic() - began_s}))

    server.on_ready = on_ready
    server.num_met, server.others_serve = None if options.awaits_number else 1, options.others_serve
    server.logs_stats = options.logs_stats
    server.says_waits = options.index == 0
    scaler = None if options.why_fixed else ParentScaler(tell_parent)
    server.scaler_of, server.why_fixed = None if scaler is None else scaler.of, options.why_fixed

    def take(news: EngineUp | EngineDown | EnginesThere | Scaled) -> None:
        if isinstance(news, EnginesThere):
            server.num_met = news.num_engines
        elif not isinstance(news, Scaled):
            kept.tell(news)
        elif scaler is not None:
            scaler.note(news)

    if not options.parent_has_engine and options.index == 0:  # all processes notice it; only one prints it
        server.on_engine_end, server.on_engine_return = say_engine_ended, say_engine_returned
    threading.Thread(
        target=obey_parent, args=(channel, server.stop_threadsafe, EXIT_ERROR, take), name="parent", daemon=True
    ).start()
    server.forgotten_return = options.restarts_found
    return run_async(lambda: server.run(sources, options.coordinators, options.peer_timeout_s))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
