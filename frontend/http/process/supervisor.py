"""The parent of several HTTP processes with the same engines. It serves no HTTP: it starts, watches and stops them.

All that happens, signals, messages of children, and how children end, is handled in one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from headrace.core.options.engine_options import Options
from headrace.core.process.child import Child, ChildOptions, start_coordinator, start_engine
from headrace.core.process.supervisor import Restarts, Supervised, in_thread
from headrace.frontend.client.event_loop import run_async
from headrace.frontend.fleet.scaling import EngineScaler, serves
from headrace.frontend.fleet.start import of_rank
from headrace.frontend.http.options import ServeOptions
from headrace.frontend.http.process.launch import PhaseLog, say, say_ready, say_workers
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
from headrace.ipc.failure import EngineStartError, Failure, HeadraceError, OptionError
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
_PROCESS_RESTARTS = Restarts(most=4, first_pause_s=0.5)
"""Of an HTTP process: the server ends after five in a row that do not last."""
_LOOK_S = 5.0
"""How often to check whether an HTTP process is stopped by a signal, since its connections wait meanwhile."""


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

    async def serve(options: ServeOptions) -> int:
        restarts = options.num_restarts(engine_options.data_parallel_size if ranks.coordinator else len(engines))
        own = [
            _Engine(of_rank(engine_options, rank), restarts, each)
            for rank, each in zip(ranks.here, engines, strict=True)
        ]
        num_processes = 0 if sock is None else options.api_server_count
        service = _Service(options, own, engine_options, num_processes, coordinator, ranks)
        for number in heeded_signals():
            asyncio.get_running_loop().add_signal_handler(number, service.stop)
        if own:  # the others pass through the same phases
            own[0].process.on_progress = lambda progress: phases.enter(f"engine: {progress.phase}")
        else:
            phases.enter(f"start {options.api_server_count} HTTP processes")
        if sock is not None:
            url = url_of(options, sock)
            service.on_engine = lambda: phases.enter(f"attach {options.api_server_count} HTTP processes")
            service.on_ready = lambda: say_ready(phases, url, options)
        else:
            text = f"ready: {len(own)} engines, for the host of the coordinator at {ranks.coordinator}"
            service.on_ready = lambda: phases.finish(text)
        try:
            return await service.run()
        finally:
            service.close()

    with sock or contextlib.nullcontext(), _shared_stores(options) as options:
        return run_async(partial(serve, options))


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


class _Engine:
    """An engine-core of a rank."""

    def __init__(
        self, options: Options, restarts: int, child: Child | None = None, *, address: str = "", weights_path: str = ""
    ) -> None:
        """address: where it is to listen, if it is not running already."""
        self._options, self._address = options, address
        self.index = options.data_parallel_rank
        self.process = Supervised("engine-core", self._launch, Restarts(restarts), child, weights_path=weights_path)
        self.process.on_restart = lambda: say("starting the engine again")
        self.keeping: asyncio.Task[None] | None = None
        self.is_joining = False
        """A scaling has started it, and awaits that it is ready."""
        self.is_over = False
        """It has ended, and is not started again."""
        self.failure: Failure | None = None
        """Why it is not ready; None before it has been."""
        self._why_lost: Failure | None = None

    def _launch(self, weights_path: str) -> Child:
        return start_engine(self._options, self._address, weights_path)

    def note_ready(self, ready: Ready) -> None:
        say_workers(ready)
        self.process.on_progress, self.failure, self.is_joining = None, None, False
        if self._options.coordinator:  # frontends know it there, also after it was restarted
            self._address = ready.address

    @property
    def usable(self) -> bool:
        return self.process.is_ready and not self.process.is_leaving

    @property
    def has_ended(self) -> bool:
        child = self.process.child
        return self.is_over or (self.process.is_leaving and child is not None and not child.alive)

    def end_lost(self, lost: EngineLost) -> None:
        """Kills an engine that was silent for too long, unless it has ended or was replaced already."""
        child = self.process.child
        if child is None or not child.alive or child.ready is None or child.ready.address != lost.address:
            return
        how = "is stopped by a signal or a debugger" if child.is_stopped else "does not answer"
        message = f"{child.name} (pid {child.pid}) {how}: {lost.failure.message}; it was ended"
        self._why_lost = msgspec.structs.replace(lost.failure, message=message)
        _kill(child)

    def note_end(self, failure: Failure) -> Failure:
        """Returns why it has ended."""
        self.failure, self._why_lost = self._why_lost or failure, None
        return self.failure


class _HttpProcess(Supervised[Child]):
    def __init__(self, index: int, launch: Callable[[int], Child]) -> None:
        super().__init__(f"http-{index}", lambda weights_path: launch(index), _PROCESS_RESTARTS)


class _Service:
    """The HTTP processes and the engines, from their start to their end, in the running loop."""

    def __init__(
        self,
        options: ServeOptions,
        engines: list[_Engine],
        engine_options: Options,
        num_processes: int,
        coordinator: Child | None,
        ranks: Ranks,
    ) -> None:
        self._options, self._engine_options, self._ranks = options, engine_options, ranks
        self.engines = engines
        self._coordinator: Supervised[Child] | None = None
        if coordinator is not None:  # replaced at its address, which engines and HTTP processes know
            (address,) = engine_options.coordinator
            self._coordinator = Supervised(
                "coordinator", lambda _: start_coordinator(address), Restarts(0, first_pause_s=0.0), coordinator
            )
        self._are_found = bool(engine_options.coordinator)
        """HTTP processes find engines through coordinators; else this process reports its single engine to them."""
        self._has_own = bool(engines)
        self._restarts = options.num_restarts(engine_options.data_parallel_size)
        self._why_fixed = why_fixed(engine_options, ranks, num_processes)
        self._scaler = EngineScaler(self, engine_options)
        self._scaler.on_begin = lambda size: say(f"there are to be {size} engines")
        self._peer_timeout_s = engine_options.peer_timeout
        self._processes = [_HttpProcess(index, self._launch_process) for index in range(num_processes)]
        self._pages = os.memfd_create("headrace-metrics")  # no name that could stay behind
        os.ftruncate(self._pages, pages_bytes(options.api_server_count))
        self._engine_news: EngineUp | EngineDown | None = None
        self._was_ready = self._were_all_ready = False
        """Of the first: engines and HTTP processes; of the second: engines."""
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[tuple[int, float]] = self._loop.create_future()
        """The exit status, and how long the HTTP processes have to finish."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping: list[Child] = []
        """Those that were asked to stop."""
        self._died_while_stopping = False
        self.on_engine: Callable[[], None] = lambda: None
        """Called when all engines are ready, before `on_ready`."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called once, when all engines and HTTP processes are ready."""

    async def run(self) -> int:
        """Serves, then stops the HTTP processes, and the engines after them. Returns the exit status.

        Raises EngineStartError if an engine or HTTP process ends before all are ready.
        """
        try:
            if self._coordinator is not None:
                self._begin(self._coordinator.keep(lambda ready: None, self._on_coordinator_end))
            for process in self._processes:
                process.on_launch = partial(self._tell_new, process)
                self._begin(process.keep(lambda ready: self._check_ready(), partial(self._on_process_end, process)))
            for engine in self.engines:
                self._keep(engine)
            self._begin(self._look_for_stopped())
            status, deadline_s = await self._end
            stopped = await self._stop_all(deadline_s)
            await asyncio.gather(*(in_thread(partial(each.process.stop, _ENGINE_STOP_S)) for each in self.engines))
            return max(status, stopped)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def close(self) -> None:
        """Kills the HTTP processes and the coordinator that still run, and frees the pages of metrics."""
        for each in (*self._processes, self._coordinator):
            if each is not None and each.child is not None:
                each.child.kill()
        os.close(self._pages)

    def stop(self) -> None:
        """Ends the service in order; the second call does not wait for requests. Call it in the loop."""
        if not self._end.done():
            say("stopping; a second signal does not wait")
            self._finish(EXIT_DONE, self._engine_options.shutdown_timeout)
        else:
            say("stopping at once")
            for child in self._stopping:
                in_thread(partial(child.stop, 0.0))

    def _finish(self, status: int, deadline_s: float) -> None:
        if not self._end.done():
            self._end.set_result((status, deadline_s))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Does it beside the rest. An error in it ends the service."""

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None and not self._end.done():
                self._end.set_exception(error)

        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)
        return task

    # --- HTTP processes -------------------------------------------------------------------------------------------

    def _launch_process(self, index: int) -> Child:
        told = WorkerOptions(
            server=self._options,
            parent_has_engine=self._has_own and not self._are_found,
            coordinators=self._engine_options.coordinator,
            why_fixed=self._why_fixed,
            awaits_number=self._has_own and self._are_found,
            others_serve=self._was_ready and len(self._processes) > 1,
            restarts_found=self._has_own and self._are_found and self._restarts > 0,
            peer_timeout_s=self._peer_timeout_s,
            pages_file=f"/proc/self/fd/{self._pages}",
            num_processes=len(self._processes),
            index=index,
            logs_stats=not self._engine_options.disable_log_stats and index == 0,
        )
        kind = ChildOptions(
            pass_fds=(self._pages,),
            receives=ChildMessage | EngineLost | ScaleTo,
            on_message=lambda message: self._on_message(self._processes[index], message),
            startup_timeout_s=None,  # it waits for engines, and those of this server have a limit of their own
        )
        start = Start(schema_hash=SCHEMA_HASH, options=msgspec.to_builtins(told), bind="")
        return Child(f"http-{index}", ["-m", "headrace.frontend.http.process.worker"], start, kind)

    def _tell_new(self, process: _HttpProcess) -> None:
        if self._were_all_ready and self._are_found:
            self._tell(EnginesThere(num_engines=self._num_serving()), [process])
        elif self._engine_news is not None:
            self._tell(self._engine_news, [process])

    def _on_message(self, process: _HttpProcess, message: Any) -> None:
        """On the thread that watches the process."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            if isinstance(message, EngineLost):
                self._loop.call_soon_threadsafe(self.engines[0].end_lost, message)  # the only one
            elif isinstance(message, ScaleTo) and process.child is not None:
                self._loop.call_soon_threadsafe(self._begin_scaling, process.child, message)

    def _on_process_end(self, process: _HttpProcess, failure: Failure) -> bool:
        """Returns whether the process is started again after a pause; the others serve on."""
        self._check_start(self._processes, failure)
        if process.child is not None and process.child.status == EXIT_ENGINE_FAILED:
            self._finish(EXIT_ENGINE_FAILED, _LAST_EVENTS_S)
            return False
        if not process.comes_back:
            say(f"an HTTP process ends again and again: {failure.message}")
            self._finish(EXIT_ERROR, 0.0)
            return False
        say(f"an HTTP process has ended and is started again: {failure.message}")
        return True

    def _on_coordinator_end(self, failure: Failure) -> bool:
        """Engines and HTTP processes work on without it meanwhile."""
        say(f"the coordinator has ended and is started again: {failure.message}")
        return True

    def _check_start(self, of_its_kind: Sequence[Supervised[Child]], failure: Failure) -> None:
        """Raises EngineStartError if the end of a child ends the start: not that of an engine once another one may have
        requests, which clients may know before this process does, as no thread may have looked at its Ready."""
        if not self._was_ready and not any(
            each.num_replaced or (each.child is not None and each.child.was_ready) for each in of_its_kind
        ):
            raise EngineStartError.from_failure(failure)

    def _tell(self, news: EngineUp | EngineDown | EnginesThere, processes: Sequence[_HttpProcess] = ()) -> None:
        """processes: by default all."""
        if not isinstance(news, EnginesThere):
            self._engine_news = news
        for process in processes or self._processes:
            with contextlib.suppress(ChannelClosedError, WaitTimeoutError):  # it has ended
                if process.child is not None:
                    process.child.send(news, Deadline(_TELL_S))

    # --- engines --------------------------------------------------------------------------------------------------

    def _keep(self, engine: _Engine) -> None:
        engine.keeping = self._begin(
            engine.process.keep(partial(self._on_engine_ready, engine), partial(self._on_engine_end, engine))
        )

    def _on_engine_ready(self, engine: _Engine, ready: Ready) -> None:
        engine.note_ready(ready)
        if not self._was_ready and all(each.process.is_ready for each in self.engines):
            self.on_engine()
        self._check_ready()
        if not self._are_found:
            self._tell(EngineUp(address=ready.address, peer_timeout_s=ready.peer_timeout_s))

    def _check_ready(self) -> None:
        """The start is over once all engines and all processes are ready."""
        engines_are = all(engine.process.is_ready or engine.is_over for engine in self.engines)
        if engines_are and not self._were_all_ready:
            self._were_all_ready = True
            if self._are_found:
                self._tell(EnginesThere(num_engines=self._num_serving()))
        if not self._was_ready and engines_are and all(each.is_ready for each in self._processes):
            self._was_ready = True
            self.on_ready()

    def _on_engine_end(self, engine: _Engine, failure: Failure) -> bool:
        """Returns whether the engine is started again after a pause. The service ends with the last one."""
        failure = engine.note_end(failure)
        is_done = engine.process.child is not None and engine.process.child.status == EXIT_DONE
        if self._end.done():
            self._note_end_while_stopping(failure, is_done)
            return False
        self._check_start([each.process for each in self.engines], failure)
        has_left = engine.process.is_leaving or (self._are_found and is_done)
        comes_back = engine.process.comes_back and not has_left and not engine.is_joining
        engine.is_over = not comes_back
        if has_left:
            self._forget(engine)
        else:
            what = f"the engine of rank {engine.index} did not start" if engine.is_joining else "the engine has ended"
            say(f"{what}: {failure.message}", logging.ERROR)
        if not self._are_found:
            self._tell(EngineDown(failure=failure, comes_back=comes_back))
        if all(each.is_over for each in self.engines):
            self._finish(EXIT_ENGINE_FAILED, _LAST_EVENTS_S)
        else:
            self._check_ready()
        return comes_back

    def _forget(self, engine: _Engine) -> None:
        say(f"the engine of rank {engine.index} was drained and has left")
        self.engines.remove(engine)

    def _note_end_while_stopping(self, failure: Failure, in_order: bool) -> None:
        if in_order:
            say("the engine was asked to end as well, and has left")
            return
        say(f"the engine has ended: {failure.message}", logging.ERROR)
        self._died_while_stopping = True
        self._tell(EngineDown(failure=failure, comes_back=False))

    def _num_serving(self) -> int:
        return sum(map(serves, self.engines))

    def _begin_scaling(self, by: Child, wanted: ScaleTo) -> None:
        if not self._end.done():
            self._begin(self._scale(by, wanted))

    async def _scale(self, by: Child, wanted: ScaleTo) -> None:
        """Answers once every engine that starts or leaves has done so."""
        why, is_refused = "", False
        try:
            await self._scaler.scale(wanted.size, wanted.drain_timeout_s)
        except HeadraceError as error:
            why, is_refused = str(error), isinstance(error, OptionError)
        with contextlib.suppress(ChannelClosedError, WaitTimeoutError):  # its client went with it
            by.send(Scaled(call=wanted.call, why=why, is_refused=is_refused), Deadline(_TELL_S))

    def add(self, options: Options, weights_path: str) -> _Engine:
        restarts = self._options.num_restarts(options.data_parallel_size)
        engine = _Engine(options, restarts, address=self._ranks.new_address(), weights_path=weights_path)
        engine.is_joining = True
        self.engines.append(engine)
        self._keep(engine)
        return engine

    async def remove(self, engine: _Engine) -> None:
        if engine.keeping is not None:
            engine.keeping.cancel()
            await asyncio.gather(engine.keeping, return_exceptions=True)
        await in_thread(partial(engine.process.stop, 0.0))
        if engine not in self.engines:
            return
        if engine.process.is_leaving:
            self._forget(engine)
        else:
            self.engines.remove(engine)
        self._check_ready()

    # --- the end --------------------------------------------------------------------------------------------------

    async def _look_for_stopped(self) -> None:
        """Reports children that a signal or a debugger has stopped, and kills those that stay so for the peer timeout:
        their connections wait."""
        most_s = self._peer_timeout_s or peer_timeout_s()
        since_s: dict[Child, float] = {}
        while True:
            await asyncio.sleep(_LOOK_S)
            # Without a coordinator processes send EngineLost.
            engines = [each.process.child for each in self.engines] if self._coordinator is not None else []
            processes = [each.child for each in self._processes]
            now_s, before_s, since_s = time.monotonic(), since_s, {}
            for child in (*processes, *engines):
                if child is None or not child.alive or not child.is_stopped:
                    continue
                since_s[child] = before_s.get(child, now_s)
                if child not in before_s:
                    waits = "its connections wait" if child in processes else "others have its requests"
                    say(f"{child.name} (pid {child.pid}) is stopped by a signal or a debugger; {waits}")
                elif now_s - since_s[child] > most_s:
                    _kill(child)

    async def _stop_all(self, deadline_s: float) -> int:
        """Drains the HTTP processes in parallel, or the engines where another host has those; a second signal ends the
        wait. Returns the drain's exit status."""
        for task in self._tasks - {each.keeping for each in self.engines if each.process.is_ready}:
            task.cancel()  # nothing is started any more
        children = [process.child for process in self._processes if process.child is not None]
        if not self._processes:  # engines that still load are killed afterwards
            engines = [each.process.child for each in self.engines]
            children = [child for child in engines if child is not None and child.ready is not None]
        self._stopping = children
        await asyncio.gather(*(in_thread(partial(child.stop, deadline_s)) for child in children))
        status = EXIT_ENGINE_FAILED if self._died_while_stopping else EXIT_DONE
        for child in children:
            if status == EXIT_DONE and child.status not in (EXIT_DONE, EXIT_ENGINE_FAILED):
                say(f"{child.name} did not finish what it served: {child.failure.message if child.failure else ''}")
                status = EXIT_ERROR
        return status


def _kill(child: Child) -> None:
    """As somebody else might: its end is noticed as any other."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
