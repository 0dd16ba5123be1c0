"""The parent of several HTTP processes with the same engines. It serves no HTTP: it starts, watches and stops them.

From the start on, all events pass through one queue: signals, messages of children, and how children end.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import msgspec

from headrace.core.options.engine_options import Options
from headrace.core.process.supervisor import Child, ChildOptions, start_coordinator, start_engine
from headrace.frontend.fleet.client import of_rank
from headrace.frontend.fleet.scaling import DRAIN_GRACE_S, MOST_ENGINES
from headrace.frontend.http.process.launch import PhaseLog, ready_text, say, say_workers
from headrace.frontend.http.process.options import ServeOptions
from headrace.frontend.http.process.ranks import Ranks, why_fixed
from headrace.frontend.http.process.server import (
    EXIT_DONE,
    EXIT_ENGINE_FAILED,
    EXIT_ERROR,
    check_files,
    listen,
    url_of,
)
from headrace.frontend.http.process.worker import (
    EngineDown,
    EngineLost,
    EngineUp,
    Scaled,
    ScaleTo,
    WorkerOptions,
)
from headrace.frontend.http.server.metrics import pages_bytes
from headrace.frontend.text.template_renderer import renderer
from headrace.ipc.failure import EngineStartError, Failure, HeadraceError
from headrace.ipc.messages import SCHEMA_HASH, ChildMessage, Ready, Start
from headrace.ipc.process.child import heeded_signals
from headrace.ipc.process.limits import raise_file_limit
from headrace.ipc.process.own_folder import OwnFolder
from headrace.ipc.transport.channel import ChannelClosedError
from headrace.ipc.transport.sockets import peer_timeout_s
from headrace.ipc.wait import Deadline, WaitTimeoutError

_ENGINE_STOP_S = 5.0
_TELL_S = 1.0
_LAST_EVENTS_S = 2.0
"""How long the HTTP processes have to tell their clients why the engine ended."""
_LONG_LIFE_S = 60.0
"""A process that dies after it has served this long is restarted as if for the first time."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 30.0
_MOST_PROCESS_STARTS = 5
"""Most starts in a row of one HTTP process that dies each time before it has served for _LONG_LIFE_S."""
_LOOK_S = 5.0
"""How often to check whether an HTTP process is stopped by a signal, since its connections wait meanwhile."""


class EngineReady(msgspec.Struct, frozen=True):
    rank: int
    child: Child
    """Which of the engines that have this rank one after another."""
    address: str
    peer_timeout_s: float | None


class EngineEnded(msgspec.Struct, frozen=True):
    rank: int
    child: Child
    failure: Failure


class ProcessReady(msgspec.Struct, frozen=True):
    index: int


class ProcessEnded(msgspec.Struct, frozen=True):
    index: int
    failure: Failure


class EngineStartDue(msgspec.Struct, frozen=True):
    """The pause before the engine's next start is over."""

    rank: int
    child: Child
    """The one that has ended."""


class ScaleAsked(msgspec.Struct, frozen=True):
    """An HTTP process asks for another number of engines."""

    by: Child
    wanted: ScaleTo


class CoordinatorEnded(msgspec.Struct, frozen=True):
    failure: Failure


class ProcessStartDue(msgspec.Struct, frozen=True):
    """The pause before an HTTP process's next start is over."""

    index: int


class Stopped(msgspec.Struct, frozen=True):
    """All HTTP processes have ended after they were asked to stop."""


class Signal(msgspec.Struct, frozen=True):
    number: int


SupervisorEvent = (
    EngineReady
    | EngineEnded
    | EngineLost
    | EngineStartDue
    | ScaleAsked
    | CoordinatorEnded
    | ProcessReady
    | ProcessEnded
    | ProcessStartDue
    | Stopped
    | Signal
)
Events = queue.SimpleQueue[SupervisorEvent]


def serve_with_processes(
    engine_options: Options,
    options: ServeOptions,
    engines: Sequence[Child],
    phases: PhaseLog,
    coordinator: Child | None,
    ranks: Ranks,
) -> int:
    """Serves until it is asked to stop or the engines end for good. Returns the exit status.

    engines: the children of these ranks, which are starting already. The HTTP processes find several engines through
    the coordinator; this process reports a single one to them. Raises HeadraceError if the start fails.
    """
    sock: socket.socket | None = None
    if not options.headless:
        check_files(options)
        renderer().end()  # the HTTP processes have their own
        # Bound but never listening: it reserves the port, and no connection is queued at it.
        listen(options).close()  # fails if another server has the port, which shared sockets would share
        sock = listen(options, shared=True)
        if options.port == 0:
            options = msgspec.structs.replace(options, port=sock.getsockname()[1])
    raise_file_limit()
    events: Events = queue.SimpleQueue()
    for number in heeded_signals():
        signal.signal(number, lambda number, frame: _on_signal(events, number, frame))
    with sock or contextlib.nullcontext(), _shared_stores(options) as options:
        restarts = options.num_restarts(engine_options.data_parallel_size if ranks.coordinator else len(engines))
        keepers = [
            _EngineKeeper(of_rank(engine_options, rank), restarts, each, events)
            for rank, each in zip(ranks.here, engines, strict=True)
        ]
        processes = [_HttpProcess(index) for index in range(0 if sock is None else options.api_server_count)]
        service = _Service(options, keepers, events, engine_options, processes, coordinator, ranks)
        try:
            service.start_all()
            for keeper in keepers[1:]:  # which pass through the same phases
                keeper.watch_start()
            if keepers:
                keepers[0].watch_start(lambda phase: phases.enter(f"engine: {phase}"))
            if not keepers:
                phases.enter(f"start {options.api_server_count} HTTP processes")
            if sock is not None:
                text = ready_text(url_of(options, sock), options)
                service.on_engine = lambda: phases.enter(f"attach {options.api_server_count} HTTP processes")
            else:
                text = f"ready: {len(keepers)} engines, for the host of the coordinator at {ranks.coordinator}"
            service.on_ready = lambda: phases.finish(text)
            return service.run()
        finally:
            service.close()


@contextlib.contextmanager
def _shared_stores(options: ServeOptions) -> Iterator[ServeOptions]:
    """Any HTTP process may be asked for what another one stored: stores without a path of the user's share a folder."""
    places = {"response_store": "responses.sqlite", "file_store": "files"}
    kept = [name for name in places if getattr(options, name) is None and getattr(options, f"{name}_bytes")]
    if not kept:
        yield options
        return
    with OwnFolder("stores") as folder:
        missing = {name: f"{folder.path}/{places[name]}" for name in kept}
        yield msgspec.structs.replace(options, **missing)


class _EngineKeeper:
    """An engine-core child, which is restarted up to `restarts` times."""

    def __init__(self, options: Options, restarts: int, child: Child, events: Events) -> None:
        self._options, self._events = options, events
        self._address = ""
        """With a coordinator, the address at which a restarted engine must listen too: frontends know it by rank."""
        self.rank = options.data_parallel_rank
        self.is_ready = self.is_leaving = False
        self.stopped_since_s: float | None = None
        """When it was first seen stopped by a signal."""
        self._restarts = self._restarts_left = restarts
        self._began_s = time.monotonic()
        self.child = child

    def watch_start(self, on_phase: Callable[[str], None] = lambda phase: None) -> None:
        """Later puts EngineReady into the queue and, when the engine ends or its start fails, EngineEnded."""

        child = self.child

        def on_ready(ready: Ready) -> None:
            say_workers(ready)
            if self._options.coordinator:
                self._address = ready.address
            self._events.put(EngineReady(self.rank, child, ready.address, ready.peer_timeout_s))

        _watch_start(
            child,
            on_ready,
            lambda failure: self._events.put(EngineEnded(self.rank, child, failure)),
            on_phase,
        )

    def on_end(self, failure: Failure) -> bool:
        """Returns whether the engine will be restarted, at EngineStartDue after a pause, which doubles each time."""
        say(f"the engine has ended: {failure.message}", logging.ERROR)
        self.is_ready, self.stopped_since_s = False, None
        if time.monotonic() - self._began_s > _LONG_LIFE_S:
            self._restarts_left = self._restarts
        if not self._restarts_left:
            return False
        num_before = self._restarts - self._restarts_left
        pause_s = min(_FIRST_PAUSE_S * 2**num_before, _LONGEST_PAUSE_S)
        self._restarts_left -= 1
        timer = threading.Timer(pause_s, self._events.put, (EngineStartDue(self.rank, self.child),))
        timer.daemon = True
        timer.start()
        return True

    def end_lost(self, lost: EngineLost) -> Failure | None:
        """Kills an engine that was silent for too long. Returns why; None if it has ended or was replaced already."""
        child = self.child
        if not child.alive or child.ready is None or child.ready.address != lost.address:
            return None
        how = "is stopped by a signal or a debugger" if child.is_stopped else "does not answer"
        child.kill()
        message = f"{child.name} (pid {child.pid}) {how}: {lost.failure.message}; it was ended"
        return msgspec.structs.replace(lost.failure, message=message)

    def drain(self, deadline_s: float) -> None:
        """Lets the engine finish its requests and end, within `deadline_s`; EngineEnded follows."""
        child, self.is_leaving = self.child, True

        def drain() -> None:
            child.stop(deadline_s)
            self._events.put(EngineEnded(self.rank, child, Failure(message="it was drained", type="Drained")))

        threading.Thread(target=drain, name=f"drain-{self.rank}", daemon=True).start()

    def restart(self) -> None:
        """Raises EngineStartError if the engine's program cannot be started."""
        say("starting the engine again")
        self._began_s = time.monotonic()
        self.child = start_engine(self._options, self._address, self.child.weights_path)
        self.watch_start()

    @property
    def serves(self) -> bool:
        """It is ready and has not ended, also where the news of its end are still to come."""
        return self.is_ready and not self.is_leaving and self.child.runs

    def stop(self) -> None:
        # An engine that is still loading cannot be asked to stop, and has no requests to lose.
        self.child.kill() if self.child.ready is None else self.child.stop(_ENGINE_STOP_S)


class _Scaling:
    """A change of the number of engines that an HTTP process has asked for."""

    def __init__(self, asked: ScaleAsked) -> None:
        self.by, self.wanted = asked.by, asked.wanted
        self.end_s: float | None = None
        """When to give up waiting (monotonic seconds); None before it has begun."""
        self.why = ""
        """Why the first engine that failed did."""


class _HttpProcess:
    """One of the HTTP processes: its index, and its current child, which is replaced when it dies."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.child: Child | None = None
        self.is_ready = False
        self.began_s = 0.0
        self.num_starts = 0
        """In a row, without a long life in between."""
        self.stopped_since_s: float | None = None
        """When it was first seen stopped by a signal."""


class _Service:
    """The HTTP processes and the engines, from their start to their end."""

    def __init__(
        self,
        options: ServeOptions,
        keepers: list[_EngineKeeper],
        events: Events,
        engine_options: Options,
        processes: list[_HttpProcess],
        coordinator: Child | None,
        ranks: Ranks,
    ) -> None:
        self._options, self._events = options, events
        self._keepers = {keeper.rank: keeper for keeper in keepers}
        self._engine_options, self._coordinator, self._ranks = engine_options, coordinator, ranks
        self._are_found = bool(engine_options.coordinator)
        """HTTP processes find engines through coordinators; else this process reports its single engine to them."""
        self._why_fixed = why_fixed(engine_options, ranks, len(processes))
        self._shutdown_timeout_s, self._peer_timeout_s = engine_options.shutdown_timeout, engine_options.peer_timeout
        self._logs_stats = not engine_options.disable_log_stats
        self._processes = processes
        self._pages = os.memfd_create("headrace-metrics")  # no name that could stay behind
        os.ftruncate(self._pages, pages_bytes(options.api_server_count))
        self._engine_news: EngineUp | EngineDown | None = None
        self._was_ready = False
        self._joining: set[int] = set()
        """Ranks of engines that a scaling has started and that have not been ready yet."""
        self._scalings: collections.deque[_Scaling] = collections.deque()
        """The first is under way, and the others wait for its end."""
        self.on_engine: Callable[[], None] = lambda: None
        """Called when all engines are ready, before `on_ready`."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called once, when all engines and HTTP processes are ready."""

    def start_all(self) -> None:
        self._watch_coordinator()
        for process in self._processes:
            self._start(process)

    def run(self) -> int:
        """Serves, then stops the HTTP processes, and the engines after them. Returns the exit status.

        Raises EngineStartError if an engine or HTTP process ends before all are ready.
        """
        status, deadline_s = self._serve()
        stopped = self._stop_all(deadline_s)
        stops = [threading.Thread(target=keeper.stop) for keeper in self._keepers.values()]
        for stop in stops:
            stop.start()
        for stop in stops:
            stop.join()
        return max(status, stopped)

    def close(self) -> None:
        """Kills the HTTP processes and the coordinator that still run, and frees the pages of metrics."""
        for process in self._processes:
            if process.child is not None:
                process.child.kill()
        if self._coordinator is not None:
            self._coordinator.kill()
        os.close(self._pages)

    def _start(self, process: _HttpProcess) -> None:
        told = WorkerOptions(
            server=self._options,
            parent_has_engine=bool(self._keepers) and not self._are_found,
            coordinators=self._engine_options.coordinator,
            num_scalable=self._engine_options.data_parallel_size if not self._why_fixed else 0,
            why_fixed=self._why_fixed,
            peer_timeout_s=self._peer_timeout_s,
            pages_file=f"/proc/self/fd/{self._pages}",
            num_processes=len(self._processes),
            index=process.index,
            logs_stats=self._logs_stats and process.index == 0,
        )
        kind = ChildOptions(
            pass_fds=(self._pages,),
            receives=ChildMessage | EngineLost | ScaleTo,
            on_message=lambda message: self._on_message(process, message),
            startup_timeout_s=None,  # it waits for engines, and those of this server have a limit of their own
        )
        start = Start(schema_hash=SCHEMA_HASH, options=msgspec.to_builtins(told), bind="")
        process.is_ready, process.began_s, process.stopped_since_s = False, time.monotonic(), None
        process.num_starts += 1
        child = process.child = Child(
            f"http-{process.index}", ["-m", "headrace.frontend.http.process.worker"], start, kind
        )
        if self._engine_news is not None:
            self._tell(self._engine_news, [process])
        index = process.index
        _watch_start(
            child,
            lambda ready: self._events.put(ProcessReady(index)),
            lambda failure: self._events.put(ProcessEnded(index, failure)),
        )

    def _on_message(self, process: _HttpProcess, message: Any) -> None:
        if isinstance(message, EngineLost):
            self._events.put(message)
        elif isinstance(message, ScaleTo) and process.child is not None:
            self._events.put(ScaleAsked(process.child, message))

    def _serve(self) -> tuple[int, float]:
        """Handles events until the end. Returns the exit status, and how long the HTTP processes have to finish."""
        while True:
            self._go_on_scaling()
            try:
                event = self._events.get(timeout=_LOOK_S)
            except queue.Empty:
                self._look_for_stopped()
                continue
            if isinstance(event, EngineReady | EngineEnded | EngineStartDue) and not self._is_of_present(event):
                continue
            match event:
                case Signal():
                    say("stopping; a second signal does not wait")
                    return EXIT_DONE, self._shutdown_timeout_s
                case EngineReady():
                    self._keepers[event.rank].is_ready = True
                    self._joining.discard(event.rank)
                    if not self._was_ready and all(keeper.is_ready for keeper in self._keepers.values()):
                        self.on_engine()
                    self._check_ready()
                    if not self._are_found:
                        self._tell(EngineUp(address=event.address, peer_timeout_s=event.peer_timeout_s))
                case EngineEnded() | ProcessEnded() if not self._serves:
                    raise EngineStartError.from_failure(event.failure)
                case EngineEnded() | EngineLost():
                    if not self._on_engine_end(event):
                        return EXIT_ENGINE_FAILED, _LAST_EVENTS_S
                case ProcessEnded():
                    status = self._on_process_end(self._processes[event.index], event.failure)
                    if status is not None:
                        return status, _LAST_EVENTS_S if status == EXIT_ENGINE_FAILED else 0.0
                case _:
                    self._take(event)

    def _is_of_present(self, event: EngineReady | EngineEnded | EngineStartDue) -> bool:
        """Whether the event is about the engine that has this rank now: one that is killed while it is drained ends
        twice, and another may have its rank by the second time."""
        keeper = self._keepers.get(event.rank)
        return keeper is not None and keeper.child is event.child

    @property
    def _serves(self) -> bool:
        """Whether there may be requests: an engine and an HTTP process are, or were, ready."""
        return self._was_ready or (
            any(keeper.is_ready for keeper in self._keepers.values()) and any(each.is_ready for each in self._processes)
        )

    def _take(self, event: SupervisorEvent) -> None:
        """Handles an event that never ends the service."""
        match event:
            case EngineStartDue() if not self._keepers[event.rank].is_leaving:
                try:
                    self._keepers[event.rank].restart()
                except HeadraceError as error:  # the model's files may be back later
                    failure = Failure.of(error, process="engine-core", phase="start")
                    self._events.put(EngineEnded(event.rank, event.child, failure))
            case ScaleAsked():
                self._scalings.append(_Scaling(event))
            case CoordinatorEnded():
                self._restart_coordinator(event.failure)
            case ProcessReady():
                self._on_process_ready(self._processes[event.index])
            case ProcessStartDue():
                self._start(self._processes[event.index])

    def _on_process_ready(self, process: _HttpProcess) -> None:
        process.is_ready = True
        self._check_ready()

    def _check_ready(self) -> None:
        """The start is over once all engines and all processes are ready."""
        engines_are = all(keeper.is_ready for keeper in self._keepers.values())
        if not self._was_ready and engines_are and all(each.is_ready for each in self._processes):
            self._was_ready = True
            self.on_ready()

    def _on_engine_end(self, event: EngineEnded | EngineLost) -> bool:
        """Returns whether an engine is left or will be restarted."""
        if isinstance(event, EngineLost):  # comes only for the single engine that this process reports
            (keeper,) = self._keepers.values()
            if (failure := keeper.end_lost(event)) is None:
                return True
        else:
            keeper, failure = self._keepers[event.rank], event.failure
        has_left = keeper.is_leaving or (self._are_found and keeper.child.status == EXIT_DONE)
        if has_left:
            say(f"the engine of rank {keeper.rank} was drained and has left")
        comes_back = not has_left and keeper.rank not in self._joining and keeper.on_end(failure)
        if not self._are_found:
            self._tell(EngineDown(failure=failure, comes_back=comes_back))
            return comes_back
        if not has_left and keeper.rank in self._joining:  # a scaling that fails is not tried again by itself
            say(f"the engine of rank {keeper.rank} did not start: {failure.message}", logging.ERROR)
            comes_back = False
        self._joining.discard(keeper.rank)
        if not comes_back:
            del self._keepers[keeper.rank]
            if not has_left and self._scalings:
                self._scalings[0].why = self._scalings[0].why or failure.message
        self._check_ready()
        return bool(self._keepers)

    def _go_on_scaling(self) -> None:
        """Answers the scaling under way once every engine that starts or leaves has done so; then begins the next."""
        while self._scalings:
            scaling = self._scalings[0]
            if scaling.end_s is None:
                self._scale(scaling)
                assert scaling.end_s is not None, "it has begun"
            if not self._is_settled(scaling) and time.monotonic() < scaling.end_s:
                return
            self._scalings.popleft()
            num, why = sum(keeper.serves for keeper in self._keepers.values()), ""
            if num != scaling.wanted.size:
                why = (
                    scaling.why or "an engine has ended, or does not start or leave in time; the server's log says why"
                )
            with contextlib.suppress(ChannelClosedError, WaitTimeoutError):  # its client went with it
                scaling.by.send(Scaled(call=scaling.wanted.call, num_engines=num, why=why), Deadline(_TELL_S))

    def _is_settled(self, scaling: _Scaling) -> bool:
        """All that start or leave have done so; of one that has failed, engines being restarted are not awaited."""
        if self._joining or any(keeper.is_leaving for keeper in self._keepers.values()):
            return False
        return bool(scaling.why) or all(keeper.is_ready for keeper in self._keepers.values())

    def _scale(self, scaling: _Scaling) -> None:
        """Starts the engines that lack, or drains some: first those that do not serve, then those of the highest ranks.
        EngineReady or EngineEnded follow."""
        size, drain_timeout_s = scaling.wanted.size, scaling.wanted.drain_timeout_s
        say(f"there are to be {size} engines")
        scaling.end_s = time.monotonic() + drain_timeout_s + DRAIN_GRACE_S + self._engine_options.startup_timeout
        staying = [rank for rank, keeper in self._keepers.items() if not keeper.is_leaving]
        lacking = [each for each in range(MOST_ENGINES) if each not in self._keepers][: size - len(staying)]
        for rank in lacking if len(staying) < size else ():
            try:
                self._keepers[rank] = self._new_keeper(rank, size)
            except HeadraceError as error:  # the model's files may be away
                scaling.why = str(error).partition("\n")[0]
                say(f"the engine of rank {rank} did not start: {scaling.why}", logging.ERROR)
                break
            self._joining.add(rank)
            self._keepers[rank].watch_start()
        for rank in sorted(staying, key=lambda each: (not self._keepers[each].serves, each))[size:]:
            self._keepers[rank].drain(drain_timeout_s)

    def _new_keeper(self, rank: int, size: int) -> _EngineKeeper:
        """Starts an engine. Raises EngineStartError."""
        options = of_rank(msgspec.structs.replace(self._engine_options, data_parallel_size=size), rank)
        weights_path = next((each.child.weights_path for each in self._keepers.values() if each.is_ready), "")
        child = start_engine(options, self._ranks.new_address(), weights_path)
        return _EngineKeeper(options, self._options.num_restarts(size), child, self._events)

    def _restart_coordinator(self, failure: Failure) -> None:
        """Restarts it at its address, which engines and HTTP processes know; they work on without it meanwhile."""
        say(f"the coordinator has ended and is started again: {failure.message}")
        (address,) = self._engine_options.coordinator
        self._coordinator = start_coordinator(address)
        self._watch_coordinator()

    def _watch_coordinator(self) -> None:
        if self._coordinator is not None:
            self._coordinator.on_exit(lambda failure: self._events.put(CoordinatorEnded(failure)))

    def _on_process_end(self, process: _HttpProcess, failure: Failure) -> int | None:
        """Restarts the process after a pause; the others serve on. Returns an exit status if the server must end."""
        assert process.child is not None
        if process.child.status == EXIT_ENGINE_FAILED:
            return EXIT_ENGINE_FAILED
        if process.is_ready and time.monotonic() - process.began_s > _LONG_LIFE_S:
            process.num_starts = 0
        process.is_ready = False
        if process.num_starts >= _MOST_PROCESS_STARTS:
            say(f"an HTTP process ends again and again: {failure.message}")
            return EXIT_ERROR
        say(f"an HTTP process has ended and is started again: {failure.message}")
        pause_s = _FIRST_PAUSE_S * 2**process.num_starts
        timer = threading.Timer(pause_s, self._events.put, (ProcessStartDue(process.index),))
        timer.daemon = True
        timer.start()
        return None

    def _look_for_stopped(self) -> None:
        """Reports children that a signal has stopped, and kills them after the peer timeout: their connections wait."""
        now_s = time.monotonic()
        engines = self._keepers.values() if self._coordinator is not None else ()  # else processes send EngineLost
        watched: list[_HttpProcess | _EngineKeeper] = [*self._processes, *engines]
        for each in watched:
            child = each.child
            if child is None or not child.alive or not child.is_stopped:
                each.stopped_since_s = None
            elif each.stopped_since_s is None:
                each.stopped_since_s = now_s
                waits = "its connections wait" if isinstance(each, _HttpProcess) else "others have its requests"
                say(f"{child.name} (pid {child.pid}) is stopped by a signal or a debugger; {waits}")
            elif now_s - each.stopped_since_s > (self._peer_timeout_s or peer_timeout_s()):
                os.kill(child.pid, signal.SIGKILL)  # ProcessEnded or EngineEnded follows

    def _tell(self, news: EngineUp | EngineDown, processes: Sequence[_HttpProcess] = ()) -> None:
        """processes: by default all."""
        self._engine_news = news
        for process in processes or self._processes:
            with contextlib.suppress(ChannelClosedError, WaitTimeoutError):  # ProcessEnded follows
                if process.child is not None:
                    process.child.send(news, Deadline(_TELL_S))

    def _stop_all(self, deadline_s: float) -> int:
        """Drains the HTTP processes in parallel, or the engines where another host has those; a second signal ends the
        wait. Returns the drain's exit status."""
        children = [process.child for process in self._processes if process.child is not None]
        if not self._processes:  # engines that still load are killed afterwards
            children = [keeper.child for keeper in self._keepers.values() if keeper.child.ready is not None]
        drains = _begin_stops(children, deadline_s)

        def report_end() -> None:
            for drain in drains:
                drain.join()
            self._events.put(Stopped())

        threading.Thread(target=report_end, daemon=True).start()
        status = EXIT_DONE
        while True:
            match event := self._events.get():
                case Signal():
                    say("stopping at once")
                    _begin_stops(children, 0.0)
                case EngineEnded() if self._has_left(event.rank):
                    say("the engine was asked to end as well, and has left")
                case EngineEnded():
                    say(f"the engine has ended: {event.failure.message}", logging.ERROR)
                    status = EXIT_ENGINE_FAILED
                    self._tell(EngineDown(failure=event.failure, comes_back=False))
                case Stopped():
                    break
        for child in children:
            if status == EXIT_DONE and child.status not in (EXIT_DONE, EXIT_ENGINE_FAILED):
                say(f"{child.name} did not finish what it served: {child.failure.message if child.failure else ''}")
                status = EXIT_ERROR
        return status

    def _has_left(self, rank: int) -> bool:
        keeper = self._keepers.get(rank)
        return keeper is not None and keeper.child.status == EXIT_DONE


def _begin_stops(children: Sequence[Child], deadline_s: float) -> list[threading.Thread]:
    stops = [threading.Thread(target=child.stop, args=(deadline_s,), daemon=True) for child in children]
    for stop in stops:
        stop.start()
    return stops


def _watch_start(
    child: Child,
    on_ready: Callable[[Ready], None],
    on_end: Callable[[Failure], None],
    on_phase: Callable[[str], None] = lambda phase: None,
) -> None:
    """Calls back from other threads: `on_phase`, `on_ready`, then `on_end`; if the start fails, no `on_ready`."""

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
