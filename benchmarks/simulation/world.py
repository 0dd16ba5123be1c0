"""Simulates one fleet (engines, frontends with real pools and clients, a workload, faults), and checks invariants.

Whatever fails, these must hold for every request:

- it gets exactly one terminal answer, and no output after it;
- its reader gets the tokens of its prompt and seed in order, none twice, none missing, none after the end;
- it produces a token, moves or ends within `Scenario.progress_deadline_s` while some engine has been healthy that long;
- it fails only for a true reason: two engines in a row died with it, it was moved as often as allowed, all engines were
  full, or none was available;
- it kills at most three engines;
- no engine runs more rows than its capacity, or is asked to resume after tokens that it would not have generated.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from headrace.frontend.client.client import CoreClient
from headrace.frontend.client.request_stream import RequestListener, RequestStream
from headrace.frontend.fleet.decisions import Affinity, RouterOptions
from headrace.frontend.fleet.discovery import Discovery
from headrace.frontend.fleet.pool import EnginePool
from headrace.frontend.fleet.sources import Source
from headrace.frontend.request.checks import check
from headrace.frontend.request.parameters.sampling_params import RequestOutputKind, SamplingParams
from headrace.frontend.request.prompts import Prompt
from headrace.ipc.codec import Tensor
from headrace.ipc.failure import HeadraceError, QueueFullError
from simulation.answers import AnswerCheck
from simulation.coordinators import Announcing, FollowerLink, SimulatedCoordinator
from simulation.engines import (
    MODEL,
    POISON,
    EngineShape,
    SimulatedEngine,
    version_of,
)
from simulation.lasting_objects import lasting_objects
from simulation.membership import Membership
from simulation.network import PEER_TIMEOUT_S, Link
from simulation.virtual_time import run_virtually

KINDS_WITH_COORDINATORS = ("coordinator", "deaf", "replace")
_LOOK_EVERY_S = 1.0
_MOST_KILLED = 3
"""Most engines that one request kills: two, and if other requests ran on both, the one where it was tried alone."""
_CONNECT_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 60.0


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """The fleet, its workload and its faults. Rates are per virtual second."""

    num_engines: int = 5
    num_frontends: int = 3
    num_coordinators: int = 0
    """With 0, frontends know the engines from the start."""
    num_requests: int = 60
    arrivals_per_s: float = 40.0
    mean_prompt_tokens: int = 96
    max_output_tokens: int = 40
    num_sessions: int = 12
    poison_share: float = 0.0
    """Share of requests that kill the engine that computes them."""
    faults_per_s: float = 0.5
    kinds_of_faults: tuple[str, ...] = ("crash", "freeze", "slow", "cut", "late", "drain", "upgrade", "crowd")
    engine: EngineShape = EngineShape()
    router: RouterOptions = RouterOptions()
    progress_deadline_s: float = 45.0
    """Covers the router's `stalled_after_s`, the time-out of a connection attempt, and a wait for capacity."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a run."""

    seed: int
    violations: tuple[str, ...]
    num_finished: int
    failures: dict[str, int]
    faults: dict[str, int]
    migrations: dict[str, int]
    num_tokens: int
    virtual_s: float
    gaps_s: dict[str, tuple[float, ...]]
    """For each stream that moved to another engine, the time from its last token before to its first after; by whether
    the old engine had `died` or was `left` (silent, slow, drained)."""
    digest: str
    """A hash of all answers with their times: equal for equal seeds."""


def simulate(seed: int, scenario: Scenario | None = None) -> Report:
    """Runs one simulation. Equal seeds and scenarios give equal reports."""
    with lasting_objects() as made:
        return run_virtually(_World(seed, scenario or Scenario()).run(on_start=made))


class EngineSource(Source):
    """A frontend's source of one engine, whose address it tries again for ever."""

    is_awaited = True

    def __init__(self, engine: SimulatedEngine, chance: random.Random) -> None:
        self.address, self.engine, self._chance = engine.name, engine, chance
        self.link: Link | None = None
        self.cut: tuple[bool, bool] | None = None
        self.delay_s: float | None = None

    async def open(self) -> CoreClient:
        self.link = link = Link(self.engine, self._chance)
        if self.cut is not None:
            link.cut(up=self.cut[0], down=self.cut[1])
        if self.delay_s is not None:
            link.up.delay_s = link.down.delay_s = self.delay_s
        client = CoreClient(link)
        await client.start(_CONNECT_TIMEOUT_S)
        return client

    def set_cut(self, cut: tuple[bool, bool] | None) -> None:
        self.cut = cut
        if self.link is not None:
            if cut is None:
                self.link.heal()
            else:
                self.link.cut(up=cut[0], down=cut[1])

    def set_delay(self, delay_s: float | None, usual_s: float) -> None:
        self.delay_s = delay_s
        if self.link is not None:
            self.link.up.delay_s = self.link.down.delay_s = usual_s if delay_s is None else delay_s

    @property
    def is_well(self) -> bool:
        return self.engine.is_healthy and self.cut is None and self.link is not None and self.link.is_open


class _Watched:
    """A request, with what the simulation itself records about its progress."""

    def __init__(self, frontend: _Frontend, stream: RequestStream, now_s: float) -> None:
        self.frontend, self.stream = frontend, stream
        self.num_tokens, self.progress_s = 0, now_s
        self.engine = _engine_of(stream)
        self.step_s = 0.0
        """When tokens last arrived; `step_engine` is the engine they came from, with its number of deaths by then."""
        self.step_engine: tuple[str | None, int] | None = None


class _Frontend:
    """A frontend process with its pool of engines."""

    def __init__(
        self,
        index: int,
        engines: list[SimulatedEngine],
        coordinators: list[SimulatedCoordinator],
        scenario: Scenario,
        seed: int,
    ) -> None:
        self.index, self._links = index, random.Random(f"{seed} links {index}")
        self.sources = [self._source(engine) for engine in engines]
        self._by_address = {each.address: each for each in self.sources}
        chance, discovery = random.Random(f"{seed} router {index}"), None
        if coordinators:
            ways = random.Random(f"{seed} coordinators {index}")
            by_name = {each.name: each for each in coordinators}
            discovery = Discovery(
                list(by_name),
                connect=lambda name: FollowerLink(by_name[name], f"frontend {index}", ways),
                source_of=self._found,
            )
        known = [] if coordinators else self.sources
        self.pool = EnginePool(known, scenario.router, chance=chance, discovery=discovery)
        self._well_since_s: dict[int, float] = {}
        """By model version, since when this frontend has had a healthy engine of that version."""

    def _source(self, engine: SimulatedEngine) -> EngineSource:
        return EngineSource(engine, self._links)

    def add(self, engine: SimulatedEngine) -> None:
        """Adds a new engine's source. The pool does not know the engine until it is discovered."""
        source = self._by_address[engine.name] = self._source(engine)
        self.sources.append(source)

    def _found(self, address: str) -> EngineSource:
        source = self._by_address[address]
        source.stay()
        return source

    def look(self, now_s: float, versions: set[int]) -> None:
        """Updates which versions have a healthy, reachable engine. versions: those of all healthy engines."""
        well = set[int]()
        for source in self.sources:
            if well >= versions:
                break
            if source.engine.version not in well and source.is_well:
                well.add(source.engine.version)
        self._well_since_s = {version: self._well_since_s.get(version, now_s) for version in well}

    def well_since_s(self, stream: RequestStream) -> float | None:
        """Since when some engine that may run this request has been healthy; None if there is none."""
        if stream.route.version is not None and stream.route.has_begun:
            return self._well_since_s.get(version_of(stream.route.version))
        return min(self._well_since_s.values(), default=None)


class _Gaps(RequestListener):
    """Tells the simulation of a stream's steps."""

    def __init__(self, world: _World, watched: _Watched) -> None:
        self._world, self._watched = world, watched

    def on_step(self, stream: RequestStream, now_s: float) -> None:
        self._world.on_step(self._watched, now_s)


class _World:
    def __init__(self, seed: int, scenario: Scenario) -> None:
        self.seed, self.scenario = seed, scenario
        self._chance = random.Random(f"{seed} world")
        self._violations: list[str] = []
        self._digest = hashlib.sha256()
        self._num_answers = bytearray(scenario.num_requests)
        """The number of terminal answers to each request."""
        self._failures: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._live: dict[str, _Watched] = {}
        self.announcing: dict[str, Announcing] = {}  # by the engine's name
        self._num_tokens = 0
        self._crowding = 1.0
        self._gaps_s: dict[str, list[float]] = {"died": [], "left": []}
        self._heads = functools.cache(self._head)

    async def run(self, on_start: Callable[[], None]) -> Report:
        """Runs the simulation. on_start: called when all frontends are connected to their engines."""
        scenario = self.scenario
        self._loop = asyncio.get_running_loop()
        self.engines = [
            SimulatedEngine(f"engine-{index}", scenario.engine, random.Random(f"{self.seed} engine {index}"))
            for index in range(scenario.num_engines)
        ]
        self.coordinators = [
            SimulatedCoordinator(f"coordinator-{index}", random.Random(f"{self.seed} coordinator {index}"))
            for index in range(scenario.num_coordinators)
        ]
        self.frontends = [
            _Frontend(index, self.engines, self.coordinators, scenario, self.seed)
            for index in range(scenario.num_frontends)
        ]
        for engine in self.engines:
            self._look_after(engine)
        self._membership = Membership(self.announcing, self.coordinators, [each.pool for each in self.frontends])
        for frontend in self.frontends:
            frontend.pool.start()
        async with asyncio.timeout(_START_TIMEOUT_S):
            await asyncio.gather(*(frontend.pool.started.wait() for frontend in self.frontends))
        on_start()
        began_s = self._loop.time()
        disturb = asyncio.ensure_future(self._disturb())
        look = asyncio.ensure_future(self._look())
        requests: set[asyncio.Task[None]] = set()
        for number in range(scenario.num_requests):
            await asyncio.sleep(self._chance.expovariate(scenario.arrivals_per_s * self._crowding))
            task = asyncio.ensure_future(self._request(number))
            requests.add(task)
            task.add_done_callback(requests.discard)
        disturb.cancel()
        if requests:
            # All faults are over now or soon: a request that has not ended long after that never will.
            _, stuck = await asyncio.wait(set(requests), timeout=10 * scenario.progress_deadline_s)
            self._violations += [f"{len(stuck)} requests never ended"] if stuck else []
        virtual_s = self._loop.time() - began_s
        look.cancel()
        await asyncio.gather(disturb, look, return_exceptions=True)
        for frontend in self.frontends:
            self._check_empty(frontend)
            await frontend.pool.close(0.0)
        return self._report(virtual_s)

    def _look_after(self, engine: SimulatedEngine) -> None:
        """Plays the part of the engine's supervisor, and with coordinators of the thread that announces it."""
        restarts = random.Random(f"{self.seed} restarts {engine.name}")
        engine.on_death = functools.partial(self._restart_later, engine, restarts)
        if self.coordinators:
            chance = random.Random(f"{self.seed} announcements {engine.name}")
            rank = self.engines.index(engine)
            self.announcing[engine.name] = Announcing(engine, rank, self.coordinators, chance)

    def _report(self, virtual_s: float) -> Report:
        migrations: Counter[str] = Counter()
        for frontend in self.frontends:
            migrations += frontend.pool.router.migrations
        found = [*self._violations, *(each for engine in self.engines for each in engine.violations)]
        killed_by: Counter[bytes] = Counter()
        for engine in self.engines:
            killed_by += engine.killed_by
        found += [f"one request killed {times} engines" for times in killed_by.values() if times > _MOST_KILLED]
        num_ended = sum(self._num_answers)
        if set(self._num_answers) - {1}:
            found.append(f"{num_ended} terminal answers to {self.scenario.num_requests} requests")
        return Report(
            seed=self.seed,
            violations=tuple(found),
            num_finished=num_ended - sum(self._failures.values()),
            failures=dict(sorted(self._failures.items())),
            faults=dict(sorted(self._faults.items())),
            migrations=dict(sorted(migrations.items())),
            num_tokens=self._num_tokens,
            virtual_s=virtual_s,
            gaps_s={kind: tuple(gaps_s) for kind, gaps_s in self._gaps_s.items()},
            digest=self._digest.hexdigest(),
        )

    # --- requests -----------------------------------------------------------------------------------------------

    async def _request(self, number: int) -> None:
        scenario, chance = self.scenario, random.Random(f"{self.seed} request {number}")
        frontend = self.frontends[chance.randrange(len(self.frontends))]
        request_id = f"request-{number}"
        session = chance.randrange(scenario.num_sessions)
        is_poison = chance.random() < scenario.poison_share
        prompt = self._prompt(session, chance, is_poison=is_poison)
        params = SamplingParams(
            max_tokens=chance.randint(1, scenario.max_output_tokens),
            seed=chance.getrandbits(40) if chance.random() < 0.5 else None,
            n=chance.choice((1, 1, 1, 2)),
            ignore_eos=chance.random() < 0.5,
            output_kind=chance.choice((RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY)),
            detokenize=False,
        )
        affinity = Affinity(session=str(session) if chance.random() < 0.5 else "")
        priority = chance.choice((0, 0, 5))
        try:
            request = check(request_id, Prompt(token_ids=prompt), params, frontend.pool, priority)
            stream = frontend.pool.submit(request, model=MODEL, affinity=affinity)
        except HeadraceError as error:
            self._end(number, None, frontend, error)
            return
        watched = self._live[request_id] = _Watched(frontend, stream, self._loop.time())
        if params.output_kind is RequestOutputKind.DELTA:
            stream.listener = _Gaps(self, watched)
        aborts = chance.random() < 0.05
        try:
            failure = await self._read(stream, params, prompt, chance if aborts else None)
        finally:
            del self._live[request_id]
        self._end(number, stream, frontend, failure)

    def _prompt(self, session: int, chance: random.Random, *, is_poison: bool) -> list[int]:
        """A beginning that all requests of the session share, and random tokens of its own."""
        return [POISON] * is_poison + self._heads(session) + self._some_tokens(chance)

    def _head(self, session: int) -> list[int]:
        return self._some_tokens(random.Random(f"{self.seed} session {session}"))

    def _some_tokens(self, chance: random.Random) -> list[int]:
        return [chance.randrange(10, 30_000) for _ in range(chance.randint(1, self.scenario.mean_prompt_tokens))]

    async def _read(
        self, stream: RequestStream, params: SamplingParams, prompt: list[int], leaves: random.Random | None
    ) -> HeadraceError | None:
        """Reads the whole stream, and checks each token when it is read. leaves: decides when to abort the request, if
        given. Returns the error that ended it."""
        is_delta = params.output_kind is RequestOutputKind.DELTA
        data = Tensor.of("int32", prompt).data
        outputs = [AnswerCheck(stream, index, data, self._violations) for index in range(params.n)]
        try:
            async for output in stream:
                for new in output.outputs:
                    outputs[new.index].take(new.token_ids, new.finish_reason, is_delta=is_delta)
                if leaves is not None and leaves.random() < 0.3 and not stream.done:
                    stream.abort()
                    leaves = None
        except HeadraceError as error:
            return error
        got = [each.got for each in outputs]
        self._num_tokens += sum(map(len, got))
        self._digest.update(repr((stream.request_id, got, f"{self._loop.time():.9f}")).encode())
        return None

    def _end(self, number: int, stream: RequestStream | None, frontend: _Frontend, error: HeadraceError | None) -> None:
        self._num_answers[number] += 1
        if error is None:
            return
        kind = self._reason(stream, frontend, error)
        self._failures[kind] += 1
        self._digest.update(repr((f"request-{number}", kind, f"{self._loop.time():.9f}")).encode())

    def _reason(self, stream: RequestStream | None, frontend: _Frontend, error: HeadraceError) -> str:
        """The reason of a failure in a few words. A failure without a true reason is a violation."""
        text = str(error)
        route = stream.route if stream is not None else None
        if "died while running this request" in text and route is not None and route.is_suspect:
            return "quarantined"
        most = self.scenario.router.max_migrations
        if "max_migrations" in text and route is not None and route.moves_without_token >= most:
            return "moved too often" if most else "engine died"
        if isinstance(error, QueueFullError):
            return "full"
        members = frontend.pool.router.members.values()
        if not any(each.is_usable(self._loop.time()) for each in members):
            return "no engine"
        if route is not None and route.has_begun and not any(each.facts.version == route.version for each in members):
            return "version gone"
        self._violations.append(f"{stream.request_id if stream else 'a submission'} failed without need: {text}")
        return "other"

    # --- checks during the run ----------------------------------------------------------------------------------

    def on_step(self, watched: _Watched, now_s: float) -> None:
        """Measures the gaps of a DELTA stream that moves between engines."""
        name, before = _engine_of(watched.stream), watched.step_engine
        if name is not None:
            watched.step_engine = name, self._by_index(name).num_deaths
            if before is not None and before[0] is not None and before[0] != name:
                kind = "left" if self._by_index(before[0]).num_deaths == before[1] else "died"
                self._gaps_s[kind].append(now_s - watched.step_s)
        watched.step_s = now_s

    def _by_index(self, name: str) -> SimulatedEngine:
        """The engine with the pool's name for it, `engine INDEX`."""
        return self.engines[int(name.rpartition(" ")[2])]

    async def _look(self) -> None:
        while True:
            now_s = self._loop.time()
            versions = {engine.version for engine in self.engines if engine.is_healthy}
            for frontend in self.frontends:
                frontend.look(now_s, versions)
            for watched in list(self._live.values()):
                self._look_at(watched, now_s)
            self._violations += self._membership.look(now_s)
            await asyncio.sleep(_LOOK_EVERY_S)

    def _look_at(self, watched: _Watched, now_s: float) -> None:
        stream = watched.stream
        engine, num_tokens = _engine_of(stream), stream.num_tokens
        if (engine, num_tokens) != (watched.engine, watched.num_tokens):
            watched.engine, watched.num_tokens, watched.progress_s = engine, num_tokens, now_s
        well_since_s = watched.frontend.well_since_s(stream)
        if well_since_s is None or self.scenario.router.max_migrations == 0:
            return
        waited_s, deadline_s = now_s - max(watched.progress_s, well_since_s), self.scenario.progress_deadline_s
        if stream.route.moves_without_token >= self.scenario.router.max_migrations:
            deadline_s += PEER_TIMEOUT_S  # it may not move again, and fails only when the connection is given up
        if waited_s > deadline_s:
            self._violations.append(f"{stream.request_id} stood still for {waited_s:.0f} s at {engine or 'no engine'}")
            watched.progress_s = now_s

    def _check_empty(self, frontend: _Frontend) -> None:
        router = frontend.pool.router
        left = [len(frontend.pool), len(router.held), *(len(member.requests) for member in router.members.values())]
        if any(left):
            self._violations.append(f"frontend {frontend.index} still has requests after all have ended: {left}")

    # --- faults -------------------------------------------------------------------------------------------------

    async def _disturb(self) -> None:
        chance = random.Random(f"{self.seed} faults")
        makers: dict[str, Callable[[random.Random], None]] = {
            "crash": self._crash,
            "freeze": self._freeze,
            "slow": self._slow,
            "cut": self._cut,
            "late": self._late,
            "drain": self._drain,
            "upgrade": self._upgrade,
            "crowd": self._crowd,
            "coordinator": self._lose_coordinator,
            "deaf": self._deafen,
            "replace": self._replace,
        }
        if not self.scenario.faults_per_s:
            return
        while True:
            await asyncio.sleep(chance.expovariate(self.scenario.faults_per_s))
            kinds = self.scenario.kinds_of_faults
            kind = chance.choice((*kinds, *KINDS_WITH_COORDINATORS) if self.coordinators else kinds)
            self._faults[kind] += 1
            makers[kind](chance)

    def _after(self, seconds: float, undo: Callable[[], Any]) -> None:
        self._loop.call_later(seconds, undo)

    def _crash(self, chance: random.Random) -> None:
        chance.choice(self.engines).die()

    def _restart_later(self, engine: SimulatedEngine, chance: random.Random) -> None:
        """Restarts the engine after a while, as its supervisor would."""
        self._after(chance.uniform(0.5, 10.0), functools.partial(_restart, engine))

    def _freeze(self, chance: random.Random) -> None:
        engine = chance.choice(self.engines)
        engine.freeze()
        self._after(chance.choice((0.5, 3.0, 8.0, 70.0)), engine.thaw)

    def _slow(self, chance: random.Random) -> None:
        engine, times = chance.choice(self.engines), chance.choice((3.0, 30.0))
        engine.slowness = times
        self._after(chance.uniform(5.0, 30.0), functools.partial(setattr, engine, "slowness", 1.0))

    def _cut(self, chance: random.Random) -> None:
        """Cuts one engine off from one frontend or all, in one direction or both."""
        index = chance.randrange(len(self.engines))
        frontends = [chance.choice(self.frontends)] if chance.random() < 0.7 else self.frontends
        directions = chance.choice(((True, True), (True, False), (False, True)))
        for frontend in frontends:
            source = frontend.sources[index]
            source.set_cut(directions)
            self._after(chance.choice((1.0, 6.0, 90.0)), functools.partial(source.set_cut, None))

    def _late(self, chance: random.Random) -> None:
        source = chance.choice(chance.choice(self.frontends).sources)
        source.set_delay(chance.choice((0.05, 0.5)), usual_s=0.0005)
        self._after(chance.uniform(1.0, 20.0), functools.partial(source.set_delay, None, 0.0005))

    def _drain(self, chance: random.Random) -> None:
        """Drains an engine, which comes back: a rolling restart."""
        engine = chance.choice(self.engines)
        if engine.is_healthy:
            engine.drain()
            self._after(chance.uniform(2.0, 20.0), functools.partial(self._leave, engine, "it was drained"))

    def _leave(self, engine: SimulatedEngine, why: str) -> None:
        """Ends a drained engine in order."""
        if engine.name in self.announcing and engine.listens:
            self.announcing[engine.name].leave()
        engine.die(why)

    def _upgrade(self, chance: random.Random) -> None:
        """Drains an engine, which comes back with another version of the model."""
        engine = chance.choice(self.engines)
        engine.next_version = 3 - engine.version
        if engine.is_healthy:
            engine.drain()
            self._after(chance.uniform(2.0, 20.0), functools.partial(self._leave, engine, "it is upgraded"))

    def _lose_coordinator(self, chance: random.Random) -> None:
        coordinator = chance.choice(self.coordinators)
        coordinator.die()
        self._after(chance.choice((0.2, 3.0, 30.0)), coordinator.start)

    def _deafen(self, chance: random.Random) -> None:
        """Cuts an engine's announcements to one coordinator, or to all, for a while."""
        ways = chance.choice(list(self.announcing.values())).ways
        for way in [chance.choice(ways)] if chance.random() < 0.7 else ways:
            way.is_cut = True
            self._after(chance.choice((1.0, 6.0, 25.0)), functools.partial(setattr, way, "is_cut", False))

    def _replace(self, chance: random.Random) -> None:
        """Removes an engine for good, in order or by its death, and adds a new one."""
        engine = chance.choice(self.engines)
        if not engine.is_healthy:
            return
        engine.on_death = lambda: None
        if chance.random() < 0.5:
            engine.drain()
            self._after(chance.uniform(1.0, 10.0), functools.partial(self._leave, engine, "it has left"))
        else:
            engine.die("it is no more")
        name = f"engine-{len(self.engines)}"
        new = SimulatedEngine(name, self.scenario.engine, random.Random(f"{self.seed} engine {name}"))
        self.engines.append(new)
        for frontend in self.frontends:
            frontend.add(new)
        self._look_after(new)

    def _crowd(self, chance: random.Random) -> None:
        """Makes requests arrive ten times as fast for a while."""
        self._crowding = 10.0
        self._after(chance.uniform(1.0, 5.0), functools.partial(setattr, self, "_crowding", 1.0))


def _restart(engine: SimulatedEngine) -> None:
    if not engine.listens:
        engine.start()


def _engine_of(stream: RequestStream) -> str | None:
    with contextlib.suppress(AttributeError):
        return str(stream.route.member.facts.name)
    return None
