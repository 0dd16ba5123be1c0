"""Several HTTP processes before the same engines. This process speaks no HTTP: it starts, watches and stops them.

Everything that happens comes through one queue: signals, and ends of children.
"""

from __future__ import annotations

import queue
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import msgspec

from headrace.core.options import Options
from headrace.core.supervisor import Child, start_engine
from headrace.frontend.http.launch import ready_text
from headrace.frontend.http.metrics import pages_bytes
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.phases import PhaseLog, say
from headrace.frontend.http.server import EXIT_DONE, EXIT_ENGINE_FAILED, EXIT_ERROR, listen, raise_file_limit, url_of
from headrace.frontend.http.worker import WorkerOptions
from headrace.frontend.own_engine import START_TIMEOUT_S
from headrace.ipc.failure import Failure
from headrace.ipc.messages import SCHEMA_HASH, Start

_HTTP_START_TIMEOUT_S = 60.0
_ENGINE_STOP_S = 5.0
_LONG_LIFE_S = 60.0
"""An engine that served for so long and then died is started again as if it were the first time."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 30.0


class EngineEnded(msgspec.Struct, frozen=True):
    failure: Failure


class WorkerEnded(msgspec.Struct, frozen=True):
    failure: Failure


class RestartDue(msgspec.Struct, frozen=True):
    """The pause before the engine's next start is over."""


class Signal(msgspec.Struct, frozen=True):
    number: int


Event = EngineEnded | WorkerEnded | RestartDue | Signal


def serve_with_processes(engine_options: Options, options: ServeOptions, engine: Child | None, phases: PhaseLog) -> int:
    """Serves until it is told to stop, or a child ends; the exit status. `engine` is starting already.

    Raises HeadraceError when the start fails.
    """
    # Bound and never listening: it holds the port, and no connection waits at it.
    sock = listen(options, shared=True)
    if options.port == 0:
        options = msgspec.structs.replace(options, port=sock.getsockname()[1])
    raise_file_limit()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: _on_signal(events, number, frame))
    with sock, tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        addresses: Sequence[str] = options.engine
        if engine is not None:
            ready = engine.wait_ready(START_TIMEOUT_S, lambda progress: phases.enter(f"engine: {progress.phase}"))
            addresses = (ready.address,)
            engine.on_exit(lambda failure: events.put(EngineEnded(failure)))
        phases.enter(f"start {options.api_server_count} HTTP processes")
        workers = _start_workers(options, addresses, Path(folder), comes_back=options.restart_engine > 0)
        try:
            for worker in workers:
                worker.wait_ready(_HTTP_START_TIMEOUT_S)
                worker.on_exit(lambda failure: events.put(WorkerEnded(failure)))
            phases.finish(ready_text(url_of(options, sock)))
            keeper = _EngineKeeper(engine_options, options, engine, addresses[0], events)
            return _supervise(workers, keeper, events, engine_options.shutdown_timeout)
        finally:
            for worker in workers:
                worker.kill()


class _EngineKeeper:
    """The engine-core child, started again at the same address where that was asked for."""

    def __init__(
        self,
        engine_options: Options,
        options: ServeOptions,
        child: Child | None,
        address: str,
        events: queue.SimpleQueue[Event],
    ) -> None:
        self._engine_options, self._address, self._events = engine_options, address, events
        self._restarts = self._restarts_left = options.restart_engine
        self._began_s = time.monotonic()
        self.child = child

    def on_end(self, failure: Failure) -> bool:
        """Whether it will be started again, which RestartDue announces. The pause doubles each time."""
        say(f"the engine has ended: {failure.message}")
        if time.monotonic() - self._began_s > _LONG_LIFE_S:
            self._restarts_left = self._restarts
        if not self._restarts_left:
            return False
        num_before = self._restarts - self._restarts_left
        pause_s = min(_FIRST_PAUSE_S * 2**num_before, _LONGEST_PAUSE_S)
        self._restarts_left -= 1
        timer = threading.Timer(pause_s, self._events.put, (RestartDue(),))
        timer.daemon = True
        timer.start()
        return True

    def restart(self) -> None:
        say("starting the engine again")
        self._began_s = time.monotonic()
        self.child = start_engine(self._engine_options, self._address)
        self.child.on_exit(lambda failure: self._events.put(EngineEnded(failure)))


def _supervise(
    workers: Sequence[Child], keeper: _EngineKeeper, events: queue.SimpleQueue[Event], shutdown_timeout_s: float
) -> int:
    """Until the end, which is orderly: the HTTP processes first, then the engine."""
    status = EXIT_DONE
    while True:
        event = events.get()
        if isinstance(event, Signal):
            say("stopping; a second signal does not wait")
            break
        if isinstance(event, RestartDue):
            keeper.restart()
            continue
        if isinstance(event, EngineEnded):
            if keeper.on_end(event.failure):
                continue
            status = EXIT_ENGINE_FAILED
        else:
            say(f"an HTTP process has ended: {event.failure.message}")
            status = EXIT_ERROR
        break
    _stop_all(workers, events, shutdown_timeout_s if status == EXIT_DONE else 0.0)
    if keeper.child is not None:
        keeper.child.stop(_ENGINE_STOP_S)
    return status


def _stop_all(workers: Sequence[Child], events: queue.SimpleQueue[Event], deadline_s: float) -> None:
    """Drains them side by side. A second signal ends the waiting."""
    drains = [threading.Thread(target=worker.stop, args=(deadline_s,), daemon=True) for worker in workers]
    for drain in drains:
        drain.start()

    def report_end() -> None:
        for drain in drains:
            drain.join()
        events.put(WorkerEnded(Failure(message="all have stopped")))

    threading.Thread(target=report_end, daemon=True).start()
    while any(worker.alive for worker in workers):
        event = events.get()
        if isinstance(event, Signal):
            say("stopping at once")
            for worker in workers:
                worker.stop(0.0)


def _start_workers(options: ServeOptions, addresses: Sequence[str], folder: Path, *, comes_back: bool) -> list[Child]:
    pages = folder / "metrics"
    pages.write_bytes(bytes(pages_bytes(options.api_server_count, len(addresses))))
    workers = []
    for index in range(options.api_server_count):
        told = WorkerOptions(
            server=options,
            engines=tuple(addresses),
            engines_come_back=comes_back,
            pages_file=str(pages),
            num_processes=options.api_server_count,
            index=index,
        )
        start = Start(schema_hash=SCHEMA_HASH, options=msgspec.to_builtins(told), bind="")
        workers.append(Child(f"http-{index}", ["-m", "headrace.frontend.http.worker"], start))
    return workers


def _on_signal(events: queue.SimpleQueue[Event], number: int, frame: FrameType | None) -> None:
    events.put(Signal(number))
