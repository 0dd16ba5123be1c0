"""Engines as the router sees them, and the groups between whose engines requests may move."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

import msgspec

from headrace.ipc.failure import Failure

if TYPE_CHECKING:
    from headrace.frontend.fleet.decisions import RoutedRequest

_FIRST_PROMPT_RATE = 4000.0
_FIRST_TOKEN_S = 0.02
_WEIGHT = 0.2
"""Of the newest in a running mean."""


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


class Member:
    """One engine from its joining to its end."""

    __slots__ = (
        "ailing_since_s",
        "ailment_",
        "base_token_s",
        "bit",
        "busy_since_s",
        "cost_s",
        "facts",
        "full_until_s",
        "has_measured",
        "heard_s",
        "is_draining",
        "is_gone",
        "is_paused",
        "num_outputs",
        "pending_tokens",
        "progress_s",
        "prompt_rate",
        "requests",
        "stamp",
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
        self.prompt_rate = _FIRST_PROMPT_RATE
        """Tokens per second of prompts."""
        self.base_token_s = _FIRST_TOKEN_S
        """Seconds that a token would take if nothing else ran."""
        self.has_measured = False
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

    def _crowding(self) -> float:
        """How many times longer a token takes with what runs there. It doubles at an eighth of the capacity: a batch
        costs little more than one row while reading the weights takes longest."""
        return 1.0 + min(self.num_active, self.facts.capacity) / max(1.0, self.facts.capacity / 8)

    def note_token_time(self, token_s: float) -> None:
        base_s = token_s / self._crowding()
        self.base_token_s = (
            base_s if not self.has_measured else self.base_token_s + _WEIGHT * (base_s - self.base_token_s)
        )
        self.has_measured = True

    def note_prompt_rate(self, tokens_per_s: float) -> None:
        self.prompt_rate += _WEIGHT * (tokens_per_s - self.prompt_rate)

    def forget_times(self) -> None:
        self.base_token_s, self.has_measured = _FIRST_TOKEN_S, False

    def weigh(self, mean_output_tokens: float) -> None:
        answer_s = mean_output_tokens * self.base_token_s * self._crowding()
        waiting = max(0, self.num_active - self.facts.capacity)
        self.wait_s = answer_s * waiting / max(1, self.facts.capacity)
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
        self._usual: tuple[float, float | None] | None = None
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
        self._models = tuple(dict.fromkeys((*self._models, *member.facts.models)))

    def remove(self, member: Member) -> None:
        del self.members[member]
        del self.by_bit[member.bit]
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

    def usual_token_s(self, now_s: float) -> float | None:
        """The median of those that were measured; None of fewer than three. Computed once for each time."""
        if self._usual is None or self._usual[0] != now_s:
            times_s = sorted(each.base_token_s for each in self.members if each.has_measured)
            self._usual = now_s, times_s[len(times_s) // 2] if len(times_s) >= 3 else None
        return self._usual[1]
