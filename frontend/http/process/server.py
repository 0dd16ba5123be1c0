"""One HTTP process: listens, serves until it is asked to stop or its engines are gone, drains, returns a status."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from headrace.frontend.fleet.decisions import RouterOptions
from headrace.frontend.fleet.discovery import Discovery
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.fleet.scaling import Scaler
from headrace.frontend.fleet.sources import Source
from headrace.frontend.http import apis
from headrace.frontend.http.options import LOG_STATS_EVERY_S, LOOPBACK, ServeOptions
from headrace.frontend.http.process.engine_log import log_load, log_missing
from headrace.frontend.http.process.keys import read_admin_keys, read_keys
from headrace.frontend.http.process.tls import tls_arguments, warn_of_dates
from headrace.frontend.http.server.access import Keys
from headrace.frontend.http.server.app import make_app
from headrace.frontend.http.server.connection import Connections, with_limits
from headrace.frontend.http.server.metrics import Pages
from headrace.frontend.http.server.state import ServerState
from headrace.frontend.text.chat_template import load_template
from headrace.frontend.text.template_renderer import renderer
from headrace.frontend.tracing.tracer import tracer_of
from headrace.ipc.failure import EngineDeadError, Failure, HeadraceError, OptionError
from headrace.ipc.process.gc_pauses import gc_watched
from headrace.ipc.process.resources import give_back_freed_memory, raise_file_limit, release_unchanged_files
from headrace.ipc.transport.hosts import any_host, bare_host, host_port

EXIT_DONE, EXIT_ERROR, EXIT_ENGINE_FAILED = 0, 1, 70
_BACKLOG = 2048
_SWITCH_S = 5e-4
_LAST_WORDS_S = 1.0
"""How long clients have to read their last event when the server ends."""
_IDLE_LOOK_S = 0.02
MEETS_WITHIN_S = 5.0
"""How long a process of several may need to connect to engines that coordinators tell of."""
_SETTLED_AFTER_S = 1.0
"""How long after the start memory is released that served it: the first requests need not wait for that."""
_LINGER_S = 0.5
"""How long an idle connection stays open once the server drains, for a request that is on its way."""


def listen(options: ServeOptions, *, shared: bool = False) -> socket.socket:
    """The bound socket, not listening yet. `shared` lets other processes bind the same port.

    Raises OptionError if the address cannot be bound.
    """
    host = bare_host(options.host or LOOPBACK)
    host = any_host() if host == "*" else host
    where = options.uds or host_port(host, options.port)
    try:
        if options.uds is not None:
            return _unix_socket(Path(options.uds))
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # --host :: is all interfaces, by IPv4 too
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            sock.bind(address)
        except OSError:
            sock.close()
            raise
        return sock
    except OSError as error:
        raise OptionError(f"cannot listen at {where}: {_why_not(error, options)}") from error


def _why_not(error: OSError, options: ServeOptions) -> str:
    if error.errno == errno.EADDRINUSE:
        if options.uds and not Path(options.uds).is_socket():
            return "there is something else than a socket; choose another path"
        return "another program does; choose another " + ("path" if options.uds else "--port")
    if error.errno == errno.ENOENT and options.uds:
        return f"there is no folder {Path(options.uds).parent}"
    return error.strerror or str(error)


def _unix_socket(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket() and not _answers(path):
            path.unlink()  # a leftover of a server that was killed
        sock.bind(os.fspath(path))
    except OSError:
        sock.close()
        raise
    return sock


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError:
            return False
        return True


def url_of(options: ServeOptions, sock: socket.socket) -> str:
    """The server's address for a browser or a client."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    scheme = "https" if options.ssl_certfile else "http"
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://{host_port(host, port)}{options.root_path}"


def check_files(options: ServeOptions) -> None:
    """Raises OptionError for keys, templates or certificates that cannot be read."""
    read_keys(options)
    read_admin_keys(options)
    load_template(options.chat_template)
    tls_arguments(options)
    warn_of_dates(options)


class HttpServer:
    """The server of one HTTP process. Everything but `stop_threadsafe` runs in one asyncio loop."""

    def __init__(self, options: ServeOptions, sock: socket.socket, pages: Pages) -> None:
        """Raises OptionError for keys, templates or certificates that cannot be read."""
        self._options, self._sock, self._pages = options, sock, pages
        self._keys = Keys(read_keys(options), read_admin_keys(options))
        self._template = load_template(options.chat_template)
        self._tracer = tracer_of(options.otlp_traces_endpoint, options.collect_detailed_traces)
        self._tls_arguments = tls_arguments(options)
        self._stop_at_s: float | None = None
        self._stop_asked: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beginning = threading.Lock()  # guards _stop_at_s and _loop until `run` has set the loop
        self.on_ready: Callable[[], None] | None = None
        self.on_engine_end: Callable[[Failure], None] | None = None
        """Called with the cause when an engine ends after the start."""
        self.on_engine_return: Callable[[str], None] | None = None
        """Called with the address of each engine that has come back."""
        self.scaler_of: Callable[[EnginePool], Scaler] | None = None
        """Makes what changes the number of engines; None if it is fixed or the engines are not the server's own."""
        self.says_waits = True
        """Whether this process logs what it waits for at the start; one of several does."""
        self.why_fixed = ""
        """Why the number of engines is fixed, if there is no scaler."""
        self.logs_stats = False
        """Whether this process logs the engines' load; one of several does."""
        self.forgotten_return = False
        """Engines of which coordinators tell no more are started again by this process's parent."""
        self.num_met: int | None = 1
        """How many engines this process is to be connected to before it says that it is ready; None: it is still to be
        told, from any thread. Coordinators tell of engines one after another, and the first may end before the others
        are connected."""
        self.others_serve = False
        """Whether other processes serve at this port already: connections come here once this one can use them."""

    def stop(self, deadline_s: float) -> None:
        """Takes no new connections, and ends when no request runs, or after `deadline_s`. The shortest deadline
        counts."""
        at_s = time.monotonic() + deadline_s
        self._stop_at_s = at_s if self._stop_at_s is None else min(at_s, self._stop_at_s)
        if self._stop_asked is not None:
            self._stop_asked.set()

    def stop_threadsafe(self, deadline_s: float) -> None:
        """`stop` from another thread. May come before `run` has begun, which then ends at once."""
        with self._beginning:
            if self._loop is None:
                self.stop(deadline_s)
                return
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.stop, deadline_s)

    async def run(
        self, sources: Sequence[Source], coordinators: Sequence[str] = (), peer_timeout_s: float | None = None
    ) -> int:
        """Serves until the end, and returns the exit status. Raises HeadraceError if an engine does not start.

        coordinators: addresses of those that announce further engines; peer_timeout_s: how long those may be silent.
        """
        with self._beginning:
            self._loop, self._stop_asked = asyncio.get_running_loop(), asyncio.Event()
            if self._stop_at_s is not None:
                self._stop_asked.set()
        # Prompts are tokenised in two threads (exchange.py). More would leave no core for the loop's thread, and while
        # one of them holds the GIL, every stream pauses: so the interpreter switches threads often.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        sys.setswitchinterval(_SWITCH_S)
        discovery = None
        if coordinators:
            discovery = Discovery(coordinators, peer_timeout_s, forgotten_return=self.forgotten_return)
        router_options = RouterOptions(
            max_migrations=self._options.max_migrations, suspect_after_s=self._options.heartbeat_timeout
        )
        pool = EnginePool(
            sources,
            router_options,
            discovery=discovery,
            meters=self._pages,
            on_death=self.on_engine_end,
            on_return=self.on_engine_return,
            serves_early=True,
        )
        state = ServerState(
            self._options,
            pool,
            self._pages,
            apis.found(),
            keys=self._keys,
            template=self._template,
            tracer=self._tracer,
        )
        state.scaler = None if self.scaler_of is None else self.scaler_of(pool)
        state.why_fixed = self.why_fixed
        server = _UvicornServer(self._config(make_app(state)), self._sock)
        raise_file_limit()
        serving = asyncio.create_task(self._listen(server, pool))
        pool.start()
        state.begin()
        try:
            with gc_watched(self._pages.gc_pause):
                failure = await self._serve(state, server, serving, coordinators)
        finally:
            server.end()
            self._stop_listening(server)
            await asyncio.gather(serving, return_exceptions=True)
            await state.close()
            await pool.close(max(0.0, (self._stop_at_s or 0.0) - time.monotonic()))
            state.bodies.close()
            renderer().end()
            if self._tracer is not None:
                await asyncio.to_thread(self._tracer.close)
        if failure is None:
            return EXIT_DONE
        if not pool.started.is_set():
            raise HeadraceError(failure=failure)
        return EXIT_ENGINE_FAILED

    async def _listen(self, server: _UvicornServer, pool: EnginePool) -> None:
        if self.others_serve:
            await self._until_met(pool)
        if not server.connections.is_draining:
            await server.serve(sockets=[self._sock])

    async def _until_met(self, pool: EnginePool) -> None:
        """Waits until it is connected to as many engines as it is told to be, or for a while: some may have ended."""
        assert self._stop_asked is not None
        end_s = math.inf
        while not (pool.dead.is_set() or self._stop_asked.is_set() or time.monotonic() > end_s):
            if self.num_met is not None:
                if sum(engine.usable for engine in pool.engines) >= self.num_met:
                    return
                end_s = min(end_s, time.monotonic() + MEETS_WITHIN_S)
            await asyncio.sleep(_IDLE_LOOK_S)

    async def _serve(
        self, state: ServerState, server: _UvicornServer, serving: asyncio.Task[None], coordinators: Sequence[str]
    ) -> Failure | None:
        """Serves until it is time to end. Returns why the engines ended, if they did."""
        assert self._stop_asked is not None
        pool = state.pool
        stop, dead, started = (
            asyncio.create_task(event.wait()) for event in (self._stop_asked, pool.dead, pool.started)
        )
        waits: set[asyncio.Task[Any]] = {stop, dead, started, serving}
        telling: asyncio.Task[None] | None = None
        if self.says_waits and not any(each.source.is_own for each in pool.engines):
            telling = asyncio.create_task(log_missing(pool, coordinators))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if started.done():
                await self._until_met(pool)
                await self._settle(state)
                waits.discard(started)
                if telling is not None:
                    telling.cancel()
                if self.logs_stats:
                    interval_s = self._options.log_stats_interval or LOG_STATS_EVERY_S
                    telling = asyncio.create_task(log_load(pool, interval_s))
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                await serving  # raises what ended it
            state.draining = True
            self._stop_listening(server)
            if not dead.done():
                await self._drain(state, server.connections, dead)
            state.refusing = True
            if state.generator.num_running:
                state.generator.end_all(EngineDeadError("the server has shut down before this request was complete"))
            await _until_idle(state, time.monotonic() + _LAST_WORDS_S)
            has_left = stop.done() and not pool.engines  # they were asked to end as well, and did so in order
            return pool.failure if dead.done() and not has_left else None
        finally:
            for task in filter(None, (stop, dead, started, telling)):
                task.cancel()

    def _stop_listening(self, server: _UvicornServer) -> None:
        """May be called again."""
        if not server.connections.is_draining and self._options.uds is not None:
            Path(self._options.uds).unlink(
                missing_ok=True
            )  # at once: a successor may listen there while this one drains
        server.stop_listening()

    async def _settle(self, state: ServerState) -> None:
        """Called once all engines are ready. Raises OptionError."""
        await state.finder.load_modules()
        state.collector.start()
        if self.on_ready is not None:
            renderer().start()  # not before: it would take processor time from the engines' start
            self.on_ready()

        def release() -> None:
            with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
                state.bodies.threads.submit(_release_memory)

        asyncio.get_running_loop().call_later(_SETTLED_AFTER_S, release)

    async def _drain(self, state: ServerState, connections: Connections, dead: asyncio.Task[Any]) -> None:
        """Waits until all is answered that came over the connections that there are, or for the deadline (which a
        second signal brings forward) or the engines' end."""
        linger_until_s = time.monotonic() + _LINGER_S
        while not dead.done() and (now_s := time.monotonic()) < (self._stop_at_s or 0.0):
            is_busy = state.generator.num_running or connections.have_requests
            if not is_busy and (not connections.connections or now_s > linger_until_s):
                return
            await asyncio.sleep(_IDLE_LOOK_S)

    def _config(self, app: Any) -> uvicorn.Config:
        return uvicorn.Config(
            app,
            http=with_limits(self._options.read_timeout),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=self._options.timeout_keep_alive,
            timeout_graceful_shutdown=int(_LAST_WORDS_S),
            **self._tls_arguments,
        )


class _UvicornServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, sock: socket.socket) -> None:
        super().__init__(config)
        self.server_state = self.connections = Connections()
        self._sock = sock
        self._ended = asyncio.Event()

    def end(self) -> None:
        self.should_exit = True
        self._ended.set()

    async def main_loop(self) -> None:
        """Does not look ten times a second, as uvicorn's does, whether it is to end."""
        await self._ended.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs no handlers: signals belong to the program that created this server."""
        yield

    def stop_listening(self) -> None:
        """Accepts the connections that clients have opened already, and refuses others from then on, so that balancers
        turn to another server. Nothing comes between the two but what the kernel does within microseconds."""
        if self.connections.is_draining:
            return
        self.connections.drain()
        if not self.started:
            return
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # BlockingIOError: no more
            while True:
                accepted, _ = self._sock.accept()
                accepted.setblocking(False)
                task = loop.create_task(self._serve_accepted(accepted))
                self.connections.tasks.add(task)
                task.add_done_callback(self.connections.tasks.discard)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)  # ends the listening at once, while closing may take a turn of the loop
        for each in self.servers:
            each.close()

    async def _serve_accepted(self, accepted: socket.socket) -> None:
        def connection() -> asyncio.Protocol:
            made = self.config.http_protocol_class  # as uvicorn makes them
            return made(config=self.config, server_state=self.connections, app_state=self.lifespan.state)  # type: ignore[call-arg]

        with contextlib.suppress(OSError):  # the client has left, or its handshake failed
            await asyncio.get_running_loop().connect_accepted_socket(connection, accepted, ssl=self.config.ssl)


def _release_memory() -> None:
    give_back_freed_memory()
    release_unchanged_files()


async def _until_idle(state: ServerState, deadline_s: float) -> None:
    while state.generator.num_running and time.monotonic() < deadline_s:
        await asyncio.sleep(_IDLE_LOOK_S)
