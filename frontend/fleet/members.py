"""Engines as the router sees them, and the groups between whose engines requests may move."""

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
"""Of the engines that were measured, how many have to be measured again before their common pace is learnt anew."""
_WEIGHING_S = 1e-3
"""For each engine, between two times that all are weighed: about a hundred times what its weighing takes."""


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while an engine lives."""

    name: str
    """Its address, or another name of its own."""
    models: tuple[str, ...]
    """Under which it is asked for."""
    version: str
    """Engines of the same give the same tokens for the same request."""
    block_size: int = 16
    capacity: int = 256
    """Requests that run at once."""
    max_waiting: int = 1 << 30
    """Requests that may wait besides."""
    rank: int = 0
    """data_parallel_rank"""
    caches_prefixes: bool = True
    """Of prompts that it has computed it need not compute the same beginning again."""


class Member:
    """One engine from its joining to its end."""

    __slots__ = (
        "_brought",
        "_computed",
        "_measured_s",
        "_rows_seconds",
        "_seconds",
        "ailing_since_s",
        "ailment_",
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
        "wait_s",
    )  # fmt: skip

    def __init__(self, facts: EngineFacts, number: int, now_s: float) -> None:
        self.facts, self.bit = facts, 1 << number
        self.requests: dict[RoutedRequest, None] = {}
        self.num_outputs = 0
        """Of those requests: what runs there of this frontend's."""
        self.pending_tokens = 0
        """To be computed before the first tokens of those that have none yet."""
        self.requests_elsewhere = 0
        """Of other frontends, as far as it has said how many it has."""
        self.elsewhere_until_s = 0.0
        """How long that is believed."""
        self.heard_s = self.busy_since_s = self.progress_s = now_s
        self.full_until_s = 0.0
        self.is_draining = self.is_paused = self.is_gone = False
        self.ailment_ = ""
        self.ailing_since_s = 0.0
        self.speed = Speed()
        self.stalled_share = 0.0
        """Of time, in which tokens wait for prompts to be computed."""
        self._computed, self._measured_s = 0, now_s
        self._brought, self._seconds, self._rows_seconds = 0, 0.0, 0.0  # tokens, and what they took; since the tick
        self.per_row = self.token_s = self.prompt_token_s = 0.0
        """As it is weighed: share of a token's time that each row adds, seconds that a token would take if nothing else
        ran, and that a token of a prompt takes. Its group sets them."""
        self.cost_s = 0.0
        """Of a request of an empty prompt: how long it would take, and how much longer others."""
        self.cost_per_token_s = 0.0
        """The same of each token of its prompt that has to be computed."""
        self.wait_s = 0.0
        """How long one would wait for its turn."""
        self.order = self.entry_order = -1
        """By which its group finds it: of its last weighing as one that takes requests, and of its entry among them; -1
        without."""
        self.entry_cost_s = 0.0
        self.counted = 0
        """What its group has counted of `num_active`."""

    @property
    def ailment(self) -> str:
        """Why it should have no requests now: silent, stalled or slow; "" while it may."""
        return self.ailment_

    @ailment.setter
    def ailment(self, reason: str) -> None:
        if reason:
            self.ailing_since_s = max(self.heard_s, self.busy_since_s) if reason != "slow" else self.ailing_since_s
        self.ailment_ = reason

    @property
    def num_active(self) -> int:
        """Outputs that run or wait there, as far as is known."""
        return self.num_outputs + self.requests_elsewhere

    def note_load(self, num_requests: int, until_s: float) -> None:
        """It has so many, those of this frontend among them."""
        self.requests_elsewhere = max(0, num_requests - self.num_outputs)
        self.elsewhere_until_s = until_s

    def is_full(self, now_s: float) -> bool:
        """Whether it would refuse a request, by what is known here: it has said so a moment ago, or has this frontend's
        own up to its bound. What others have there is older than it, and may have ended: the engine judges that."""
        return now_s < self.full_until_s or self.num_outputs >= self.facts.capacity + self.facts.max_waiting

    def is_usable(self, now_s: float) -> bool:
        return not (self.is_gone or self.is_draining or self.ailment_) and not self.is_full(now_s)

    def measure(self, now_s: float) -> bool:
        """What its requests have brought since the last tick. Whether that says something of its speed."""
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
        self._note_stall(now_s)
        token_s = self._seconds / self._brought * (1.0 - self.stalled_share)
        self.speed.note_token_time(token_s, self._rows_seconds / self._seconds, self.per_row)
        self._seconds = self._rows_seconds = 0.0
        self._brought = 0
        return True

    def _note_stall(self, now_s: float) -> None:
        """For what share of the time since the last measure tokens waited for prompts: those of this frontend, and of
        others as many for each of their requests."""
        since_s, self._measured_s = now_s - self._measured_s, now_s
        computed_s = self._computed * self.prompt_token_s * self.num_active / max(1, self.num_outputs)
        self._computed = 0
        if since_s > 0:
            self.stalled_share += _STALL_WEIGHT * (min(_MOST_STALLED, computed_s / since_s) - self.stalled_share)

    def _note_first_token(self, request: RoutedRequest, computing: int) -> None:
        """computing: tokens that were to be computed for first tokens, of all requests."""
        work = request.work
        num_computed = request.num_prompt_tokens - (work.num_cached_tokens or 0)
        self._computed += num_computed
        if work.first_token_s and request.num_migrations == 0 and computing == request.pending_tokens:
            self.speed.note_prompt(num_computed, work.first_token_s)
        self.pending_tokens -= request.pending_tokens
        request.pending_tokens = 0

    def _note_tokens(self, request: RoutedRequest, num_tokens: int, now_s: float) -> None:
        """It has brought some. They may come many at once, so what counts is the time since those before them."""
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
        """Comes before it is no longer on board."""
        if (num_tokens := request.work.num_tokens) > request.tokens_seen:
            self._note_tokens(request, num_tokens, now_s)

    def keep_pace(self, pace: Pace) -> None:
        """As the engines of its group are."""
        self.per_row, self.token_s = pace.per_row, self.speed.believed(pace)
        self.prompt_token_s = pace.prompt_token_s * (self.token_s / pace.token_s if pace.token_s else 1.0)

    def forget_times(self) -> None:
        self.speed = Speed()

    def weigh(self, mean_output_tokens: float) -> None:
        """One request more takes its own time, and makes the tokens of those that run take longer."""
        num_active, capacity = self.num_active, self.facts.capacity
        rows = min(num_active, capacity)
        answer_s = mean_output_tokens * self.token_s * (1.0 + self.per_row * rows)
        self.wait_s = answer_s * (num_active - capacity) / max(1, capacity) if num_active > capacity else 0.0
        others_s = mean_output_tokens * self.token_s * self.per_row * rows
        self.cost_s = self.pending_tokens * self.prompt_token_s + answer_s + self.wait_s + others_s
        self.cost_per_token_s = self.prompt_token_s * (1 + rows)  # they stand still meanwhile


class Group:
    """Engines of one version. The cheapest, of equal ones the one weighed first, is found in a heap of their costs.

    A member that became dearer keeps its entry, which then stands too early and is put right once it is the first: most
    changes of loads cost no work in the heap. One that became cheaper gets another entry, and the former is skipped.
    """

    def __init__(self, version: str) -> None:
        self.version = version
        self.members: dict[Member, None] = {}
        self.by_bit: dict[int, Member] = {}
        self.usable = 0
        """Bits of those that take requests."""
        self.awaited: set[str] = set()
        """Names of those that died and are being started anew."""
        self.failure: Failure | None = None
        """Of the one that died last."""
        self._models: tuple[str, ...] = ()
        self.pace = Pace()
        self._num_active = 0
        self._measured: dict[Member, None] = {}
        self._num_news = 0  # of those since the pace was learnt
        self._keeps_pace_until_s = -math.inf
        self._heap: list[tuple[float, int, Member]] = []  # cost, a running number, member
        self._order = itertools.count()

    def serves(self, model: str) -> bool:
        return model in self._models and bool(self.members or self.awaited)

    @property
    def models(self) -> tuple[str, ...]:
        return self._models

    def load(self) -> float:
        """Outputs for each member that run or wait there."""
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
        """Its cost has changed, or whether it takes requests."""
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
        """The cheapest of those that are suspected, for requests that have no other."""
        ailing = (
            each
            for each in self.members
            if each.ailment and not (each.is_draining or each.is_full(now_s) or each in refused_by)
        )
        return min(ailing, key=lambda each: each.cost_s, default=None)

    def least_loaded(self, now_s: float, refused_by: set[Member]) -> Member | None:
        """None where all are full, drained or ailing, or have refused."""
        heap, refused = self._heap, []
        while heap:
            _, order, member = heap[0]
            if order != member.entry_order or member not in self.members:
                heapq.heappop(heap)  # it has another one
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
        """Those that were full for a while take requests again once that is over, whenever the next tick is."""
        for member in self.members:
            if not self.usable & member.bit and member.is_usable(now_s):
                self.update(member, now_s)

    def learn(self, news: Sequence[Member], now_s: float) -> Iterable[Member]:
        """Its pace, from these that were measured again. Those that are to be weighed anew.

        All that were measured are gone through only once a share of them is news: a thousand engines of which a few
        have requests cost what those few cost. A pace that changes at every look weighs a thousand once a second.
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

    def is_slow(self, member: Member, factor: float) -> bool:
        """So many times slower than its kind, of which three or more were measured."""
        pace = self.pace
        if pace.num_measured < 3 or pace.token_s is None or not member.speed.is_measured:
            return False
        return member.speed.base_s(pace.per_row) > factor * pace.token_s
