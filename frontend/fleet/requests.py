"""The requests of one frontend, which move to another engine when theirs is lost.

The router (router.py) decides, and its decisions are carried out here. Tokens bypass both: an engine's client appends
them directly to the request's lists.

    submit --> Router.place --> CoreClient.submit                     Router.tick <-- a few times a second
                                    | dies, refuses, is silent
    RequestTable.release <----------+
           |  Move: RequestTable.adopt at another engine       Wait: adopt by a table that sends nothing
           +  Fail: RequestStream.fail
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import time
from collections.abc import Container, Iterable, Sequence
from typing import Any

import msgspec

from headrace.frontend.client.request_metrics import Meters, RequestCounts
from headrace.frontend.client.request_stream import RequestListener, RequestStream
from headrace.frontend.client.request_table import RequestTable
from headrace.frontend.fleet.decisions import (
    ANYWHERE,
    NO_PROGRESS,
    Affinity,
    AllFullError,
    Decision,
    Fail,
    Move,
    NoEngineError,
    RoutedRequest,
)
from headrace.frontend.fleet.engine import Engine
from headrace.frontend.fleet.engines import Engines
from headrace.frontend.fleet.router import Router
from headrace.frontend.request.checks import CheckedRequest
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
from headrace.ipc.prefix_names import NO_KEY, PrefixKey

logger = logging.getLogger(__name__)

HELD_S = 30.0
"""How long requests wait when no engine is left, for one that someone else runs to return."""
_LOOK_S = 0.1
TICK_S = 0.25
LOOKS_AFTER_S = 2 * TICK_S
"""How long an engine with requests may be silent before its process is looked at, if it runs on this host."""
_ERRORS: dict[str, type[HeadraceError]] = {
    QueueFullError.__name__: QueueFullError,
    EngineAsleepError.__name__: EngineAsleepError,
}
_LONGEST_CAUSE = 200
_AILMENTS = {
    "silent": "says nothing; it may be stopped",
    "stalled": "responds, but generates no tokens",
    "slow": "is many times slower than the other engines",
}


class RoutedRequests(Engines, RequestListener):
    """Requests that run on these engines."""

    def __init__(self, router: Router, meters: Meters | None) -> None:
        """meters: time requests."""
        super().__init__()
        self.router, self.meters = router, meters
        self.request_counts = meters if isinstance(meters, RequestCounts) else None
        self.ended: list[RequestStream] | None = None
        """The requests that have ended, for whoever takes them out; None if nobody does."""
        self._waits = False
        """Whether requests wait for an engine that may return where none is there."""
        self._streams: dict[str, RequestStream] = {}
        self._waiting = RequestTable(lambda message: None)
        """Holds the requests that wait for an engine."""
        self._timer: asyncio.TimerHandle | None = None
        self._health = HealthLog()

    def submit(
        self,
        request: CheckedRequest,
        listener: RequestListener | None = None,
        *,
        model: str | None = None,
        affinity: Affinity = ANYWHERE,
    ) -> RequestStream:
        """Submits a request that was checked to the engine that the router chooses; it may move to others later.

        listener: as CoreClient.submit has it. model: the name by which it is asked for, by default the first. Raises
        what CoreClient.submit raises; QueueFullError if all are full; EngineDeadError if none accepts it.
        """
        if request.name in self._streams:
            request = _renamed(request, self._streams)
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
            NO_PROGRESS,
            num_prompt_tokens=len(token_ids),
            tokens=b"" if is_one else array.array("i", token_ids).tobytes(),
            prefix_key=NO_KEY
            if is_one
            else PrefixKey(prompt.cache_salt, adapters=self.adapters.key_of(prompt), inputs=prompt.inputs),
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

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """Ends these requests with finish_reason `abort`; ids that are not running are ignored."""
        names = (request_ids,) if isinstance(request_ids, str) else request_ids
        for stream in [self._streams[each] for each in names if each in self._streams]:
            stream.abort()

    def route_of(self, request_id: str) -> RoutedRequest:
        """The router's record of a running request. Raises KeyError."""
        return self._streams[request_id].route

    def num_in_flight(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def __len__(self) -> int:
        return len(self._streams)

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


class HealthLog:
    """Logs when an engine becomes unhealthy, and when it recovers."""

    def __init__(self) -> None:
        self._ill: dict[str, str] = {}  # by name

    def note(self, engine: str, address: str, unhealthy_reason: str) -> None:
        """unhealthy_reason: the router's term for the problem (a key of _AILMENTS); "" for none."""
        had = self._ill.get(engine, "")
        if unhealthy_reason == had:
            return
        if unhealthy_reason:
            self._ill[engine] = unhealthy_reason
            logger.info("%s at %s %s, and gets no requests meanwhile", engine, address, _AILMENTS[unhealthy_reason])
        else:
            del self._ill[engine]
            logger.info("%s at %s has recovered: it was %s", engine, address, had)

    def forget(self, engine: str) -> None:
        """Call when the engine has ended."""
        self._ill.pop(engine, None)


def _renamed(request: CheckedRequest, taken: Container[str]) -> CheckedRequest:
    """The request under another name, as one with its own has been submitted since that was drawn. Raises
    InvalidRequestError if its caller gave the name."""
    names = request.other_names
    if names is None:
        raise id_in_use(request.name)
    return msgspec.structs.replace(request, name=next(name for name in names if name not in taken))


def id_in_use(name: str) -> InvalidRequestError:
    return InvalidRequestError(f"a request with the id {name!r} is running; ids must be unique")


def summary(decisions: Sequence[Decision]) -> str:
    """A line such as `requests: 5 moved from engine 0 to engine 1 (died), 1 waiting for an engine`."""
    counts: dict[str, int] = {}
    for decision in decisions:
        source = f" from {decision.source.facts.name}" if decision.source is not None else ""
        if isinstance(decision, Move):
            text = f"moved{source} to {decision.target.facts.name} ({decision.reason})"
        elif isinstance(decision, Fail):
            text = f"failed{source} ({decision.failure.message:.{_LONGEST_CAUSE}})"
        else:
            text = f"waiting for an engine{source} ({decision.reason})"
        counts[text] = counts.get(text, 0) + 1
    return "requests: " + ", ".join(f"{count} {text}" for text, count in counts.items())
