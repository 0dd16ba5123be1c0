"""All engines of one frontend, kept connected for the requests that they run (requests.py).

Each has a task: `_keep` connects to it, `_join` lets requests come, and after its end it is connected again for as long
as its source provides it.
"""

from __future__ import annotations

import asyncio
import bisect
import functools
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence

from headrace.core.process.child_output import StartLine
from headrace.frontend.client.client import CoreClient
from headrace.frontend.client.own_engine import STOP_DEADLINE_S
from headrace.frontend.client.request_metrics import Meters
from headrace.frontend.fleet.decisions import RouterOptions
from headrace.frontend.fleet.directory import Loads
from headrace.frontend.fleet.discovery import Discovery
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.fleet.members import EngineFacts
from headrace.frontend.fleet.requests import RoutedRequests
from headrace.frontend.fleet.router import Router
from headrace.frontend.fleet.sources import Source
from headrace.ipc.failure import EngineDeadError, Failure, let_interrupts_pass
from headrace.ipc.messages import EngineStats, Welcome

logger = logging.getLogger(__name__)

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


class EnginePool(RoutedRequests):
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
        super().__init__(Router(options or RouterOptions(), chance or random.Random()), meters)
        self._serves_early = serves_early
        self.engines = [
            Engine(self, index if source.rank is None else source.rank, source, is_needed=True)
            for index, source in enumerate(sources)
        ]
        self._by_name = {engine.name: engine for engine in self.engines}
        self._discovery = discovery
        is_only = len(sources) == 1 and not sources[0].comes_back and discovery is None and not serves_early
        self._only = self.engines[0] if is_only else None
        self._waits = any(source.waits_alone for source in sources)
        self.started = asyncio.Event()
        """Set when all engines are ready for the first time; of engines that others run, when one is connected and the
        others have been tried."""
        self.dead = asyncio.Event()
        """Set when no engine is left and none will return; `failure` says why."""
        self._start_error: BaseException | None = None
        self._on_death, self._on_return = on_death or self._say_ended, on_return or _say_returned

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

    def let_go(self, address: str, *, may_return: bool = False) -> None:
        """Removes the engine at this address. While it is connected, its requests continue. may_return: another will
        be added in its place, for which requests wait that no other engine can run."""
        engine = self._by_address.get(address)
        if engine is None:
            return
        engine.source.let_go()
        engine.may_return = may_return
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
            await asyncio.sleep(engine.source.pause_s(time.monotonic() - began_s))
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
        if not engine.may_return:
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
            await self._standstill.pass_on(engine.name, client, functools.partial(self._stats_beside, engine))
            self._join(engine, client)
            failure = await client.until_lost()
        except asyncio.CancelledError:
            if engine.client is not client:
                client.leave()
            raise
        except BaseException as error:  # its requests go on elsewhere, as after its death
            client.fail(Failure.of(error, process="client", phase="serve"))
            client.leave()
            raise
        client.leave()  # an engine that reported its failure leaves the connection open
        return failure

    async def _stats_beside(self, new: Engine) -> list[EngineStats]:
        """Of the other engines that serve."""
        others = [engine for engine in self.engines if engine is not new and engine.usable]
        return [each for each in await asyncio.gather(*(engine.stats() for engine in others)) if each is not None]

    def _join(self, engine: Engine, client: CoreClient) -> None:
        """The engine is connected, and takes requests from now on."""
        client.listener = engine
        if engine.failure is not None:
            self._on_return(engine.source.address)
        elif engine.source.is_own and self.started.is_set():
            logger.info("%s at %s is connected", engine.name, engine.source.address)
        engine.client, engine.failure = client, None
        self._last_client = self._last_client or client
        if engine.hold is not None:
            engine.hold.cancel()
        engine.names = client.welcome.served_model_names or (client.welcome.model,)
        others = (each for each in self.engines if each is not engine and {*each.names} & {*engine.names})
        tell_namesakes_apart(engine.name, client.welcome, (each.client.welcome for each in others if each.client))
        self.adapters.joined(engine)
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
            self.router.drain(engine.name, time.monotonic())

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


def tell_namesakes_apart(engine: str, new: Welcome, others: Iterator[Welcome]) -> None:
    """Logs if `new` differs from the engines with the same served name, which are versions of one model.

    others: the engines that are there already; the first one is compared.
    """
    first = next(others, new)
    if new.tokenizer != first.tokenizer:
        logger.warning(
            "%s has %s, and others serve %s under the same name with another tokenizer or chat template: prompts that "
            "one makes go to any of them; give different models different names (--served-model-name)",
            *(engine, new.model, first.model),
        )
    elif new.model != first.model:
        logger.info("%s has %s as another version of %s: their names are the same", engine, new.model, first.model)


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
    logger.warning("the engine at %s is connected again", address)
