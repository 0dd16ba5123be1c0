"""The router's view of engines, and groups of engines between which requests may move."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from headrace.frontend.fleet.speeds import Pace, Speed
from headrace.ipc.failure import Failure

if TYPE_CHECKING:
    from headrace.frontend.fleet.decisions import RoutedRequest


_STALL_WEIGHT, _MOST_STALLED = 0.1, 0.75
_LEARNT_SHARE = 1 / 16
"""Share of a group's measured engines that must have new measurements before the group's pace is estimated again."""
_AGING_S = 1.0
"""Minimum time between two updates of the estimates that age."""
_WEIGHING_S = 1e-3
"""Minimum time between two cost updates of all engines, per engine: about a hundred times what one update takes."""


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of an engine that rarely change."""

    name: str
    """Its address, or another unique name."""
    models: tuple[str, ...]
    """The names under which requests may ask for its model."""
    version: str
    """Engines with the same version generate the same tokens for the same request."""
    weights: str = ""
    """`Welcome.model_version`, which is a part of its names of prefixes."""
    block_size: int = 16
    capacity: int = 256
    """How many requests may run at once."""
    max_waiting: int = 1 << 30
    """How many requests may wait in addition."""
    rank: int = 0
    """data_parallel_rank"""
    caches_prefixes: bool = True
    """Whether it has a prefix cache, so that known prefixes of prompts are not recomputed."""


class Member:
    """One engine, from when it joins to when it leaves."""

    __slots__ = (
        "_brought",
        "_computed",
        "_measured_s",
        "_rows_seconds",
        "_seconds",
        "_unhealthy_reason",
        "bit",
        "busy_since_s",
        "cost_per_token_s",
        "cost_s",
        "counted",
        "elsewhere_until_s",
        "entry_cost_s",
        "entry_order",
        "facts",
        "full_until_s",
        "heard_s",
        "is_draining",
        "is_gone",
        "is_paused",
        "num_outputs",
        "order",
        "pending_tokens",
        "per_row",
        "progress_s",
        "prompt_token_s",
        "requests",
        "requests_elsewhere",
        "speed",
        "stalled_share",
        "token_s",
        "unhealthy_since_s",
        "wait_s",
        "worked_s",
    )  # fmt: skip

    def __init__(self, facts: EngineFacts, number: int, now_s: float) -> None:
        self.facts, self.bit = facts, 1 << number
        self.requests: dict[RoutedRequest, None] = {}
        self.num_outputs = 0
        """Number of outputs of `requests`: this frontend's load on the engine."""
        self.pending_tokens = 0
        """Tokens to compute before the first tokens of requests that have none yet."""
        self.requests_elsewhere = 0
        """Requests of other frontends, according to the last report."""
        self.elsewhere_until_s = 0.0
        """Until when that report is valid."""
        self.heard_s = self.busy_since_s = self.progress_s = now_s
        self.full_until_s = 0.0
        self.worked_s = -math.inf
        """When its process was last found at work, if it runs on this host."""
        self.is_draining = self.is_paused = self.is_gone = False
        self._unhealthy_reason = ""
        self.unhealthy_since_s = 0.0
        self.speed = Speed()
        self.stalled_share = 0.0
        """Share of time in which decoding waits for prefill."""
        self._computed, self._measured_s = 0, now_s
        self._brought, self._seconds, self._rows_seconds = 0, 0.0, 0.0  # since the tick: tokens, and their time
        self.per_row = self.token_s = self.prompt_token_s = 0.0
        """Used for its cost and set by its group: the share of a token's time that each running row adds, the seconds
        per token if nothing else ran, and the seconds per computed prompt token."""
        self.cost_s = 0.0
        """Cost of a request with an empty prompt: its own time, and by how much it delays other requests."""
        self.cost_per_token_s = 0.0
        """Additional cost per prompt token that has to be computed."""
        self.wait_s = 0.0
        """Expected waiting time of a new request."""
        self.order = self.entry_order = -1
        """For the group's heap: the number of the last cost update while usable, and the number of the current heap
        entry; -1 if there is none."""
        self.entry_cost_s = 0.0
        self.counted = 0
        """The `num_active` that is included in the group's sum."""

    @property
    def unhealthy_reason(self) -> str:
        """Why it should get no requests now: silent, stalled or slow; "" if it may."""
        return self._unhealthy_reason

    @unhealthy_reason.setter
    def unhealthy_reason(self, reason: str) -> None:
        if reason and reason != "slow":
            self.unhealthy_since_s = max(self.heard_s, self.busy_since_s)
        self._unhealthy_reason = reason

    @property
    def num_active(self) -> int:
        """Outputs that run or wait on the engine, as far as known."""
        return self.num_outputs + self.requests_elsewhere

    def silent_s(self, now_s: float) -> float:
        """How long it has said nothing although it has requests."""
        return now_s - max(self.heard_s, self.busy_since_s)

    def note_load(self, num_requests: int, until_s: float) -> None:
        """The engine has this many requests, including those of this frontend."""
        self.requests_elsewhere = max(0, num_requests - self.num_outputs)
        self.elsewhere_until_s = until_s

    def drop_report(self, now_s: float) -> bool:
        """Forgets an outdated report of other frontends' requests. Returns whether its cost has changed."""
        if self.requests or not self.requests_elsewhere or now_s < self.elsewhere_until_s:
            return False
        self.requests_elsewhere = 0
        return True

    def is_full(self, now_s: float) -> bool:
        """Whether the engine would probably refuse a request: it has just refused one, or this frontend's own requests
        reach its limit. Requests of other frontends are left to the engine to judge, as reports of them are older."""
        return now_s < self.full_until_s or self.num_outputs >= self.facts.capacity + self.facts.max_waiting

    def is_usable(self, now_s: float) -> bool:
        return not (self.is_gone or self.is_draining or self._unhealthy_reason) and not self.is_full(now_s)

    def measure(self, now_s: float) -> bool:
        """Measures the progress of its requests since the last tick. Returns whether its speed was measured."""
        has_brought, is_decoding, computing = False, False, self.pending_tokens
        for request in self.requests:
            num_tokens = request.work.num_tokens
            if not num_tokens:
                continue
            is_decoding = True
            if num_tokens == request.tokens_seen:
                continue
            has_brought = True
            if request.pending_tokens:
                self._note_first_token(request, computing)
            self._note_tokens(request, num_tokens, now_s)
        if has_brought or not is_decoding:
            self.progress_s = now_s
        if not self._brought:
            return False
        since_s, self._measured_s = now_s - self._measured_s, now_s
        self._note_stall(since_s)
        token_s = self._seconds / self._brought * (1.0 - self.stalled_share)
        self.speed.note_token_time(token_s, self._rows_seconds / self._seconds, self.per_row, since_s)
        self._seconds = self._rows_seconds = 0.0
        self._brought = 0
        return True

    def age(self, since_s: float, now_s: float, pace: Pace) -> bool:
        """Ages the estimate of its speed by the time from since_s to now_s. Returns whether its cost has changed.

        An estimate is kept while the engine has requests, whose tokens will tell: a stopped engine brings none."""
        aged_s = now_s - max(since_s, self._measured_s + self.speed.believed_s)
        if self.requests or aged_s <= 0:
            return False
        before_s = self.token_s
        self.speed.age(aged_s, pace)
        self.keep_pace(pace)
        return self.token_s != before_s

    def _note_stall(self, since_s: float) -> None:
        """Updates the share of time in which decoding waited for prefill. Other frontends' requests are assumed to have
        as many prompt tokens each as this frontend's."""
        computed_s = self._computed * self.prompt_token_s * self.num_active / max(1, self.num_outputs)
        self._computed = 0
        if since_s > 0:
            self.stalled_share += _STALL_WEIGHT * (min(_MOST_STALLED, computed_s / since_s) - self.stalled_share)

    def _note_first_token(self, request: RoutedRequest, computing: int) -> None:
        """computing: pending tokens of all requests on the engine at this tick."""
        work = request.work
        num_computed = request.num_prompt_tokens - (work.num_cached_tokens or 0)
        self._computed += num_computed
        if work.first_token_s and request.num_migrations == 0 and computing == request.pending_tokens:
            self.speed.note_prompt(num_computed, work.first_token_s)
        self.pending_tokens -= request.pending_tokens
        request.pending_tokens = 0

    def _note_tokens(self, request: RoutedRequest, num_tokens: int, now_s: float) -> None:
        """Counts a request's new tokens. Many may arrive at once, so the time is measured from the ones before."""
        since_s, before = request.seen_s, request.tokens_seen
        if since_s is None and (first_s := request.work.first_token_s) is not None:
            since_s, before = request.placed_s + first_s, request.num_outputs
        if since_s is not None and num_tokens > before and now_s > since_s:
            seconds = (now_s - since_s) * request.num_outputs
            self._brought += num_tokens - before
            self._seconds += seconds
            self._rows_seconds += seconds * min(self.num_active, self.facts.capacity)
        request.seen_s, request.tokens_seen = now_s, num_tokens

    def note_end(self, request: RoutedRequest, now_s: float) -> None:
        """Call before the request is removed from the engine."""
        if (num_tokens := request.work.num_tokens) > request.tokens_seen:
            self._note_tokens(request, num_tokens, now_s)

    def keep_pace(self, pace: Pace) -> None:
        """Adopts the pace of its group, scaled to its own speed."""
        self.per_row, self.token_s = pace.per_row, self.speed.believed(pace)
        self.prompt_token_s = pace.prompt_token_s * (self.token_s / pace.token_s if pace.token_s else 1.0)

    def forget_times(self) -> None:
        self.speed = Speed()

    def weigh(self, mean_output_tokens: float) -> None:
        """Computes the cost of one more request: its own time, and the delay of the tokens of running requests."""
        num_active, capacity = self.num_active, self.facts.capacity
        rows = min(num_active, capacity)
        answer_s = mean_output_tokens * self.token_s * (1.0 + self.per_row * rows)
        self.wait_s = answer_s * (num_active - capacity) / max(1, capacity) if num_active > capacity else 0.0
        others_s = mean_output_tokens * self.token_s * self.per_row * rows
        self.cost_s = self.pending_tokens * self.prompt_token_s + answer_s + self.wait_s + others_s
        self.cost_per_token_s = self.prompt_token_s * (1 + rows)  # the running rows wait during prefill


class Group:
    """Engines of one version. A heap finds the one with the lowest cost; of equal ones the one updated first.

    A member whose cost rose keeps its heap entry, which is corrected when it reaches the top, so most load changes cost
    no heap operation. A member whose cost fell gets another entry, and the former one is skipped.
    """

    def __init__(self, version: str) -> None:
        self.version = version
        self.members: dict[Member, None] = {}
        self.by_bit: dict[int, Member] = {}
        self.usable = 0
        """Mask of the members that accept requests."""
        self.awaited: set[str] = set()
        """Names of members that died and are being restarted."""
        self.failure: Failure | None = None
        """The failure of the member that died last; of members that failed together, of the first."""
        self._models: tuple[str, ...] = ()
        self.pace = Pace()
        self._num_active = 0
        self._measured: dict[Member, None] = {}
        self._num_news = 0  # measurements since the pace was last estimated
        self._keeps_pace_until_s = self._aged_s = -math.inf
        self._heap: list[tuple[float, int, Member]] = []  # cost, a running number, member
        self._order = itertools.count()

    def serves(self, model: str) -> bool:
        return model in self._models and bool(self.members or self.awaited)

    @property
    def models(self) -> tuple[str, ...]:
        return self._models

    def load(self) -> float:
        """Outputs that run or wait, per member."""
        return self._num_active / max(1, len(self.members))

    def add(self, member: Member) -> None:
        self.members[member] = None
        member.order = member.entry_order = -1
        self.by_bit[member.bit] = member
        self.pace.expect(member.facts.capacity)
        member.keep_pace(self.pace)
        self._models = tuple(dict.fromkeys((*self._models, *member.facts.models)))

    def remove(self, member: Member) -> None:
        del self.members[member]
        del self.by_bit[member.bit]
        self._measured.pop(member, None)
        self.usable &= ~member.bit
        self._num_active -= member.counted
        member.counted = 0

    def update(self, member: Member, now_s: float) -> None:
        """Call when its cost has changed, or whether it accepts requests."""
        num_active = member.num_active
        self._num_active += num_active - member.counted
        member.counted = num_active
        if not member.is_usable(now_s):
            member.order = -1
            if self.usable & member.bit:
                self.usable ^= member.bit
            return
        if not self.usable & member.bit:
            self.usable |= member.bit
        member.order = next(self._order)
        if member.entry_order >= 0 and member.cost_s >= member.entry_cost_s:
            return
        member.entry_order, member.entry_cost_s = member.order, member.cost_s
        heapq.heappush(self._heap, (member.cost_s, member.order, member))
        if len(self._heap) > 4 * len(self.members) + 64:
            self._heap = [
                entry for entry in self._heap if entry[1] == entry[2].entry_order and entry[2] in self.members
            ]
            heapq.heapify(self._heap)

    def least_suspected(self, now_s: float, refused_by: set[Member]) -> Member | None:
        """The unhealthy member with the lowest cost, for requests that no healthy one can run; None if none can."""
        ailing = (
            each
            for each in self.members
            if each.unhealthy_reason and not (each.is_draining or each.is_full(now_s) or each in refused_by)
        )
        return min(ailing, key=lambda each: each.cost_s, default=None)

    def least_loaded(self, now_s: float, refused_by: set[Member]) -> Member | None:
        """The member with the lowest cost; None if all are full, draining, unhealthy or have refused."""
        heap, refused = self._heap, []
        while heap:
            _, order, member = heap[0]
            if order != member.entry_order or member not in self.members:
                heapq.heappop(heap)  # outdated: the member has another entry
            elif member.order < 0 or not member.is_usable(now_s):
                heapq.heappop(heap)
                member.entry_order = -1
            elif order != member.order:
                member.entry_order, member.entry_cost_s = member.order, member.cost_s
                heapq.heapreplace(heap, (member.cost_s, member.order, member))
            elif member in refused_by:
                refused.append(heapq.heappop(heap))
            else:
                break
        best = heap[0][2] if heap else None
        for entry in refused:
            heapq.heappush(heap, entry)
        return best

    def look_again(self, now_s: float) -> None:
        """Makes members usable again whose time of being full has passed, without waiting for the next tick."""
        for member in self.members:
            if not self.usable & member.bit and member.is_usable(now_s):
                self.update(member, now_s)

    def learn(self, news: Sequence[Member], now_s: float) -> Iterable[Member]:
        """Estimates the group's pace after new measurements of `news`. Returns the members whose cost must be updated.

        All measured members are read only once a certain share of them has new measurements, so that with a thousand
        engines of which a few have requests the work is proportional to those few. If the pace changes all the time,
        a thousand engines are updated once a second.
        """
        self._measured |= dict.fromkeys(news)
        self._num_news += len(news)
        weighed: Iterable[Member] = news
        if self._num_news >= _LEARNT_SHARE * len(self._measured) and now_s >= self._keeps_pace_until_s:
            self._num_news = 0
            if self.pace.learn(each.speed for each in self._measured):
                weighed = self.members
                self._keeps_pace_until_s = now_s + _WEIGHING_S * len(self.members)
        for member in weighed:
            member.keep_pace(self.pace)
        return weighed

    def age(self, now_s: float) -> list[Member]:
        """Ages the estimates of engines without requests. Returns the members whose cost must be updated."""
        since_s = self._aged_s
        if now_s - since_s < max(_AGING_S, _WEIGHING_S * len(self._measured)):
            return []
        self._aged_s = now_s
        return [member for member in self._measured if member.age(since_s, now_s, self.pace)]

    def is_slow(self, member: Member, factor: float) -> bool:
        """Whether it is more than `factor` times slower than its group, of which at least three were measured."""
        pace = self.pace
        if pace.num_measured < 3 or pace.token_s is None or not member.speed.is_measured:
            return False
        return member.speed.base_s(pace.per_row) > factor * pace.token_s
