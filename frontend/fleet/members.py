"""Engines as the router sees them, and the groups between whose engines requests may move."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from headrace.frontend.fleet.speeds import Pace, Speed
from headrace.ipc.failure import Failure

if TYPE_CHECKING:
    from headrace.frontend.fleet.decisions import RoutedRequest


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
        "ailing_since_s",
        "ailment_",
        "bit",
        "busy_since_s",
        "cost_s",
        "facts",
        "full_until_s",
        "heard_s",
        "is_draining",
        "is_gone",
        "is_paused",
        "num_outputs",
        "pending_tokens",
        "per_row",
        "progress_s",
        "prompt_rate",
        "requests",
        "speed",
        "stamp",
        "token_s",
        "told_requests",
        "wait_s",
    )  # fmt: skip

    def __init__(self, facts: EngineFacts, number: int, now_s: float) -> None:
        self.facts, self.bit = facts, 1 << number
        self.requests: dict[RoutedRequest, None] = {}
        self.num_outputs = 0
        """Of those requests: what runs there of this frontend's."""
        self.pending_tokens = 0
        """To be computed before the first tokens of those that have none yet."""
        self.told_requests = 0
        """Of all frontends, as it said last."""
        self.heard_s = self.busy_since_s = self.progress_s = now_s
        self.full_until_s = 0.0
        self.is_draining = self.is_paused = self.is_gone = False
        self.ailment_ = ""
        self.ailing_since_s = 0.0
        self.speed = Speed()
        self.per_row = self.token_s = self.prompt_rate = 0.0
        """As it is weighed: share of a token's time that each row adds, seconds that a token would take if nothing else
        ran, tokens per second of prompts. Its group sets them."""
        self.cost_s = 0.0
        """How long a request of an empty prompt would take."""
        self.wait_s = 0.0
        """How long one would wait for its turn."""
        self.stamp = 0

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
        return max(self.num_outputs, self.told_requests)

    def is_full(self, now_s: float) -> bool:
        return now_s < self.full_until_s or self.num_active >= self.facts.capacity + self.facts.max_waiting

    def is_usable(self, now_s: float) -> bool:
        return not (self.is_gone or self.is_draining or self.ailment_) and not self.is_full(now_s)

    def measure(self, since_s: float, now_s: float) -> bool:
        """What its requests have brought since the last tick. Whether that says something of its speed."""
        brought = brought_by_whole = decoding = decoding_whole = 0
        computing = self.pending_tokens
        for request in self.requests:
            num_tokens = request.work.num_tokens
            new, was_decoding = num_tokens - request.tokens_seen, request.tokens_seen > 0
            request.tokens_seen = num_tokens
            if not num_tokens:
                continue
            if request.pending_tokens:
                self._note_first_token(request, computing)
            brought += new
            decoding += request.num_outputs
            if was_decoding:
                brought_by_whole += new
                decoding_whole += request.num_outputs
        if brought or not decoding:
            self.progress_s = now_s
        if since_s <= 0:
            return False
        rows = min(self.num_active, self.facts.capacity)
        if brought_by_whole:
            self.speed.note_token_time(since_s * decoding_whole / brought_by_whole, rows, self.per_row)
        elif brought and not self.speed.is_measured:  # of requests that began meanwhile: better than no measure
            self.speed.note_token_time(since_s * decoding / brought, rows, self.per_row)
        return brought > 0

    def _note_first_token(self, request: RoutedRequest, computing: int) -> None:
        """computing: tokens that were to be computed for first tokens, of all requests."""
        work = request.work
        if work.first_token_s and request.num_migrations == 0 and computing == request.pending_tokens:
            computed = request.num_prompt_tokens - (work.num_cached_tokens or 0)
            self.speed.note_prompt(computed, work.first_token_s)
        self.pending_tokens -= request.pending_tokens
        request.pending_tokens = 0

    def keep_pace(self, pace: Pace) -> None:
        """As the engines of its group are."""
        self.per_row = pace.per_row
        self.token_s, self.prompt_rate = self.speed.believed(pace)

    def forget_times(self) -> None:
        self.speed = Speed()

    def weigh(self, mean_output_tokens: float) -> None:
        num_active, capacity = self.num_active, self.facts.capacity
        answer_s = mean_output_tokens * self.token_s * (1.0 + self.per_row * min(num_active, capacity))
        self.wait_s = answer_s * (num_active - capacity) / max(1, capacity) if num_active > capacity else 0.0
        self.cost_s = self.pending_tokens / self.prompt_rate + answer_s + self.wait_s


class Group:
    """Engines of one version. The cheapest is found in a heap of their costs, of which old ones are skipped."""

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
        self._measured: dict[Member, None] = {}
        self._heap: list[tuple[float, int, int, Member]] = []  # cost, a running number, stamp, member
        self._order = itertools.count()

    def serves(self, model: str) -> bool:
        return model in self._models and bool(self.members or self.awaited)

    @property
    def models(self) -> tuple[str, ...]:
        return self._models

    def load(self) -> float:
        return sum(each.num_active for each in self.members) / max(1, len(self.members))

    def add(self, member: Member) -> None:
        self.members[member] = None
        self.by_bit[member.bit] = member
        self.pace.expect(member.facts.capacity)
        member.keep_pace(self.pace)
        self._models = tuple(dict.fromkeys((*self._models, *member.facts.models)))

    def remove(self, member: Member) -> None:
        del self.members[member]
        del self.by_bit[member.bit]
        self._measured.pop(member, None)
        self.usable &= ~member.bit

    def update(self, member: Member, now_s: float) -> None:
        """Its cost has changed, or whether it takes requests."""
        member.stamp += 1
        if not member.is_usable(now_s):
            self.usable &= ~member.bit
            return
        self.usable |= member.bit
        heapq.heappush(self._heap, (member.cost_s, next(self._order), member.stamp, member))
        if len(self._heap) > 4 * len(self.members) + 64:
            self._heap = [entry for entry in self._heap if entry[2] == entry[3].stamp and not entry[3].is_gone]
            heapq.heapify(self._heap)

    def least_loaded(self, now_s: float, refused_by: set[str]) -> Member | None:
        """None where all are full, drained or ailing, or have refused."""
        heap = self._heap
        while heap:
            _, _, stamp, member = heap[0]
            if stamp == member.stamp and member.is_usable(now_s):
                break
            heapq.heappop(heap)
        if not refused_by:
            return heap[0][3] if heap else None
        usable = [each for each in self.members if each.is_usable(now_s) and each.facts.name not in refused_by]
        return min(usable, key=lambda each: each.cost_s, default=None)

    def learn(self, news: Iterable[Member]) -> Iterable[Member]:
        """Its pace, from these that were measured again. Those that are to be weighed anew."""
        self._measured |= dict.fromkeys(news)
        weighed = self.members if self.pace.learn(each.speed for each in self._measured) else news
        for member in weighed:
            member.keep_pace(self.pace)
        return weighed

    def is_slow(self, member: Member, factor: float) -> bool:
        """So many times slower than its kind, of which three or more were measured."""
        pace = self.pace
        if pace.num_measured < 3 or pace.token_s is None or not member.speed.is_measured:
            return False
        return member.speed.base_s(pace.per_row) > factor * pace.token_s
