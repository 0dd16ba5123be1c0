"""The engines behind the server: connected, watched, chosen by load, and connected again when they come back."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from headrace.frontend.client.client import CoreClient
from headrace.frontend.client.request_table import RequestTable
from headrace.frontend.client.stats_log import StatsLog, cache_line
from headrace.frontend.client.transport import ZmqTransport
from headrace.frontend.http.errors import ApiError, unavailable
from headrace.ipc.failure import EngineDeadError, EngineStartError, Failure, HeadraceError
from headrace.ipc.messages import EngineStats, Ready

if TYPE_CHECKING:
    from headrace.core.process.supervisor import Child

logger = logging.getLogger(__name__)

_RETRY_LONGEST_S = 30.0
_STABLE_AFTER_S = 60.0
"""An engine that served for so long and then died is started again without delay."""
SILENT_AFTER_S = 5.0
"""An engine that says nothing for so long gets no new requests while there are others, and health tells of it."""
CAUSE_GRACE_S = 1.0
"""How long whoever watches the engine may take to say how it ended, once its connection is lost."""
STATS_TIMEOUT_S = 2.0


class Source(Protocol):
    """Where an engine comes from."""

    address: str

    @property
    def comes_back(self) -> bool:
        """Whether `open` may be called again after a death."""
        ...

    @property
    def is_awaited(self) -> bool:
        """Its model's name stays meanwhile, and requests that had brought nothing wait for it."""
        ...

    async def open(self) -> CoreClient:
        """Waits until the engine is ready. Raises HeadraceError when it will not be."""
        ...

    async def close(self, deadline_s: float) -> None: ...


class Attached:
    """An engine that somebody else runs, who may start another at its address, or let one go on that was stopped."""

    is_awaited = False  # nobody knows whether

    def __init__(self, address: str, peer_timeout_s: float | None = None, *, comes_back: bool = True) -> None:
        self.address, self.comes_back = address, comes_back
        self._peer_timeout_s = peer_timeout_s

    async def open(self) -> CoreClient:
        client = CoreClient(ZmqTransport(self.address, self._peer_timeout_s))
        await client.start()
        return client

    async def close(self, deadline_s: float) -> None:
        """It goes on without us."""


class Owned:
    """An engine-core child of this process."""

    def __init__(self, start: Callable[[], Child], first: Child, *, restarts: int) -> None:
        """`first` runs already; `start` starts another at the same address, up to `restarts` times in a row."""
        self._start, self._child = start, first
        self._used = False
        self._restarts = self._restarts_left = restarts
        self._ready_s = math.inf
        self.address = ""
        self.on_progress: Callable[[str], None] | None = None
        self.on_ready: Callable[[Ready], None] = lambda ready: None

    @property
    def comes_back(self) -> bool:
        return self._restarts_left > 0 or (self._restarts > 0 and self._was_stable)

    is_awaited = comes_back

    @property
    def _was_stable(self) -> bool:
        return time.monotonic() - self._ready_s > _STABLE_AFTER_S

    async def open(self) -> CoreClient:
        if self._used:
            self._restarts_left = (self._restarts if self._was_stable else self._restarts_left) - 1
            self._ready_s = math.inf
            # A lost connection is no death: what still lives would keep its weights and its cache.
            await asyncio.to_thread(self._child.kill)
            if self._child.alive:
                raise EngineStartError(f"engine-core (pid {self._child.pid}) does not end, so no other is started")
            self._child = await asyncio.to_thread(self._start)
        self._used = True
        report = self.on_progress
        ready = await asyncio.to_thread(
            self._child.wait_ready,
            on_progress=None if report is None else lambda progress: report(progress.phase),
        )
        self.on_ready(ready)
        self.address = ready.address
        client = CoreClient(ZmqTransport(ready.address, ready.peer_timeout_s), cause_grace_s=CAUSE_GRACE_S)
        await client.start()
        self._ready_s = time.monotonic()
        self._child.on_exit(client.fail_threadsafe)
        return client

    async def close(self, deadline_s: float) -> None:
        # While it loads a model it cannot be asked, and has nothing to lose.
        stop = self._child.kill if self._child.ready is None else functools.partial(self._child.stop, deadline_s)
        await asyncio.to_thread(stop)


class Engine:
    """One engine as the server sees it over time."""

    def __init__(self, index: int, source: Source) -> None:
        self.index, self.source = index, source
        self.client: CoreClient | None = None
        self.requests: RequestTable | None = None
        """Of the client it had last: what brought nothing before a death goes to the next."""
        self.names: tuple[str, ...] = ()
        self.failure: Failure | None = None
        """Why it is not there; None before its first start."""
        self.busy_since_s = 0.0
        """When this process last gave it work while it had none of ours (monotonic seconds)."""
        self._late_tokens_before = 0

    @property
    def usable(self) -> bool:
        if self.client is None:
            return False
        try:
            self.client.check_alive()
        except EngineDeadError:
            return False
        return True

    @property
    def is_silent(self) -> bool:
        """It has requests of ours and says nothing: it may be dead, or stopped and go on later."""
        if self.client is None or not len(self.client.requests):
            return False
        return time.monotonic() - max(self.client.last_heard_s, self.busy_since_s) > SILENT_AFTER_S

    def load(self) -> int:
        """Requests it has, as far as this process knows: its own now, and the others' of at most a second ago."""
        assert self.client is not None
        own, told = len(self.client.requests), self.client.load
        return own if told is None or own == 0 else max(own, told.num_running + told.num_waiting)

    def note_work(self) -> None:
        """Comes before each submission."""
        if self.client is not None and not len(self.client.requests):
            self.busy_since_s = time.monotonic()

    def num_late_tokens(self) -> int:
        """Tokens that came for requests which had been aborted, over all of its lives."""
        now = self.client.requests.num_tokens_after_abort if self.client is not None else 0
        return self._late_tokens_before + now

    def disconnected(self, failure: Failure) -> None:
        self._late_tokens_before = self.num_late_tokens()
        self.client, self.failure = None, failure

    async def stats(self, timeout_s: float = STATS_TIMEOUT_S) -> EngineStats | None:
        """The core's own figures; None when it does not answer in time."""
        if self.client is None:
            return None
        with contextlib.suppress(HeadraceError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self.client.get_stats()
        return None


class EnginePool:
    """All engines of this server."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self.engines = [Engine(index, source) for index, source in enumerate(sources)]
        self.started = asyncio.Event()
        """Set when every engine is ready for the first time."""
        self.dead = asyncio.Event()
        """Set when no engine is left and none will come back; `failure` says why."""
        self.failure: Failure | None = None
        self.on_death: Callable[[Failure], None] | None = None
        """Told of each engine that ends after the start."""
        self.on_return: Callable[[str], None] | None = None
        """Told the address of each that is there again."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(engine)) for engine in self.engines]

    async def close(self, deadline_s: float) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for engine in self.engines:
            if engine.client is not None:
                engine.client.on_dead = None
                await engine.client.close()
        await asyncio.gather(*(engine.source.close(deadline_s) for engine in self.engines))

    @property
    def names(self) -> list[str]:
        """Every model that is served: those of engines that run first, none of engines that are gone for good."""
        there = [engine for engine in self.engines if engine.usable]
        back_soon = [engine for engine in self.engines if not engine.usable and engine.source.is_awaited]
        known = [*there, *back_soon] or self.engines
        return list(dict.fromkeys(name for engine in known for name in engine.names))

    @property
    def usable(self) -> bool:
        return any(engine.usable for engine in self.engines)

    @property
    def answers(self) -> bool:
        """Whether an engine is usable that is not silent."""
        return any(engine.usable and not engine.is_silent for engine in self.engines)

    def num_in_flight(self) -> int:
        return sum(len(engine.client.requests) for engine in self.engines if engine.client is not None)

    def choose(self, model: str | None) -> Engine:
        """The least loaded engine that serves the model. Raises ApiError: 404 for no such model, 503 for no engine."""
        known = self.names
        if model is None and known:
            model = known[0]
        serving = [engine for engine in self.engines if model in engine.names]
        if not serving and known:
            raise ApiError(
                404,
                f"the model {model!r:.200} does not exist; there is {', '.join(known)}",
                param="model",
                code="model_not_found",
            )
        usable = [engine for engine in serving if engine.usable]
        if not usable:
            raise self.why_unavailable()
        return min(usable, key=lambda engine: (engine.is_silent, engine.load()))

    def why_unavailable(self) -> ApiError:
        failure = next((engine.failure for engine in self.engines if engine.failure is not None), None)
        if failure is not None:
            return unavailable(f"the engine is not running: {failure.message}", code="engine_dead")
        if any(engine.is_silent for engine in self.engines):
            return unavailable(
                f"the engine has said nothing for more than {SILENT_AFTER_S:g} s; it may be stopped",
                code="engine_silent",
            )
        if self.started.is_set():
            return unavailable("the engine is shutting down and takes no new requests", code="shutting_down")
        return unavailable("the engine is still loading the model", code="loading")

    async def _keep(self, engine: Engine) -> None:
        """Keeps one engine connected for as long as its source gives one."""
        delay_s = 0.0
        while True:
            began_s = time.monotonic()
            try:
                failure = await self._serve(engine)
            except HeadraceError as error:
                failure = Failure.of(error, process="server", phase="connect")
            was_there = engine.client is not None
            engine.disconnected(failure)
            if was_there and self.on_death is not None and self.started.is_set():
                self.on_death(failure)
            if not engine.source.comes_back or not self.started.is_set():
                break
            stable = time.monotonic() - began_s > _STABLE_AFTER_S
            delay_s = 0.0 if stable else min(max(1.0, 2 * delay_s), _RETRY_LONGEST_S) if delay_s else 0.1
            await asyncio.sleep(delay_s)
        if engine.requests is not None:
            engine.requests.fail_all(failure, EngineDeadError)
        # One engine that does not come up fails the start; later, the last one that dies ends the server.
        if not self.started.is_set() or not any(each.client is not None for each in self.engines):
            self.failure = failure
            self.dead.set()

    async def _serve(self, engine: Engine) -> Failure:
        """From one connection to its death, which is returned."""
        client = await engine.source.open()
        death: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        client.on_dead = lambda failure: None if death.done() else death.set_result(failure)
        client.is_replaced = lambda: engine.source.is_awaited
        if engine.requests is not None:
            client.requests = engine.requests
            if count := engine.requests.replay(client.send):
                logger.warning("%d requests that had brought nothing are sent to the new engine", count)
        engine.requests = client.requests
        if engine.failure is not None and self.on_return is not None:
            self.on_return(engine.source.address)
        engine.client, engine.failure = client, None
        engine.names = client.welcome.served_model_names or (client.welcome.model,)
        if all(each.client is not None for each in self.engines):
            self.started.set()
        failure = await death
        await client.close()  # an engine that told of its failure leaves the connection open
        return failure


async def log_load(pool: EnginePool, interval_s: float) -> None:
    """A line for each engine at the start about its cache, and one each `interval_s` about its load, for ever."""
    logs = [StatsLog(engine.index) for engine in pool.engines]
    for engine in pool.engines:
        with contextlib.suppress(HeadraceError):
            if engine.client is not None:
                logger.info("%s", cache_line(await engine.client.describe_engine(), engine.index))
    while True:
        for engine, log in zip(pool.engines, logs, strict=True):
            if (stats := await engine.stats()) is not None:
                line = log.line(stats, time.monotonic())
                logger.log(logging.DEBUG if log.is_idle else logging.INFO, "%s", line)
        await asyncio.sleep(interval_s)
