"""Several HTTP processes before the same engines. This process speaks no HTTP: it starts, watches and stops them.

Everything that happens comes through one queue, from the start on: signals, and what children say and how they end.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

import msgspec

from headrace.core.options.engine_options import Options
from headrace.core.process.supervisor import Child, ChildOptions, start_engine
from headrace.frontend.http.launch import ready_text
from headrace.frontend.http.metrics import pages_bytes
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.parent_engine import EngineDown, EngineUp
from headrace.frontend.http.phases import PhaseLog, say, say_workers
from headrace.frontend.http.server import (
    EXIT_DONE,
    EXIT_ENGINE_FAILED,
    EXIT_ERROR,
    check_files,
    listen,
    raise_file_limit,
    url_of,
)
from headrace.frontend.http.worker import WorkerOptions
from headrace.ipc.channel import ChannelClosedError
from headrace.ipc.failure import EngineStartError, Failure
from headrace.ipc.messages import SCHEMA_HASH, Ready, Start
from headrace.ipc.wait import Deadline, WaitTimeoutError

_ENGINE_STOP_S = 5.0
_TELL_S = 1.0
_LAST_EVENTS_S = 2.0
"""How long the HTTP processes have to tell their clients why the engine ended."""
_LONG_LIFE_S = 60.0
"""An engine that served for so long and then died is started again as if it were the first time."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 30.0


class EngineReady(msgspec.Struct, frozen=True):
    address: str


class EngineEnded(msgspec.Struct, frozen=True):
    failure: Failure


class WorkerReady(msgspec.Struct, frozen=True):
    pass


class WorkerEnded(msgspec.Struct, frozen=True):
    failure: Failure


class RestartDue(msgspec.Struct, frozen=True):
    """The pause before the engine's next start is over."""


class Signal(msgspec.Struct, frozen=True):
    number: int


Event = EngineReady | EngineEnded | WorkerReady | WorkerEnded | RestartDue | Signal
Events = queue.SimpleQueue[Event]


def serve_with_processes(engine_options: Options, options: ServeOptions, engine: Child | None, phases: PhaseLog) -> int:
    """Serves until it is told to stop, or a child ends; the exit status. `engine` is starting already.

    Raises HeadraceError when the start fails.
    """
    check_files(options)
    # Bound and never listening: it holds the port, and no connection waits at it.
    listen(options).close()  # processes that share a port would share it with another server's just as well
    sock = listen(options, shared=True)
    if options.port == 0:
        options = msgspec.structs.replace(options, port=sock.getsockname()[1])
    raise_file_limit()
    events: Events = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: _on_signal(events, number, frame))
    with sock:
        keeper = _EngineKeeper(engine_options, options.restart_engine, engine, events)
        workers = _start_workers(options, events, has_engine=engine is not None)
        try:
            if engine is not None:
                keeper.watch_start(lambda phase: phases.enter(f"engine: {phase}"))
            else:
                phases.enter(f"start {len(workers)} HTTP processes")
            crew = _Crew(workers, keeper, events, engine_options.shutdown_timeout)
            crew.on_engine = lambda: phases.enter(f"attach {len(workers)} HTTP processes")
            crew.on_ready = lambda: phases.finish(ready_text(url_of(options, sock)))
            return crew.run()
        finally:
            for worker in workers:
                worker.kill()


class _EngineKeeper:
    """The engine-core child, started again where that was asked for."""

    def __init__(self, options: Options, restarts: int, child: Child | None, events: Events) -> None:
        self._options, self._events = options, events
        self._restarts = self._restarts_left = restarts
        self._began_s = time.monotonic()
        self.child = child

    def watch_start(self, on_phase: Callable[[str], None] = lambda phase: None) -> None:
        """EngineReady will come, or EngineEnded; and after the one, some day, the other."""
        child = self.child
        assert child is not None, "an engine of somebody else is not ours to watch"

        def on_ready(ready: Ready) -> None:
            say_workers(ready)
            self._events.put(EngineReady(ready.address))

        _watch_start(
            child,
            on_ready,
            lambda failure: self._events.put(EngineEnded(failure)),
            on_phase,
        )

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
        self.child = start_engine(self._options)
        self.watch_start()

    def stop(self) -> None:
        # While it loads a model it cannot be asked, and has nothing to lose.
        if self.child is not None:
            self.child.kill() if self.child.ready is None else self.child.stop(_ENGINE_STOP_S)


class _Crew:
    """The HTTP processes and the engine, from their start to their end."""

    def __init__(
        self, workers: Sequence[Child], keeper: _EngineKeeper, events: Events, shutdown_timeout_s: float
    ) -> None:
        self._workers, self._keeper, self._events = workers, keeper, events
        self._shutdown_timeout_s = shutdown_timeout_s
        self._num_ready = 0
        self.on_engine: Callable[[], None] = lambda: None
        """Called when the engine is ready for the first time."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called once when all are."""

    def run(self) -> int:
        """Until the end, which is orderly: the HTTP processes first, then the engine. The exit status.

        Raises EngineStartError when one ends before all are ready.
        """
        status, deadline_s = self._serve()
        if self._stop_workers(deadline_s):
            status = EXIT_ENGINE_FAILED
        self._keeper.stop()
        return status

    def _serve(self) -> tuple[int, float]:
        """The exit status, and how long the HTTP processes have to finish."""
        while True:
            match event := self._events.get():
                case Signal():
                    say("stopping; a second signal does not wait")
                    return EXIT_DONE, self._shutdown_timeout_s
                case EngineReady():
                    if not self._num_ready:
                        self.on_engine()
                    self._tell(EngineUp(address=event.address))
                case WorkerReady():
                    self._num_ready += 1
                    if self._is_ready:
                        self.on_ready()
                case RestartDue():
                    self._keeper.restart()
                case EngineEnded() | WorkerEnded() if not self._is_ready:
                    raise EngineStartError.from_failure(event.failure)
                case EngineEnded():
                    comes_back = self._keeper.on_end(event.failure)
                    self._tell(EngineDown(failure=event.failure, comes_back=comes_back))
                    if not comes_back:
                        return EXIT_ENGINE_FAILED, _LAST_EVENTS_S
                case WorkerEnded():
                    if any(worker.status == EXIT_ENGINE_FAILED for worker in self._workers):
                        return EXIT_ENGINE_FAILED, _LAST_EVENTS_S
                    say(f"an HTTP process has ended: {event.failure.message}")
                    return EXIT_ERROR, 0.0

    @property
    def _is_ready(self) -> bool:
        return self._num_ready == len(self._workers)

    def _tell(self, news: EngineUp | EngineDown) -> None:
        for worker in self._workers:
            with contextlib.suppress(ChannelClosedError, WaitTimeoutError):  # its end is told elsewhere
                worker.send(news, Deadline(_TELL_S))

    def _stop_workers(self, deadline_s: float) -> bool:
        """Drains them side by side; a second signal ends the waiting. Whether the engine ended meanwhile."""
        drains = self._begin_stops(deadline_s)

        def report_end() -> None:
            for drain in drains:
                drain.join()
            self._events.put(WorkerEnded(Failure(message="all have stopped")))

        threading.Thread(target=report_end, daemon=True).start()
        engine_ended = False
        while any(worker.alive for worker in self._workers):
            match event := self._events.get():
                case Signal():
                    say("stopping at once")
                    self._begin_stops(0.0)
                case EngineEnded():
                    say(f"the engine has ended: {event.failure.message}")
                    engine_ended = True
                    self._tell(EngineDown(failure=event.failure, comes_back=False))
        return engine_ended

    def _begin_stops(self, deadline_s: float) -> list[threading.Thread]:
        stops = [threading.Thread(target=worker.stop, args=(deadline_s,), daemon=True) for worker in self._workers]
        for stop in stops:
            stop.start()
        return stops


def _start_workers(options: ServeOptions, events: Events, *, has_engine: bool) -> list[Child]:
    pages = os.memfd_create("headrace-metrics")  # no name that could stay behind
    os.ftruncate(pages, pages_bytes(options.api_server_count, len(options.engine) or 1))
    workers = []
    for index in range(options.api_server_count):
        told = WorkerOptions(
            server=options,
            parent_has_engine=has_engine,
            pages_file=f"/proc/self/fd/{pages}",
            num_processes=options.api_server_count,
            index=index,
        )
        start = Start(schema_hash=SCHEMA_HASH, options=msgspec.to_builtins(told), bind="")
        kind = ChildOptions(pass_fds=(pages,))
        workers.append(Child(f"http-{index}", ["-m", "headrace.frontend.http.worker"], start, kind))
    os.close(pages)
    for worker in workers:
        _watch_start(worker, lambda ready: events.put(WorkerReady()), lambda failure: events.put(WorkerEnded(failure)))
    return workers


def _watch_start(
    child: Child,
    on_ready: Callable[[Ready], None],
    on_end: Callable[[Failure], None],
    on_phase: Callable[[str], None] = lambda phase: None,
) -> None:
    """Calls back from another thread, in this order, and `on_end` alone when it does not get ready."""

    def watch() -> None:
        try:
            ready = child.wait_ready(on_progress=lambda progress: on_phase(progress.phase))
        except EngineStartError as error:
            on_end(Failure.of(error, process=child.name, phase="start"))
        else:
            on_ready(ready)
            child.on_exit(on_end)

    threading.Thread(target=watch, name=f"start-{child.name}", daemon=True).start()


def _on_signal(events: Events, number: int, frame: FrameType | None) -> None:
    events.put(Signal(number))
