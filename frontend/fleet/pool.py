"""All engines of one frontend, kept connected, and their requests, which move to another engine when theirs is lost.

The router (router.py) decides; the pool carries its decisions out, in the frontend's asyncio loop. Tokens bypass the
pool: an engine's client appends them directly to the request's lists.

    submit --> Router.place --> CoreClient.submit                     Router.tick <-- a few times a second
                                    | dies, refuses, is silent
    RequestTable.release <----------+
           |  Move: RequestTable.adopt at another engine       Wait: adopt by a table that sends nothing
           +  Fail: RequestStream.fail
"""

from __future__ import annotations

import array
import asyncio
import bisect
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterable, KeysView, Sequence
from typing import Any

from headrace.core.process.child_output import StartLine
from headrace.frontend.client.client import CoreClient, id_in_use
from headrace.frontend.client.control import QUICK_S, AsyncControls, Call
from headrace.frontend.client.own_engine import STOP_DEADLINE_S
from headrace.frontend.client.request import RequestListener, RequestStream
from headrace.frontend.client.request_metrics import Meters, RequestCounts
from headrace.frontend.client.request_table import RequestTable
from headrace.frontend.fleet.answers import combined
from headrace.frontend.fleet.decisions import (
    ANYWHERE,
    Affinity,
    AllFullError,
    Decision,
    Fail,
    Move,
    NoEngineError,
    Progress,
    RoutedRequest,
    RouterOptions,
)
from headrace.frontend.fleet.directory import Loads
from headrace.frontend.fleet.discovery import Discovery
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.fleet.members import EngineFacts
from headrace.frontend.fleet.pool_log import HealthLog, summary, tell_namesakes_apart
from headrace.frontend.fleet.router import Router
from headrace.frontend.fleet.sources import STABLE_AFTER_S, Source
from headrace.frontend.request.checks import CheckedRequest
from headrace.frontend.text.tokenizer import Tokenizer
from headrace.ipc.failure import (
    EngineAsleepError,
    EngineDeadError,
    Failure,
    HeadraceError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
    let_interrupts_pass,
)
from headrace.ipc.messages import EngineStats, Welcome
from headrace.ipc.prefix_names import PrefixKey

logger = logging.getLogger(__name__)

_RETRY_LONGEST_S = 30.0
_ATTACH_RETRY_LONGEST_S = 2.0
"""For an engine that someone else runs: trying to connect to it costs little."""
HELD_S = 30.0
"""How long requests wait when no engine is left, for one that someone else runs to return."""
_LOOK_S = 0.1
TICK_S = 0.25
LOOKS_AFTER_S = 2 * TICK_S
"""How long an engine with requests may be silent before its process is looked at, if it runs on this host."""
_LASTING = (
    "AddressError",
    "KeyFileError",
    "KeyRefused",
    "HandshakeFailed",
    "CodecError",
    "PermissionError",
    "ModelError",
)
"""Types of a Failure to connect that no wait ends: something is wrong with this side, or at the address."""
_ERRORS: dict[str, type[HeadraceError]] = {
    QueueFullError.__name__: QueueFullError,
    EngineAsleepError.__name__: EngineAsleepError,
}


class EnginePool(AsyncControls, RequestListener):
    """All engines of this frontend, one or several, and the requests that they run for it. Commands go to every engine.

    Everything runs in one asyncio loop. An only engine that does not come back gets its requests without the router,
    which could not decide anything about them.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        options: RouterOptions | None = None,
        chance: random.Random | None = None,
        discovery: Discovery | None = None,
        *,
        meters: Meters | None = None,
        on_death: Callable[[Failure], None] | None = None,
        on_return: Callable[[str], None] | None = None,
        serves_early: bool = False,
    ) -> None:
        """The engines of `sources`, and those that are discovered or added later.

        on_death: called for each of several engines that ends after the start, and for each own engine that does not
        restart; on_return: with the address of each engine that has returned. By default both are logged. meters: time
        requests.

        serves_early: requests come as soon as one engine is ready, so from then on no other one ends the start. An
        engine that someone else runs may come at any time, so the start waits for it.
        """
        self._serves_early = serves_early
        self.engines = [
            Engine(self, index if source.rank is None else source.rank, source, is_needed=True)
            for index, source in enumerate(sources)
        ]
        """Sorted by index, which is the data_parallel_rank."""
        self._discovery = discovery
        is_only = len(sources) == 1 and not sources[0].comes_back and discovery is None and not serves_early
        self._only = self.engines[0] if is_only else None
        self._waits = any(source.waits_alone for source in sources)
        self.router = Router(options or RouterOptions(), chance or random.Random())
        self.started = asyncio.Event()
        """Set when all engines are ready for the first time; of engines that others run, when one is connected and the
        others have been tried."""
        self.dead = asyncio.Event()
        """Set when no engine is left and none will return; `failure` says why."""
        self.meters = meters
        self.request_counts = meters if isinstance(meters, RequestCounts) else None
        self.ended: list[RequestStream] | None = None
        """The requests that have ended, for whoever takes them out; None if nobody does."""
        self._failure: Failure | None = None
        self._start_error: BaseException | None = None
        self._on_death, self._on_return = on_death or self._say_ended, on_return or _say_returned
        self._last_client: CoreClient | None = None
        self._by_name = {engine.name: engine for engine in self.engines}
        self._by_address: dict[str, Engine] = {}  # only engines that were added
        self._late_tokens_of_former = 0
        self._names: list[str] | None = None  # None: outdated
        self._serving: dict[str, list[Engine]] = {}
        self._streams: dict[str, RequestStream] = {}
        self._waiting = RequestTable(lambda message: None)
        """Holds the requests that wait for an engine."""
        self._timer: asyncio.TimerHandle | None = None
        self._health = HealthLog()

    def start(self) -> None:
        for engine in self.engines:
            self._begin(engine)
        if self._discovery is not None:
            self._discovery.start(self)

    def _begin(self, engine: Engine) -> None:
        engine.task = asyncio.create_task(self._keep(engine))
        engine.task.add_done_callback(lambda task: self._on_kept(engine, task))

    def _on_kept(self, engine: Engine, task: asyncio.Task[None]) -> None:
        """Nobody keeps the engine connected any more. An error of this process ends all: nothing may wait for it."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("%s can no longer be kept connected", engine.name, exc_info=error)
        self._end(Failure.of(error, process="client", phase="serve"))

    def _end(self, failure: Failure) -> None:
        self._failure = self._failure or failure
        self.dead.set()

    async def open(self, timeout_s: float | None = None, *, shows_start: bool | None = False) -> None:
        """Starts, and waits until all engines are ready, or, with coordinators, until the first one is.

        shows_start: whether a line on the terminal names what the first engine does. Raises the error with which an
        engine did not start, and EngineDeadError if none is found in time; all are closed then.
        """
        with StartLine(shows_start) as line:
            for engine in self.engines[:1]:
                engine.source.on_progress = line.show
            try:
                await self._open(timeout_s if self._discovery is not None else None)
            except BaseException:
                await self.close(STOP_DEADLINE_S)
                raise
            finally:
                for engine in self.engines[:1]:
                    engine.source.on_progress = None

    async def _open(self, limit_s: float | None) -> None:
        self.start()
        waits = [asyncio.create_task(event.wait()) for event in (self.started, self.dead)]
        try:
            await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self.started.is_set():
            return
        if not self.dead.is_set():
            at = ", ".join(self._discovery.coordinators if self._discovery is not None else ())
            raise EngineDeadError(f"no engine was found within {limit_s:g} s by the coordinator at {at}")
        raise self._start_error or self._dead_error

    async def close(self, deadline_s: float) -> None:
        """Aborts running requests, and ends own engines. May be called again."""
        await self.leave()
        await asyncio.gather(*(engine.source.close(deadline_s) for engine in self.engines))

    async def leave(self) -> None:
        """`close`, but for own engines, which go on."""
        if self._discovery is not None:
            await self._discovery.close()
        tasks = [engine.task for engine in self.engines if engine.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        for engine in self.engines:
            if engine.client is not None:
                engine.client.leave()
        self._waiting.fail_all(Failure(message="this client is closed", type="Closed"), EngineDeadError)

    def stop(self, deadline_s: float) -> None:
        """Ends own engines after `leave`. Blocks, and may be called again, from any thread."""
        for engine in self.engines[1:]:  # so that they end at the same time
            engine.source.ask_to_stop(deadline_s)
        for engine in self.engines:
            engine.source.stop(deadline_s)

    # --- state --------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """All served models: those of connected engines first, none of engines that are gone for good."""
        if self._names is None:
            self._names = self._find_names()
        return self._names

    def _find_names(self) -> list[str]:
        there = [engine for engine in self.engines if engine.usable]
        back_soon = [engine for engine in self.engines if not engine.usable and engine.is_awaited]
        known = [*there, *back_soon] or self.engines
        return list(dict.fromkeys(name for engine in known for name in engine.names))

    @property
    def usable(self) -> bool:
        return any(engine.usable for engine in self.engines)

    @property
    def may_wait(self) -> bool:
        """Whether no engine is there now, and requests wait for one that may return (`until_usable`)."""
        return self._waits and not self.usable

    async def until_usable(self) -> None:
        """Waits until an engine is there, as long as requests that had one do (HELD_S), and while one may return."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HELD_S):
                while self.may_wait:
                    await asyncio.sleep(_LOOK_S)

    @property
    def failure(self) -> Failure | None:
        """Why no engine is left and none will return; None while there is one, or one may return."""
        if self._failure is None and self._only is not None and self._only.client is not None:
            return self._only.client.failure
        return self._failure

    @property
    def _dead_error(self) -> HeadraceError:
        return EngineDeadError.from_failure(self.failure or Failure(message="no engine is there now"))

    @property
    def _clients(self) -> list[CoreClient]:
        """Of the engines that take requests or, without any, of those that drain. Raises EngineDeadError."""
        there = [each.client for each in self.engines if each.client is not None and each.client.failure is None]
        if not there:
            raise self._dead_error
        return [client for client in there if not client.draining] or there

    @property
    def _some_client(self) -> CoreClient:
        """The client of some engine, which may have gone. Raises EngineDeadError before the first connection."""
        if self._last_client is None or self._last_client.failure is not None:
            there = (each.client for each in self.engines if each.client is not None and each.usable)
            self._last_client = next(there, self._last_client)
        if self._last_client is None:
            raise EngineDeadError("the engines have not started")
        return self._last_client

    @property
    def welcome(self) -> Welcome:
        """Of some engine; all accept the same requests. Of the last one while none is there."""
        return self._some_client.welcome

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._some_client.tokenizer

    def check_alive(self) -> None:
        """Raises EngineDeadError if no engine accepts requests."""
        self._clients[0].check_alive()

    async def engine(self) -> Welcome:
        return self.welcome

    async def call(self, kind: type[Call], timeout_s: float | None = QUICK_S, **fields: Any) -> Any:
        """Calls every engine and combines the answers."""
        answers = await asyncio.gather(*(client.call(kind, timeout_s, **fields) for client in self._clients))
        return answers[0] if len(answers) == 1 else combined(answers)

    async def stats_by_engine(self) -> dict[int, EngineStats]:
        there = self._clients
        asked = {each.index: each.client for each in self.engines if each.client is not None and each.client in there}
        answers = await asyncio.gather(*(client.get_stats() for client in asked.values()))
        return dict(zip(asked, answers, strict=True))

    @property
    def answers(self) -> bool:
        """Whether some engine is usable and not silent."""
        return any(engine.usable and not engine.is_silent for engine in self.engines)

    @property
    def addresses(self) -> KeysView[str]:
        """Addresses of the engines that were added."""
        return self._by_address.keys()

    async def stats(self) -> dict[Engine, EngineStats]:
        """The statistics of the engines that answer in time. All are asked at once."""
        engines = list(self.engines)
        answers = await asyncio.gather(*(engine.stats() for engine in engines))
        return {engine: stats for engine, stats in zip(engines, answers, strict=True) if stats is not None}

    def num_in_flight(self) -> int:
        return len(self._streams)

    def num_late_tokens(self) -> int:
        """Tokens that arrived for requests after they were aborted, of all current and former engines."""
        return self._late_tokens_of_former + sum(engine.num_late_tokens() for engine in self.engines)

    def serving(self, model: str) -> Engine | None:
        """A usable engine of this model, preferably one that is not silent."""
        if model not in self._serving:
            self._serving[model] = [engine for engine in self.engines if model in engine.names]
        usable = (engine for engine in self._serving[model] if engine.usable)
        first = next(usable, None)
        if first is None or not first.is_silent:
            return first
        return next((engine for engine in usable if not engine.is_silent), first)

    def _forget_names(self) -> None:
        """Call when an engine has joined, left or changed."""
        self._names = None
        self._serving.clear()

    def engine_of(self, stream: RequestStream) -> Engine | None:
        """The engine that runs the request now; None if it waits for one."""
        member = stream.route.member if stream.route is not None else None
        return self._by_name.get(member.facts.name) if member is not None else None

    def route_of(self, request_id: str) -> RoutedRequest:
        """The router's record of a running request. Raises KeyError."""
        return self._streams[request_id].route

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def __len__(self) -> int:
        return len(self._streams)

    # --- requests -----------------------------------------------------------------------------------------------

    def submit(
        self,
        request: CheckedRequest,
        listener: RequestListener | None = None,
        *,
        model: str | None = None,
        affinity: Affinity = ANYWHERE,
    ) -> RequestStream:
        """Submits a request that was checked to the engine that the router chooses; it may move to others later.

        listener: hears of it, besides the reader of the stream. model: the name by which it is asked for, by default
        the first. Raises what CoreClient.submit raises; QueueFullError if all are full; EngineDeadError if none
        accepts it.
        """
        if request.name in self._streams:
            raise id_in_use(request.name)
        if affinity.rank is not None:
            self._check_rank(affinity.rank)
        if (engine := self._only) is not None:
            if engine.client is None:
                raise self._dead_error
            stream = engine.client.submit(request, listener)
        else:
            engine, stream = self._route(request, listener, model or self.names[0], affinity)
        stream.client = self
        if self.meters is not None:
            stream.meter = self.meters.meter(engine.index)
        self._streams[request.name] = stream
        return stream

    def _check_rank(self, rank: Any) -> None:
        ranks = [engine.index for engine in self.engines]
        if rank not in ranks:
            there = f"there are {len(ranks)} engines, of rank {', '.join(map(str, ranks))}"
            if len(ranks) == 1:
                there = f"there is one engine, of rank {ranks[0]}"
            raise InvalidRequestError(f"data_parallel_rank is {rank!r}, and {there}")

    def _route(
        self, request: CheckedRequest, listener: RequestListener | None, model: str, affinity: Affinity
    ) -> tuple[Engine, RequestStream]:
        """Submits it to the engine that the router chooses."""
        prompt, is_one = request.prompt, len(self.router.members) < 2
        token_ids = prompt.token_ids or ()
        routed = RoutedRequest(
            model,
            Progress(),
            num_prompt_tokens=len(token_ids),
            tokens=b"" if is_one else array.array("i", token_ids).tobytes(),
            prefix_key=PrefixKey(prompt.cache_salt, inputs=prompt.inputs),
            num_outputs=request.params.n,
            priority=request.priority,
            affinity=affinity,
        )
        if self._timer is None:
            self.router.wake(time.monotonic())
        engine = self._place(routed)
        engine.note_work()
        assert engine.client is not None, "a member of the router is connected"
        try:
            stream = engine.client.submit(request, listener)
        except BaseException:
            self.router.end(routed, time.monotonic())
            raise
        stream.route, routed.work = routed, stream
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        return engine, stream

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """Ends these requests with finish_reason `abort`; ids that are not running are ignored."""
        names = (request_ids,) if isinstance(request_ids, str) else request_ids
        for stream in [self._streams[each] for each in names if each in self._streams]:
            stream.abort()

    def _place(self, routed: RoutedRequest) -> Engine:
        try:
            member = self.router.place(routed, time.monotonic())
        except AllFullError as error:
            raise QueueFullError.from_failure(
                Failure(
                    message=str(error),
                    type="QueueFullError",
                    process="client",
                    phase="submit",
                    retry_after_s=error.retry_after_s,
                )
            ) from None
        except NoEngineError as error:
            if error.failure is not None:
                raise EngineDeadError.from_failure(error.failure) from None
            raise EngineDeadError(str(error)) from None
        return self._by_name[member.facts.name]

    def on_done(self, stream: RequestStream) -> None:
        del self._streams[stream.request_id]
        if stream.route is not None:
            self.router.end(stream.route, time.monotonic())
        if self.ended is not None:
            self.ended.append(stream)

    def refused(self, stream: RequestStream, failure: Failure) -> bool:
        """Its engine does not take the request. Returns whether another one does."""
        if stream.route is None:
            return False
        decision = self.router.refused(stream.route, failure, time.monotonic())
        if isinstance(decision, Fail):
            return False
        stream.table = None
        self._carry_out([decision])
        return True

    def lost(self, engine: Engine, streams: Sequence[RequestStream], failure: Failure) -> None:
        """The engine, which ran these requests, is lost."""
        is_awaited = engine.is_awaited
        if engine.is_foreign and (len(self.engines) > 1 or engine.source.waits_alone):
            is_awaited = True  # until `hold` expires
            loop = asyncio.get_running_loop()
            engine.hold = loop.call_later(HELD_S, lambda: self._carry_out(self.router.give_up(engine.name, failure)))
        self._avoid_ending()
        is_elsewhere = engine.client is not None and engine.client.is_elsewhere
        decisions = self.router.leave(
            engine.name, failure, time.monotonic(), is_awaited=is_awaited, is_elsewhere=is_elsewhere
        )
        self._carry_out(decisions)
        for stream in streams:
            if stream.route is None:  # no other engine would take it
                stream.fail(EngineDeadError.from_failure(failure))

    def _avoid_ending(self) -> None:
        """Lets no request go to an engine of this host whose end is not known yet: of engines killed together, one
        request would lose several, and be blamed for it."""
        now_s = time.monotonic()
        for engine in self.engines:
            if engine.usable and engine.client is not None and engine.client.is_ending:
                self.router.drain(engine.name, now_s)

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            stream = decision.request.work
            assert isinstance(stream, RequestStream)
            try:
                self._move(stream, decision)
            except BaseException as error:  # the other requests go on all the same
                let_interrupts_pass(error)
                logger.exception("request %s could not be moved", stream.request_id)
                stream.fail(RequestFailedError.from_failure(Failure.of(error, process="client", phase="move")))
        if decisions:
            logger.info("%s", summary(decisions))

    def _move(self, stream: RequestStream, decision: Decision) -> None:
        if stream.table is not None:
            stream.table.release(stream)
        if isinstance(decision, Fail):
            stream.fail(_ERRORS.get(decision.failure.type, EngineDeadError).from_failure(decision.failure))
        elif isinstance(decision, Move):
            target = self._by_name[decision.target.facts.name]
            assert target.client is not None, "a member of the router is connected"
            target.note_work()
            target.client.requests.adopt(stream)
        else:
            self._waiting.adopt(stream)

    def _tick(self) -> None:
        """Runs every TICK_S while there are requests."""
        self._timer = None
        try:
            self._look()
        finally:
            if self._streams:
                self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _look(self) -> None:
        """Measures the engines with requests, and moves requests off those that are unhealthy."""
        now_s = time.monotonic()
        watched = list(self.router.watched)
        for member in watched:
            engine = self._by_name[member.facts.name]
            if engine.client is not None:
                self.router.heard(engine.name, engine.client.last_heard_s)
                if member.requests and member.silent_s(now_s) > LOOKS_AFTER_S:
                    engine.client.look_at_process()
                    self.router.worked(engine.name, engine.client.last_worked_s)
        decisions = self.router.tick(now_s)
        for member in watched:
            engine = self._by_name[member.facts.name]
            self._health.note(engine.name, engine.source.address, member.unhealthy_reason)
        self._carry_out(decisions)

    # --- engines ------------------------------------------------------------------------------------------------

    def add(self, source: Source, rank: int | None = None) -> Engine:
        """Adds an engine. If the address is known, it is the same engine."""
        known = self._by_address.get(source.address)
        if known is not None:
            known.source.stay()
            return known
        index = rank
        if index is None or f"engine {index}" in self._by_name:
            taken = {engine.index for engine in self.engines}
            index = next(index for index in itertools.count() if index not in taken)
        engine = Engine(self, index, source, is_needed=False)
        bisect.insort(self.engines, engine, key=lambda each: each.index)
        self._by_name[engine.name] = engine
        if source.address:
            self._by_address[source.address] = engine
        self._forget_names()
        self._begin(engine)
        return engine

    def let_go(self, address: str) -> None:
        """Removes the engine at this address for good. While it is connected, its requests continue."""
        engine = self._by_address.get(address)
        if engine is None:
            return
        engine.source.let_go()
        if engine.client is None and engine.task is not None:
            engine.task.cancel()
            self._forget(engine, engine.failure or Failure(message="it has left", phase="serve"))

    async def remove(self, engine: Engine) -> None:
        """Removes an own engine that does not serve, and ends its process if there is one."""
        engine.source.let_go()
        if engine.task is not None:
            engine.task.cancel()
            await asyncio.gather(engine.task, return_exceptions=True)
        if engine in self.engines:
            self._forget(engine, engine.failure or Failure(message="it has left", phase="serve"))
        await engine.source.close(0.0)

    def note_loads(self, loads: Loads) -> None:
        """Records loads that coordinators report. Engines that run requests of this process report theirs directly."""
        now_s, by_address, note = time.monotonic(), self._by_address, self.router.load_elsewhere
        for address, num_running, num_waiting, is_paused in loads.of:
            if (engine := by_address.get(address)) is not None:
                note(engine.name, num_running, num_waiting, now_s, is_paused=is_paused)

    async def _keep(self, engine: Engine) -> None:
        """Keeps one engine connected for as long as its source provides it."""
        delay_s = 0.0
        while True:
            began_s = time.monotonic()
            start_error: BaseException | None = None
            try:
                failure = await self._serve(engine)
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # a library's panic too: those who wait for the engine must know
                let_interrupts_pass(error)
                start_error, failure = error, Failure.of(error, process="server", phase="connect")
            # A foreign engine that is not there yet need not be reported; an own one that did not start must be.
            is_news = engine.client is not None or engine.source.is_own
            news = failure
            if engine.client is not None and engine.client.draining:
                engine.source.left()
                news = Failure(message=f"{engine.name} at {engine.source.address} left, as it was asked to")
            engine.disconnected(failure)
            self._health.forget(engine.name)
            self._forget_names()
            is_news &= self.started.is_set() or self._may_start_without(engine)
            if is_news:
                self._on_death(news)
            self._note_start()
            is_expected = self._serves_early and engine.is_foreign and failure.type not in _LASTING
            fails_start = engine.is_needed and not (
                is_expected or self.started.is_set() or self._may_start_without(engine)
            )
            if fails_start or engine.source.is_gone or not engine.source.comes_back:
                break
            stable = time.monotonic() - began_s > STABLE_AFTER_S
            longest_s = _ATTACH_RETRY_LONGEST_S if engine.is_foreign else _RETRY_LONGEST_S
            delay_s = 0.0 if stable else min(max(1.0, 2 * delay_s), longest_s) if delay_s else 0.1
            await asyncio.sleep(delay_s)
        # At the start, one engine that fails is fatal; later, only the death of the last one is.
        others = [each for each in self.engines if each is not engine]
        if fails_start or (self._discovery is None and all(each.has_ended for each in others)):
            self._start_error = start_error
            self._end(failure)
        if engine.source.is_gone:
            self._forget(engine, failure)
        else:
            self._carry_out(self.router.give_up(engine.name, failure))

    def _forget(self, engine: Engine, failure: Failure) -> None:
        """Removes an engine from the pool."""
        self._late_tokens_of_former += engine.num_late_tokens()
        self.engines.remove(engine)
        del self._by_name[engine.name]
        if self._by_address.get(engine.source.address) is engine:
            del self._by_address[engine.source.address]
        self._forget_names()
        self._carry_out(self.router.give_up(engine.name, failure))

    def _note_start(self) -> None:
        """Sets `started` once it applies: of several engines that others run, some may be missing."""
        if self.started.is_set():
            return
        is_settled = all(
            each.client is not None or (each.failure is not None and (each.is_foreign or self._serves_early))
            for each in self.engines
            if each.is_needed
        )
        if is_settled and any(each.client is not None for each in self.engines):
            self.started.set()

    def _may_start_without(self, engine: Engine) -> bool:
        """Whether another engine is connected, or has not been tried yet."""
        others = [each for each in self.engines if each is not engine]
        if engine.is_foreign:
            return any(each.client is not None or each.failure is None for each in others)
        return self._serves_early and any(each.client is not None for each in others)

    async def _serve(self, engine: Engine) -> Failure:
        """Connects to the engine and waits until the connection ends; returns the failure."""
        client = await engine.source.open()
        if client.failure is not None:
            return client.failure
        try:
            self._join(engine, client)
            failure = await client.until_lost()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # its requests go on elsewhere, as after its death
            client.fail(Failure.of(error, process="client", phase="serve"))
            client.leave()
            raise
        client.leave()  # an engine that reported its failure leaves the connection open
        return failure

    def _join(self, engine: Engine, client: CoreClient) -> None:
        """The engine is connected, and takes requests from now on."""
        client.listener = engine
        if engine.failure is not None:
            self._on_return(engine.source.address)
        elif engine.source.is_own and self.started.is_set():
            logger.info("%s at %s is there", engine.name, engine.source.address)
        engine.client, engine.failure = client, None
        self._last_client = self._last_client or client
        if engine.hold is not None:
            engine.hold.cancel()
        engine.names = client.welcome.served_model_names or (client.welcome.model,)
        others = (each for each in self.engines if each is not engine and {*each.names} & {*engine.names})
        tell_namesakes_apart(engine.name, client.welcome, (each.client.welcome for each in others if each.client))
        self._carry_out(self.router.join(_facts(engine, client.welcome), time.monotonic()))
        if client.draining:  # announced before the engine listened
            self.drains(engine)
        self._follow_prefixes(engine)
        self._forget_names()
        self._note_start()

    def drains(self, engine: Engine) -> None:
        """The engine accepts no new requests."""
        self._forget_names()
        if engine.name in self.router.members:
            self._carry_out(self.router.drain(engine.name, time.monotonic()))

    def changed(self, engine: Engine, welcome: Welcome) -> None:
        """The engine has loaded other weights."""
        if engine.name in self.router.members:
            facts = _facts(engine, welcome)
            logger.info("%s at %s has other weights now: %s", engine.name, engine.source.address, facts.version)
            self._carry_out(self.router.change_version(engine.name, facts.version, facts.weights, time.monotonic()))

    def _say_ended(self, failure: Failure) -> None:
        if self._only is None:  # else its requests tell of it
            logger.warning("an engine has ended: %s", failure.message)

    def _follow_prefixes(self, new: Engine) -> None:
        """Subscribes to the engines' prefix caches, which matter for a choice between several. With the second engine
        to both; with later ones only to the new one."""
        num_engines = len(self.router.members)
        if num_engines < 2:
            return
        for engine in [self._by_name[name] for name in self.router.members] if num_engines == 2 else [new]:
            if engine.client is not None and not engine.follows_prefixes:
                engine.follows_prefixes = True
                engine.client.follow_prefixes()


def _facts(engine: Engine, welcome: Welcome) -> EngineFacts:
    weights = welcome.model_version or welcome.model
    return EngineFacts(
        name=engine.name,
        models=engine.names,
        version=f"{weights} {welcome.dtype} {welcome.max_model_len} {welcome.vocab_size}",
        weights=welcome.model_version,
        block_size=welcome.block_size,
        capacity=welcome.max_num_seqs,
        max_waiting=welcome.max_waiting_requests,
        rank=engine.index,
        caches_prefixes=welcome.enable_prefix_caching,
    )


def _say_returned(address: str) -> None:
    logger.warning("the engine at %s is there again", address)
