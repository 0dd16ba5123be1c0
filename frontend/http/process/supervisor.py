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
from typing import Any

import msgspec

from headrace.core.options.engine_options import Options
from headrace.core.process.child import Child, ChildOptions, start_coordinator, start_engine
from headrace.core.process.supervisor import (
    ChildEnded,
    ChildReady,
    Place,
    Restarts,
    StartDue,
    Stopped,
    Supervisor,
    newly_stopped,
    stop_at_once,
)
from headrace.frontend.fleet.scaling import DRAIN_GRACE_S, MOST_ENGINES
from headrace.frontend.fleet.start import of_rank
from headrace.frontend.http.process.launch import PhaseLog, say, say_ready, say_workers
from headrace.frontend.http.process.options import ServeOptions
from headrace.frontend.http.process.ranks import Ranks, why_fixed
from headrace.frontend.http.process.server import EXIT_DONE, EXIT_ENGINE_FAILED, EXIT_ERROR, check_files, listen, url_of
from headrace.frontend.http.process.worker import (
    EngineDown,
    EngineLost,
    EnginesThere,
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
from headrace.ipc.process.own_folder import OwnFolder
from headrace.ipc.process.resources import raise_file_limit
from headrace.ipc.transport.channel import ChannelClosedError
from headrace.ipc.transport.sockets import peer_timeout_s
from headrace.ipc.wait import Deadline, WaitTimeoutError

_ENGINE_STOP_S = 5.0
_TELL_S = 1.0
_LAST_EVENTS_S = 2.0
"""How long the HTTP processes have to tell their clients why the engine ended."""
_MOST_RESTARTS = Restarts(most=4, first_pause_s=0.5)
"""Of an HTTP process: the server ends after five in a row that do not last."""
_LOOK_S = 5.0
"""How often to check whether an HTTP process is stopped by a signal, since its connections wait meanwhile."""


class Signal(msgspec.Struct, frozen=True):
    number: int


class ScaleAsked(msgspec.Struct, frozen=True):
    """An HTTP process asks for another number of engines."""

    by: Child
    wanted: ScaleTo


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
    supervisor = Supervisor()
    for number in heeded_signals():
        signal.signal(number, lambda number, frame: supervisor.events.put(Signal(number)))
    with sock or contextlib.nullcontext(), _shared_stores(options) as options:
        restarts = options.num_restarts(engine_options.data_parallel_size if ranks.coordinator else len(engines))
        keepers = [
            _Engine(of_rank(engine_options, rank), restarts, each)
            for rank, each in zip(ranks.here, engines, strict=True)
        ]
        num_processes = 0 if sock is None else options.api_server_count
        service = _Service(options, keepers, supervisor, engine_options, num_processes, coordinator, ranks)
        try:
            service.start_all()
            for keeper in keepers[1:]:  # which pass through the same phases
                supervisor.watch(keeper)
            if keepers:
                supervisor.watch(keepers[0], lambda phase: phases.enter(f"engine: {phase}"))
            if not keepers:
                phases.enter(f"start {options.api_server_count} HTTP processes")
            if sock is not None:
                url = url_of(options, sock)
                service.on_engine = lambda: phases.enter(f"attach {options.api_server_count} HTTP processes")
                service.on_ready = lambda: say_ready(phases, url, options)
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


class _Engine(Place):
    """An engine-core child of a rank."""

    child: Child

    def __init__(self, options: Options, restarts: int, child: Child) -> None:
        super().__init__("engine-core", Restarts(restarts), self._start_again, child)
        self._options = options
        self.address = ""
        """Where it is to listen: with a coordinator, as frontends know it by rank, a restarted one must listen there
        too."""
        self.rank = options.data_parallel_rank
        self.is_leaving = False

    def _start_again(self) -> Child:
        say("starting the engine again")
        return start_engine(self._options, self.address, self.child.weights_path)

    def on_ready(self, ready: Ready) -> None:
        say_workers(ready)
        self.is_ready = True
        if self._options.coordinator:
            self.address = ready.address

    def end_lost(self, lost: EngineLost) -> Failure | None:
        """Kills an engine that was silent for too long. Returns why; None if it has ended or was replaced already."""
        child = self.child
        if not child.alive or child.ready is None or child.ready.address != lost.address:
            return None
        how = "is stopped by a signal or a debugger" if child.is_stopped else "does not answer"
        child.kill()
        message = f"{child.name} (pid {child.pid}) {how}: {lost.failure.message}; it was ended"
        return msgspec.structs.replace(lost.failure, message=message)

    @property
    def serves(self) -> bool:
        return self.runs and not self.is_leaving

    def stop(self) -> None:
        # An engine that is still loading cannot be asked to stop, and has no requests to lose.
        self.child.kill() if self.child.ready is None else self.child.stop(_ENGINE_STOP_S)


class _HttpProcess(Place):
    def __init__(self, index: int, launch: Callable[[int], Child]) -> None:
        super().__init__(f"http-{index}", _MOST_RESTARTS, lambda: launch(index))
        self.index = index


class _Coordinator(Place):
    """It is replaced at its address, which engines and HTTP processes know; they work on without it meanwhile."""


class _Scaling:
    """A change of the number of engines that an HTTP process has asked for."""

    def __init__(self, asked: ScaleAsked) -> None:
        self.by, self.wanted = asked.by, asked.wanted
        self.end_s: float | None = None
        """When to give up waiting (monotonic seconds); None before it has begun."""
        self.why = ""
        """Why the first engine that failed did."""


class _Service:
    """The HTTP processes and the engines, from their start to their end."""

    def __init__(
        self,
        options: ServeOptions,
        keepers: list[_Engine],
        supervisor: Supervisor,
        engine_options: Options,
        num_processes: int,
        coordinator: Child | None,
        ranks: Ranks,
    ) -> None:
        self._options, self._supervisor, self._events = options, supervisor, supervisor.events
        self._keepers = {keeper.rank: keeper for keeper in keepers}
        self._engine_options, self._ranks = engine_options, ranks
        self._coordinator: _Coordinator | None = None
        if coordinator is not None:
            (address,) = engine_options.coordinator
            self._coordinator = _Coordinator(
                "coordinator", Restarts(0), lambda: start_coordinator(address), coordinator
            )
        self._are_found = bool(engine_options.coordinator)
        """HTTP processes find engines through coordinators; else this process reports its single engine to them."""
        self._restarts = options.num_restarts(engine_options.data_parallel_size)
        self._why_fixed = why_fixed(engine_options, ranks, num_processes)
        self._shutdown_timeout_s, self._peer_timeout_s = engine_options.shutdown_timeout, engine_options.peer_timeout
        self._logs_stats = not engine_options.disable_log_stats
        self._processes = [_HttpProcess(index, self._launch_process) for index in range(num_processes)]
        self._pages = os.memfd_create("headrace-metrics")  # no name that could stay behind
        os.ftruncate(self._pages, pages_bytes(options.api_server_count))
        self._engine_news: EngineUp | EngineDown | None = None
        self._was_ready = self._were_all_ready = False
        """Of the first: engines and HTTP processes; of the second: engines."""
        self._joining: set[int] = set()
        """Ranks of engines that a scaling has started and that have not been ready yet."""
        self._scalings: collections.deque[_Scaling] = collections.deque()
        """The first is under way, and the others wait for its end."""
        self.on_engine: Callable[[], None] = lambda: None
        """Called when all engines are ready, before `on_ready`."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called once, when all engines and HTTP processes are ready."""

    def start_all(self) -> None:
        if self._coordinator is not None:
            self._supervisor.watch(self._coordinator)
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
        if self._coordinator is not None and self._coordinator.child is not None:
            self._coordinator.child.kill()
        os.close(self._pages)

    def _start(self, process: _HttpProcess) -> None:
        self._supervisor.start(process)
        if self._were_all_ready and self._are_found:
            self._tell(EnginesThere(num_engines=self._num_serving()), [process])
        elif self._engine_news is not None:
            self._tell(self._engine_news, [process])

    def _launch_process(self, index: int) -> Child:
        told = WorkerOptions(
            server=self._options,
            parent_has_engine=bool(self._keepers) and not self._are_found,
            coordinators=self._engine_options.coordinator,
            num_scalable=self._engine_options.data_parallel_size if not self._why_fixed else 0,
            why_fixed=self._why_fixed,
            awaits_number=bool(self._keepers) and self._are_found,
            others_serve=self._was_ready and len(self._processes) > 1,
            restarts_found=bool(self._keepers) and self._are_found and self._restarts > 0,
            peer_timeout_s=self._peer_timeout_s,
            pages_file=f"/proc/self/fd/{self._pages}",
            num_processes=len(self._processes),
            index=index,
            logs_stats=self._logs_stats and index == 0,
        )
        kind = ChildOptions(
            pass_fds=(self._pages,),
            receives=ChildMessage | EngineLost | ScaleTo,
            on_message=lambda message: self._on_message(self._processes[index], message),
            startup_timeout_s=None,  # it waits for engines, and those of this server have a limit of their own
        )
        start = Start(schema_hash=SCHEMA_HASH, options=msgspec.to_builtins(told), bind="")
        return Child(f"http-{index}", ["-m", "headrace.frontend.http.process.worker"], start, kind)

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
            if isinstance(event, ChildReady | ChildEnded | StartDue) and not self._is_of_present(event):
                continue
            match event:
                case Signal():
                    say("stopping; a second signal does not wait")
                    return EXIT_DONE, self._shutdown_timeout_s
                case ChildEnded(place=_Coordinator()):
                    self._restart_coordinator(event.failure)
                case ChildEnded(place=place) if self._fails_start(place):
                    raise EngineStartError.from_failure(event.failure)
                case ChildEnded(place=_HttpProcess() as process):
                    status = self._on_process_end(process, event.failure)
                    if status is not None:
                        return status, _LAST_EVENTS_S if status == EXIT_ENGINE_FAILED else 0.0
                case ChildEnded() | EngineLost():
                    if not self._on_engine_end(event):
                        return EXIT_ENGINE_FAILED, _LAST_EVENTS_S
                case _:
                    self._take(event)

    def _is_of_present(self, event: ChildReady | ChildEnded | StartDue) -> bool:
        """Whether the event is about the child that has this place now: one that is killed while it is drained ends
        twice, and another engine may have its rank by the second time."""
        place = event.place
        if isinstance(place, _Engine) and self._keepers.get(place.rank) is not place:
            return False
        return place.child is event.child

    def _fails_start(self, ended: Place) -> bool:
        """Whether the end of a child ends the start. Not that of an engine once another one may have requests, which
        clients may know before this process does."""
        of_its_kind = self._keepers.values() if isinstance(ended, _Engine) else self._processes
        return not self._was_ready and not any(each.has_been_ready for each in of_its_kind)

    def _take(self, event: Any) -> None:
        """Handles an event that never ends the service."""
        match event:
            case ChildReady(place=_Engine() as engine):
                self._on_engine_ready(engine, event.ready)
            case ChildReady(place=_HttpProcess() as process):
                process.is_ready = True
                self._check_ready()
            case StartDue(place=_Engine() as engine):
                if not engine.is_leaving:
                    self._supervisor.start(engine)
            case StartDue(place=_HttpProcess() as process):
                self._start(process)
            case ScaleAsked():
                self._scalings.append(_Scaling(event))

    def _on_engine_ready(self, engine: _Engine, ready: Ready) -> None:
        engine.on_ready(ready)
        self._joining.discard(engine.rank)
        if not self._was_ready and all(each.is_ready for each in self._keepers.values()):
            self.on_engine()
        self._check_ready()
        if not self._are_found:
            self._tell(EngineUp(address=ready.address, peer_timeout_s=ready.peer_timeout_s))

    def _check_ready(self) -> None:
        """The start is over once all engines and all processes are ready."""
        engines_are = all(keeper.is_ready for keeper in self._keepers.values())
        if engines_are and not self._were_all_ready:
            self._were_all_ready = True
            if self._are_found:
                self._tell(EnginesThere(num_engines=self._num_serving()))
        if not self._was_ready and engines_are and all(each.is_ready for each in self._processes):
            self._was_ready = True
            self.on_ready()

    def _on_engine_end(self, event: ChildEnded | EngineLost) -> bool:
        """Returns whether an engine is left or will be restarted."""
        if isinstance(event, EngineLost):  # comes only for the single engine that this process reports
            (keeper,) = self._keepers.values()
            if (failure := keeper.end_lost(event)) is None:
                return True
        else:
            keeper, failure = event.place, event.failure
        has_left = keeper.is_leaving or (self._are_found and keeper.child.status == EXIT_DONE)
        if has_left:
            say(f"the engine of rank {keeper.rank} was drained and has left")
        comes_back = not has_left and keeper.rank not in self._joining and self._replace(keeper, failure)
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

    def _replace(self, engine: _Engine, failure: Failure) -> bool:
        say(f"the engine has ended: {failure.message}", logging.ERROR)
        return self._supervisor.replace(engine)

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
            num, why = self._num_serving(), ""
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
        ChildReady or ChildEnded follow."""
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
            self._supervisor.watch(self._keepers[rank])
        for rank in sorted(staying, key=lambda each: (not self._keepers[each].serves, each))[size:]:
            self._keepers[rank].is_leaving = True
            self._supervisor.drain(self._keepers[rank], drain_timeout_s)

    def _new_keeper(self, rank: int, size: int) -> _Engine:
        """Starts an engine. Raises EngineStartError."""
        options = of_rank(msgspec.structs.replace(self._engine_options, data_parallel_size=size), rank)
        weights_path = next((each.child.weights_path for each in self._keepers.values() if each.is_ready), "")
        child = start_engine(options, self._ranks.new_address(), weights_path)
        return _Engine(options, self._options.num_restarts(size), child)

    def _restart_coordinator(self, failure: Failure) -> None:
        say(f"the coordinator has ended and is started again: {failure.message}")
        assert self._coordinator is not None, "it has ended"
        self._supervisor.start(self._coordinator)

    def _on_process_end(self, process: _HttpProcess, failure: Failure) -> int | None:
        """Restarts the process after a pause; the others serve on. Returns an exit status if the server must end."""
        assert process.child is not None
        if process.child.status == EXIT_ENGINE_FAILED:
            return EXIT_ENGINE_FAILED
        if not self._supervisor.replace(process):
            say(f"an HTTP process ends again and again: {failure.message}")
            return EXIT_ERROR
        say(f"an HTTP process has ended and is started again: {failure.message}")
        return None

    def _look_for_stopped(self) -> None:
        """Reports children that a signal has stopped, and kills them after the peer timeout: their connections wait."""
        engines = self._keepers.values() if self._coordinator is not None else ()  # else processes send EngineLost
        most_s = self._peer_timeout_s or peer_timeout_s()
        for place, child in newly_stopped([*self._processes, *engines], most_s):
            waits = "its connections wait" if isinstance(place, _HttpProcess) else "others have its requests"
            say(f"{child.name} (pid {child.pid}) is stopped by a signal or a debugger; {waits}")

    def _num_serving(self) -> int:
        return sum(keeper.serves for keeper in self._keepers.values())

    def _tell(self, news: EngineUp | EngineDown | EnginesThere, processes: Sequence[_HttpProcess] = ()) -> None:
        """processes: by default all."""
        if not isinstance(news, EnginesThere):
            self._engine_news = news
        for process in processes or self._processes:
            with contextlib.suppress(ChannelClosedError, WaitTimeoutError):  # ChildEnded follows
                if process.child is not None:
                    process.child.send(news, Deadline(_TELL_S))

    def _stop_all(self, deadline_s: float) -> int:
        """Drains the HTTP processes in parallel, or the engines where another host has those; a second signal ends the
        wait. Returns the drain's exit status."""
        children = [process.child for process in self._processes if process.child is not None]
        if not self._processes:  # engines that still load are killed afterwards
            children = [keeper.child for keeper in self._keepers.values() if keeper.child.ready is not None]
        self._supervisor.ask_to_stop(children, deadline_s)
        status = EXIT_DONE
        while True:
            match event := self._events.get():
                case Signal():
                    say("stopping at once")
                    stop_at_once(children, 0.0)
                case ChildEnded(place=_Engine() as engine) if engine.child.status == EXIT_DONE:
                    say("the engine was asked to end as well, and has left")
                case ChildEnded(place=_Engine()):
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
