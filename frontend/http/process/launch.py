"""`headrace serve`: starts the engine, unless it attaches to a running one, and one HTTP process or several.

one:      this process speaks HTTP itself        --> engine-core child
several:  this process --> HTTP children (http/process/worker.py), which share the port and the engines
                       --> engine-core child

A start prints a line for each phase with its seconds, which sum to the time since the program began.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from headrace.core.options.engine_options import Options
from headrace.core.options.vllm_environment import take_vllm_variables
from headrace.core.process.child import Child, start_coordinator
from headrace.core.process.child_output import startup_table
from headrace.core.process.early import drop_early
from headrace.frontend.client.event_loop import run_async
from headrace.frontend.fleet.start import owned_ranks, start_ranks, with_meeting
from headrace.frontend.http.options import LOOPBACK, ServeOptions, with_environment
from headrace.frontend.http.process.ranks import Ranks, ranks_of, why_fixed
from headrace.ipc.failure import Failure, HeadraceError, OptionError
from headrace.ipc.messages import Ready
from headrace.ipc.process.child import heeded_signals
from headrace.ipc.process.log import CONFIG_VARIABLE, FORMAT_VARIABLE, LEVEL_VARIABLE, protect_stderr, set_up_logging
from headrace.ipc.process.private_files import warn_of_open_secret
from headrace.ipc.process.proc import status_of
from headrace.ipc.transport.keys import VARIABLE as KEYS_VARIABLE
from headrace.ipc.transport.keys import use_own_keys
from headrace.ipc.transport.sockets import is_loopback

if TYPE_CHECKING:  # what speaks with an engine is imported while it starts
    from headrace.core.process.supervisor import SupervisedChild


class PhaseLog:
    """Prints a line with the duration of each phase of the start. Thread-safe."""

    def __init__(self, first: str, began_s: float) -> None:
        """`began_s` is when the program began, in seconds since the epoch."""
        self._lock = threading.Lock()
        self._began_s = self._entered_s = began_s
        self._phase: str | None = first
        self._is_over = False

    def enter(self, phase: str) -> None:
        """Ends the current phase, whose line is printed, and begins another."""
        with self._lock:
            self._end()
            self._phase = phase

    def end(self, then: str) -> None:
        """Ends the current phase. `then` begins, unless the start is over, as it is when an engine is restarted."""
        with self._lock:
            self._end()
            self._phase = None if self._is_over else then

    def finish(self, text: str) -> None:
        """Ends the last phase, and prints the text for which the user has waited, with the total time."""
        with self._lock:
            self._end()
            self._is_over = True
            say(f"{text} ({self._entered_s - self._began_s:.2f} s)")

    def _end(self) -> None:
        now_s = time.time()
        if self._phase is not None:
            say(f"[{now_s - self._entered_s:7.3f} s] {self._phase}")
        self._entered_s, self._phase = now_s, None


def say_workers(ready: Ready) -> None:
    """Prints how long each process of an engine took to start, if it has several."""
    if ready.ranks_startup_s:
        say(f"the engine's start by process\n{startup_table(ready.startup_s, ready.ranks_startup_s)}")


def say(text: str, level: int = logging.INFO) -> None:
    """Logs a line for the person who started the server, whatever the log's level."""
    _told.log(level, "%s", text)


_told = logging.getLogger("headrace.server")
_told.setLevel(logging.DEBUG)


def process_began_s() -> float:
    """When this process was started, in seconds since the epoch; now, where the system does not say."""
    now_s, status = time.time(), status_of(os.getpid())
    if status is None:
        return now_s
    return now_s - max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - status.started / os.sysconf("SC_CLK_TCK"))


def launch(engine_options: Options, options: ServeOptions) -> int:
    """Serves until it is asked to stop, and returns the exit status. Raises HeadraceError if the start fails."""
    named = os.environ.get(KEYS_VARIABLE)
    try:
        return _launch(engine_options, options)
    finally:  # the keys that `_use_keys_on_loopback` named are of this server alone
        os.environ.pop(KEYS_VARIABLE, None)
        if named is not None:
            os.environ[KEYS_VARIABLE] = named


def _launch(engine_options: Options, options: ServeOptions) -> int:
    warning = take_vllm_variables(os.environ)
    options = with_environment(options, os.environ)
    config = None if options.log_config_file is None else os.path.abspath(options.log_config_file)
    of_log = {LEVEL_VARIABLE: options.log_level, FORMAT_VARIABLE: options.log_format, CONFIG_VARIABLE: config}
    # For this process and those that it starts.
    os.environ.update({name: value for name, value in of_log.items() if value is not None})
    set_up_server_logging()
    if warning:
        logging.getLogger(__name__).warning("%s", warning)
    _warn_of_open_secrets(options)
    phases = PhaseLog("read options", process_began_s())
    children: list[SupervisedChild] = []
    coordinator: Child | None = None
    ranks = Ranks(range(0))
    if not options.engine and not engine_options.coordinator:
        ranks = ranks_of(engine_options, options)
        for name in ranks.unused:
            say(f"{name} is not needed: something else balances between hosts")
        _use_keys_on_loopback(ranks)
        several = len(ranks.here) > 1 or bool(ranks.coordinator)
        phases.enter("start the engines' processes" if several else "start the engine's process")
        if len(ranks.here) == engine_options.data_parallel_size:
            engine_options = with_meeting(engine_options)
        if engine_options.data_parallel_backend == "ray" and options.api_server_count > 1:
            raise OptionError("data_parallel_backend=ray places engines for one HTTP process: leave api_server_count")
        if ranks.has_coordinator or (several and options.api_server_count > 1 and not ranks.coordinator):
            # Through it, the HTTP processes find engines, also those that are started later, here or on other hosts.
            coordinator = start_coordinator(ranks.coordinator)
        if coordinator is not None or ranks.coordinator:
            address = ranks.coordinator if coordinator is None else _ready_at(coordinator, ranks)
            engine_options = msgspec.structs.replace(engine_options, coordinator=(address,))
        if engine_options.coordinator:
            children = start_ranks(engine_options, ranks.here, ranks.new_address)
        else:
            children = start_ranks(engine_options, ranks.here)
    elif options.headless:
        raise OptionError("headless is for hosts that start engines: leave engine and coordinator out")
    drop_early()  # no engine is started here, or not as a program of this one
    try:
        if options.api_server_count > 1 or ranks.coordinator:
            from headrace.frontend.http.process.supervisor import serve_with_processes

            own = [each for each in children if isinstance(each, Child)]
            return serve_with_processes(engine_options, options, own, phases, coordinator, ranks)
        return _serve_here(engine_options, options, children, phases, ranks)
    except BaseException:
        for child in (*children, *([coordinator] if coordinator is not None else [])):
            child.kill()
        raise


def _warn_of_open_secrets(options: ServeOptions) -> None:
    for name in ("api_key_file", "admin_api_key_file", "ssl_keyfile"):
        warn_of_open_secret(name, getattr(options, name))


def _use_keys_on_loopback(ranks: Ranks) -> None:
    """Keeps the machine's other users from engines and a coordinator that no key was named for."""
    if ranks.is_on_loopback and (own := use_own_keys()) is not None:
        say(f"what listens for ranks at {ranks.coordinator} has this user's own keys; others need --keys {own}")


def _ready_at(coordinator: Child, ranks: Ranks) -> str:
    """The coordinator's address, once it is ready. Raises EngineStartError."""
    try:
        return coordinator.wait_ready().address
    except HeadraceError as error:
        if ranks.coordinator:
            error.hint = error.hint or "--data-parallel-address and --data-parallel-rpc-port (-dpa, -dpp) say where."
        raise


def _serve_here(
    engine_options: Options,
    options: ServeOptions,
    children: Sequence[SupervisedChild],
    phases: PhaseLog,
    ranks: Ranks,
) -> int:
    """Serves HTTP in this process, which is enough for most uses. Returns the exit status."""
    # Imported while the engine loads.
    from headrace.frontend.fleet.scaling import EngineScaler, PoolEngines
    from headrace.frontend.fleet.sources import Attached, Source
    from headrace.frontend.http.process.server import HttpServer, listen, url_of
    from headrace.frontend.http.process.tls import warn_of_dates
    from headrace.frontend.http.server.metrics import Pages

    sock = listen(options)
    server = HttpServer(options, sock, Pages())
    warn_of_dates(options)
    server.why_fixed = why_fixed(engine_options, ranks, 1)
    url = url_of(options, sock)
    sources: Sequence[Source]
    if not children:
        phases.enter("attach to the engine" if options.engine else "find the engines")
        sources = [Attached(address, engine_options.peer_timeout) for address in options.engine]
    else:
        restarts = options.num_restarts(len(children))
        sources = owned = owned_ranks(engine_options, children, restarts, ranks.here)
        if not server.why_fixed:
            server.scaler_of = lambda pool: EngineScaler(PoolEngines(pool, restarts), engine_options)
        owned[0].on_progress = lambda progress: phases.enter(f"engine: {progress.phase}")
        for each in owned:
            each.on_ready = say_workers
            each.process.on_restart = lambda: say("starting the engine again")

        def first_is_ready(ready: Ready) -> None:
            phases.end("attach to the engine")
            say_workers(ready)

        owned[0].on_ready = first_is_ready
    server.logs_stats = not engine_options.disable_log_stats
    server.on_ready = lambda: say_ready(phases, url, options)
    server.on_engine_end, server.on_engine_return = say_engine_ended, say_engine_returned

    async def serve() -> int:
        _stop_on_signals(server.stop, engine_options.shutdown_timeout)
        return await server.run(sources, engine_options.coordinator, engine_options.peer_timeout)

    return run_async(serve)


def _stop_on_signals(stop: Callable[[float], None], shutdown_timeout_s: float) -> None:
    """The first signal drains, the second stops at once, a third ends this process without any cleanup."""
    received: list[int] = []

    def handle(number: int) -> None:
        received.append(number)
        if len(received) > 2:
            os._exit(128 + number)
        say("stopping; a second signal does not wait" if len(received) == 1 else "stopping at once")
        stop(shutdown_timeout_s if len(received) == 1 else 0.0)

    loop = asyncio.get_running_loop()
    for number in heeded_signals():
        loop.add_signal_handler(number, handle, number)


def say_engine_ended(failure: Failure) -> None:
    say(f"the engine has ended: {failure.message}", logging.ERROR)


def say_engine_returned(address: str) -> None:
    say(f"the engine at {address} is connected again")


def say_ready(phases: PhaseLog, url: str, options: ServeOptions) -> None:
    """Ends the start, and shows the page if that was asked for."""
    phases.finish(ready_text(url, options))
    if options.open:
        # A browser may take seconds to start, and one of a terminal returns when it is left.
        threading.Thread(target=_open_page, args=(url,), name="browser", daemon=True).start()


def _open_page(url: str) -> None:
    import webbrowser

    if not webbrowser.open(url):
        say(f"no browser was found; open {url} in one")


def ready_text(url: str, options: ServeOptions) -> str:
    reach = ""
    if options.uds is None and is_loopback(options.host or LOOPBACK):
        everywhere = "::" if ":" in (options.host or "") else "0.0.0.0"
        reach = f"; from this machine alone, unless --host {everywhere} opens it to others"
    page = f"{url} in a browser, " if options.ui and options.uds is None else ""
    return f"ready: {url}/v1 for clients, {page}{url}/docs to read{reach}"


_OF_TOOL_SERVERS = ("mcp", "httpx", "httpx2")
"""Loggers of the MCP client, which logs a line for each HTTP request of a call."""


def set_up_server_logging() -> None:
    protect_stderr()
    set_up_logging("server", "INFO")
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # the phases make its messages about the start redundant
    if not logging.getLogger().isEnabledFor(logging.DEBUG):
        for library in _OF_TOOL_SERVERS:
            logging.getLogger(library).setLevel(logging.WARNING)
