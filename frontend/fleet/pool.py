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
from collections.abc import Callable, KeysView, Sequence

from headrace.frontend.client.client import CoreClient
from headrace.frontend.client.request import RequestStream
from headrace.frontend.client.request_table import RequestTable
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
from headrace.frontend.fleet.members import EngineFacts
from headrace.frontend.fleet.pool_log import HealthLog, summary, tell_namesakes_apart
from headrace.frontend.fleet.router import Router
from headrace.frontend.fleet.sources import STABLE_AFTER_S, Source
from headrace.frontend.request.parameters.pooling_params import PoolingParams
from headrace.frontend.request.parameters.sampling_params import SamplingParams
from headrace.frontend.request.prompts import Prompt, checked_name, checked_priority
from headrace.ipc.failure import (
    EngineAsleepError,
    EngineDeadError,
    Failure,
    HeadraceError,
    InvalidRequestError,
    QueueFullError,
)
from headrace.ipc.messages import EngineStats, Load, PrefixEvents, Welcome
from headrace.ipc.prefix_names import PrefixKey

logger = logging.getLogger(__name__)

_RETRY_LONGEST_S = 30.0
_ATTACH_RETRY_LONGEST_S = 2.0
"""For an engine that someone else runs: trying to connect to it costs little."""
HELD_S = 30.0
"""How long requests wait when no engine is left, for one that someone else runs to return."""
SILENT_AFTER_S = 5.0
"""An engine with requests that sends nothing for this long is reported as silent by health checks."""
STATS_TIMEOUT_S = 2.0
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


class Engine:
    """The frontend's record of one engine, over all its lives."""

    def __init__(self, index: int, source: Source, *, is_needed: bool) -> None:
        """is_needed: whether it is an error if the engine does not start."""
        self.index, self.source, self.is_needed = index, source, is_needed
        self.name = f"engine {index}"
        self.client: CoreClient | None = None
        self.names: tuple[str, ...] = ()
        self.failure: Failure | None = None
        """Why it is not connected; None before its first connection."""
        self.follows_prefixes = False
        """Whether its current connection subscribes to the content of its prefix cache."""
        self.busy_since_s = 0.0
        """When this process last gave it a request while it had none of this process (monotonic seconds)."""
        self.hold: asyncio.TimerHandle | None = None
        """Timer that ends the wait of requests for this engine."""
        self._late_tokens_before = 0
        self.task: asyncio.Task[None] | None = None
        """The task that keeps it connected."""

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
    def has_ended(self) -> bool:
        """For good: it is not connected, and nothing tries to connect it again."""
        return self.client is None and (self.task is None or self.task.done())

    @property
    def is_foreign(self) -> bool:
        """Someone else runs it: it may return, but this process cannot know."""
        return self.source.comes_back and not self.source.is_awaited

    @property
    def is_awaited(self) -> bool:
        return self.source.is_awaited and not self.source.is_gone

    @property
    def is_silent(self) -> bool:
        """It has requests of this process, sends nothing and does not work: it may be dead, or stopped and continue
        later."""
        if self.client is None or not len(self.client.requests):
            return False
        signs_s = (self.client.last_heard_s, self.client.last_worked_s, self.busy_since_s)
        return time.monotonic() - max(signs_s) > SILENT_AFTER_S

    def note_work(self) -> None:
        """Call before each submission."""
        if self.client is not None and not len(self.client.requests):
            self.busy_since_s = time.monotonic()

    def num_late_tokens(self) -> int:
        """Tokens that arrived for requests after they were aborted, over all its lives."""
        now = self.client.requests.num_tokens_after_abort if self.client is not None else 0
        return self._late_tokens_before + now

    def disconnected(self, failure: Failure) -> None:
        self._late_tokens_before = self.num_late_tokens()
        self.client, self.failure, self.follows_prefixes = None, failure, False

    async def stats(self, timeout_s: float = STATS_TIMEOUT_S) -> EngineStats | None:
        """The core's statistics; None if it does not reply in time."""
        if self.client is None:
            return None
        with contextlib.suppress(HeadraceError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self.client.get_stats()
        return None


class EnginePool:
    """All engines of this frontend, and the requests that they run for it."""

    def __init__(
        self,
        sources: Sequence[Source],
        options: RouterOptions | None = None,
        chance: random.Random | None = None,
        discovery: Discovery | None = None,
        *,
        serves_early: bool = False,
    ) -> None:
        """The engines of `sources`, and those that are discovered or added later.

        serves_early: requests come as soon as one engine is ready, so from then on no other one ends the start. An
        engine that someone else runs may come at any time, so the start waits for it.
        """
        self._serves_early = serves_early
        self.engines = [
            Engine(index if source.rank is None else source.rank, source, is_needed=True)
            for index, source in enumerate(sources)
        ]
        """Sorted by index, which is the data_parallel_rank."""
        self._discovery = discovery
        self.router = Router(options or RouterOptions(), chance or random.Random())
        self.started = asyncio.Event()
        """Set when all engines are ready for the first time; of engines that others run, when one is connected and the
        others have been tried."""
        self.dead = asyncio.Event()
        """Set when no engine is left and none will return; `failure` says why."""
        self.failure: Failure | None = None
        self.on_death: Callable[[Failure], None] | None = None
        """Called for each engine that ends after the start, and for each own engine that does not restart."""
        self.on_return: Callable[[str], None] | None = None
        """Called with the address of each engine that has returned."""
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
            engine.task = asyncio.create_task(self._keep(engine))
        if self._discovery is not None:
            self._discovery.start(self)

    async def close(self, deadline_s: float) -> None:
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
                engine.client.on_dead = engine.client.rescue = None
                await engine.client.close()
        self._waiting.fail_all(Failure(message="this client is closed", type="Closed"), EngineDeadError)
        await asyncio.gather(*(engine.source.close(deadline_s) for engine in self.engines))

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
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        priority: int = 0,
        *,
        model: str,
        max_tokens: int | None = None,
        affinity: Affinity = ANYWHERE,
    ) -> RequestStream:
        """Submits the request to the engine that the router chooses; it may move to others later.

        Raises what CoreClient.submit raises; QueueFullError if all are full; EngineDeadError if none accepts it.
        """
        request_id, priority = checked_name(request_id), checked_priority(priority)
        if max_tokens is None:
            params.verify()  # the router counts on them
        if request_id in self._streams:
            raise InvalidRequestError(f"a request with the id {request_id!r} is running; ids must be unique")
        if affinity.rank is not None and affinity.rank not in (ranks := [engine.index for engine in self.engines]):
            raise InvalidRequestError(
                f"data_parallel_rank is {affinity.rank!r}, and there are {len(ranks)} engines, of rank "
                f"{', '.join(map(str, ranks))}"
            )
        token_ids, is_one = prompt.token_ids or (), len(self.router.members) < 2
        routed = RoutedRequest(
            model,
            Progress(),
            num_prompt_tokens=len(token_ids),
            tokens=b"" if is_one else array.array("i", token_ids).tobytes(),
            prefix_key=PrefixKey(prompt.cache_salt, inputs=prompt.inputs),
            num_outputs=params.n,
            priority=priority,
            affinity=affinity,
        )
        if self._timer is None:
            self.router.wake(time.monotonic())
        engine = self._place(routed)
        engine.note_work()
        assert engine.client is not None, "a member of the router is connected"
        try:
            stream = engine.client.submit(request_id, prompt, params, priority, max_tokens=max_tokens)
        except BaseException:
            self.router.end(routed, time.monotonic())
            raise
        stream.route, routed.work = routed, stream
        stream.on_gone = self._on_gone
        self._streams[request_id] = stream
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        return stream

    def abort_stream(self, stream: RequestStream) -> None:
        """Ends it with finish_reason `abort`; does nothing once it has ended."""
        if stream.table is not None:
            stream.table.abort_stream(stream)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Ends these requests; ids that are not running are ignored."""
        for stream in [self._streams[each] for each in request_ids if each in self._streams]:
            self.abort_stream(stream)

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

    def _on_gone(self, stream: RequestStream) -> None:
        del self._streams[stream.request_id]
        self.router.end(stream.route, time.monotonic())

    def _on_refused(self, stream: RequestStream, failure: Failure) -> bool:
        """Returns whether another engine takes the request."""
        decision = self.router.refused(stream.route, failure, time.monotonic())
        if isinstance(decision, Fail):
            return False
        stream.table = None
        self._carry_out([decision])
        return True

    def _rescue(self, engine: Engine, streams: Sequence[RequestStream], failure: Failure) -> None:
        """Handles the death of an engine that ran these requests."""
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
            if stream.route is None:  # submitted directly through the client
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
            if stream.table is not None:
                stream.table.release(stream)
            if isinstance(decision, Fail):
                stream.fail(_ERRORS.get(decision.failure.type, EngineDeadError).from_failure(decision.failure))
                continue
            if isinstance(decision, Move):
                target = self._by_name[decision.target.facts.name]
                assert target.client is not None, "a member of the router is connected"
                target.note_work()
                target.client.requests.adopt(stream)
            else:
                self._waiting.adopt(stream)
        if decisions:
            logger.info("%s", summary(decisions))

    def _tick(self) -> None:
        """Runs every TICK_S while there are requests."""
        self._timer = None
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
        if self._streams:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

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
        engine = Engine(index, source, is_needed=False)
        bisect.insort(self.engines, engine, key=lambda each: each.index)
        self._by_name[engine.name] = engine
        if source.address:
            self._by_address[source.address] = engine
        self._forget_names()
        engine.task = asyncio.create_task(self._keep(engine))
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
            try:
                failure = await self._serve(engine)
            except HeadraceError as error:
                failure = Failure.of(error, process="server", phase="connect")
            # A foreign engine that is not there yet need not be reported; an own one that did not start must be.
            is_news = engine.client is not None or engine.source.is_own
            news = failure
            if engine.client is not None and engine.client.draining:
                engine.source.left()
                news = Failure(message=f"{engine.name} at {engine.source.address} left, as it was asked to")
            engine.disconnected(failure)
            self._health.forget(engine.name)
            self._forget_names()
            if is_news and self.on_death is not None and (self.started.is_set() or self._may_start_without(engine)):
                self.on_death(news)
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
            self.failure = failure
            self.dead.set()
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
        death: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        client.on_dead = lambda failure: None if death.done() else death.set_result(failure)
        client.rescue = lambda streams, failure: self._rescue(engine, streams, failure)
        client.requests.on_refused = self._on_refused
        client.on_load = lambda load: self._on_load(engine, load)
        client.on_draining = lambda: self._on_draining(engine)
        client.on_welcome = lambda welcome: self._on_welcome(engine, welcome)
        if engine.failure is not None and self.on_return is not None:
            self.on_return(engine.source.address)
        elif engine.source.is_own and self.started.is_set():
            logger.info("%s at %s is there", engine.name, engine.source.address)
        engine.client, engine.failure = client, None
        if engine.hold is not None:
            engine.hold.cancel()
        engine.names = client.welcome.served_model_names or (client.welcome.model,)
        others = (each for each in self.engines if each is not engine and {*each.names} & {*engine.names})
        tell_namesakes_apart(engine.name, client.welcome, (each.client.welcome for each in others if each.client))
        self._carry_out(self.router.join(_facts(engine, client.welcome), time.monotonic()))
        if client.draining:  # announced before on_draining was set
            self._on_draining(engine)
        client.on_prefixes = lambda events: self._on_prefixes(engine, events)
        self._follow_prefixes(engine)
        self._forget_names()
        self._note_start()
        failure = await death
        await client.close()  # an engine that reported its failure leaves the connection open
        return failure

    def _on_draining(self, engine: Engine) -> None:
        self._forget_names()
        if engine.name in self.router.members:
            self._carry_out(self.router.drain(engine.name, time.monotonic()))

    def _on_welcome(self, engine: Engine, welcome: Welcome) -> None:
        """The engine has loaded other weights."""
        if engine.name in self.router.members:
            facts = _facts(engine, welcome)
            logger.info("%s at %s has other weights now: %s", engine.name, engine.source.address, facts.version)
            self._carry_out(self.router.change_version(engine.name, facts.version, facts.weights, time.monotonic()))

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

    def _on_prefixes(self, engine: Engine, events: PrefixEvents) -> None:
        self.router.evicted(engine.name, events.evicted.tolist())
        self.router.stored(engine.name, events.stored.tolist())

    def _on_load(self, engine: Engine, load: Load) -> None:
        self.router.load(engine.name, load.num_running, load.num_waiting, time.monotonic(), is_paused=load.is_paused)


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
