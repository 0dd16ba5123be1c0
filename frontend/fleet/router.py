"""Chooses the engine for each request, and where it continues if that engine is lost: a state machine without I/O.

It has no socket, clock or thread: time is passed with each call (seconds of any one clock), randomness with the
constructor, and decisions are returned. `EnginePool` (pool.py) carries them out; so can a simulation.

           place                      first token              end
    new ----------> assigned to a member ------------ ... ------------> forgotten
     |                ^        | lost, suspected, slow, refused
     |     placed     |        v
     +------------> held     Move to another member, Wait (held), or Fail
       no member now

The cost of a member for a request is the time that the request would take there: the prompt tokens queued before it,
its own prompt without what the member's prefix cache has of it, and its tokens at the member's speed with one more
request. All times derive from measured rates, so members of different speed can be compared.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from headrace.frontend.fleet.decisions import (
    AllFullError,
    Decision,
    Fail,
    Move,
    NoEngineError,
    Progress,
    RoutedRequest,
    RouterOptions,
    Wait,
)
from headrace.frontend.fleet.members import EngineFacts, Group, Member
from headrace.frontend.fleet.migrations import MigrationAllowance, crash_culprits, crash_suspects, quarantined, used_up
from headrace.frontend.fleet.prefixes import EngineBits, PrefixIndex
from headrace.ipc.failure import PEER_LOST, SHUT_DOWN, Failure
from headrace.ipc.prefix_names import chunk_tokens

MOST_SESSIONS = 1 << 14
_LOAD_HOLDS_S, _LOAD_ELSEWHERE_HOLDS_S = 3.0, 60.0
"""How long a report of an engine's requests of other frontends is valid. An engine that runs requests of this frontend
reports each second; coordinators report only changes."""
_HOLDERS_LOOKED_AT = 3
"""For each prefix length, how many engines that cache it are considered on each side of a random one."""
KNOWN_WITHIN_S = 0.1
"""Ends of processes that end together on other hosts are known within this time of each other."""

CHOICES = ("only", "rank", "session", "prefix", "load")
"""Why an engine was chosen: it is the only one; the request names its rank; it ran the session's last request; it has a
prefix of the prompt; it has the lowest cost."""
MIGRATIONS = ("died", "silent", "stalled", "slow", "refused", "held")
PROMPT_TOKENS = ("all", "expected", "cached")


class Router:
    """All engines and all requests of one frontend."""

    def __init__(self, options: RouterOptions, chance: random.Random) -> None:
        self.options = options
        self._chance = chance
        self.members: dict[str, Member] = {}
        self._groups: dict[str, Group] = {}  # by version: engines between which a request may move
        self.held: dict[RoutedRequest, str] = {}
        """Requests without an engine, each with the reason that its move counts under."""
        self._places_held_from_s = 0.0
        self.watched: dict[Member, None] = {}
        """The members that a tick checks: with requests, unhealthy, or temporarily full."""
        self._capacity = 0  # of all members
        self._bits = EngineBits()
        self._arrivals = itertools.count()
        self._sessions: OrderedDict[str, tuple[str, int]] = OrderedDict()  # engine, and tokens of the last prompt
        self.prefixes = PrefixIndex(options.most_prefixes)
        self._mean_output_tokens = options.mean_output_tokens
        self._allowance = MigrationAllowance(options.migrations_per_capacity_s)
        self._last_tick_s: float | None = None
        self.choices: Counter[str] = Counter()
        """By reason (CHOICES)."""
        self.migrations: Counter[str] = Counter()
        """By reason (MIGRATIONS)."""
        self.num_quarantined = 0
        self.num_expected_cached_tokens = self.num_cached_tokens = self.num_prompt_tokens = 0

    def counts(self) -> dict[str, Mapping[str, int]]:
        """All counters, by kind and reason. A reason that has not occurred yet may be missing."""
        return {
            "choices": self.choices,
            "migrations": self.migrations,
            "quarantined": {"died": self.num_quarantined},
            "prompt_tokens": {
                "all": self.num_prompt_tokens,
                "expected": self.num_expected_cached_tokens,
                "cached": self.num_cached_tokens,
            },
        }

    # --- membership ---------------------------------------------------------------------------------------------

    def join(self, facts: EngineFacts, now_s: float) -> list[Decision]:
        """Adds an engine that is new or has returned; requests that wait may be assigned to it."""
        if facts.name in self.members:
            self.leave(facts.name, Failure(message="it came back"), now_s, is_awaited=True)
        member = Member(facts, self._bits.take(), now_s)
        self._capacity += facts.capacity
        group = self._groups.setdefault(facts.version, Group(facts.version))
        self.members[facts.name] = member
        group.add(member)
        group.failure = None
        hopeless: list[Decision] = []
        for each in self._groups.values():
            if facts.name in each.awaited:
                each.awaited.discard(facts.name)
                hopeless += self._fail_hopeless(each)  # if it returned with other weights
        self._update(member, now_s)
        return hopeless + self._place_held(now_s)

    def leave(
        self, name: str, failure: Failure, now_s: float, *, is_awaited: bool = False, is_elsewhere: bool = False
    ) -> list[Decision]:
        """Removes a lost engine, and decides about its requests. is_awaited: it is being restarted. is_elsewhere: on
        another host, where others may have ended with it whose end is not known yet; its requests wait until it is."""
        if is_elsewhere:
            self._places_held_from_s = now_s + KNOWN_WITHIN_S
        member = self.members.pop(name)
        member.is_gone = True
        self._capacity -= member.facts.capacity
        self.watched.pop(member, None)
        group = self._groups[member.facts.version]
        group.remove(member)
        if failure.type != PEER_LOST or group.failure is None:  # of engines that fail together, the first is the cause
            group.failure = failure
        if is_awaited:
            group.awaited.add(name)
        for bit in self.prefixes.retire(member.bit):
            self._bits.give_back(bit)
        running = list(member.requests)
        guilty: set[RoutedRequest] = set()
        # Of engines that fail together only the first counts: requests of the others caused nothing.
        if failure.type != PEER_LOST:
            for request in running:
                request.note_death()
            guilty = crash_culprits(running)
        decisions: list[Decision] = []
        for request in running:
            if request in guilty:
                self.num_quarantined += 1
                decisions.append(self._fail(request, member, quarantined(request, failure)))
            else:
                decisions.append(self._part(request, member, "died", now_s, failure))
        return decisions + self._fail_hopeless(group)

    def give_up(self, name: str, failure: Failure) -> list[Decision]:
        """An awaited engine will not return: requests that no other can run fail."""
        decisions: list[Decision] = []
        for group in self._groups.values():
            if name in group.awaited:
                group.awaited.discard(name)
                group.failure = failure
                decisions += self._fail_hopeless(group)
        return decisions

    def _fail_hopeless(self, group: Group) -> list[Decision]:
        if group.members or group.awaited or group.failure is None:
            return []
        # Requests without tokens may start on another version.
        others = {model for each in self._groups.values() if each.members or each.awaited for model in each.models}
        waiting = [
            each for each in self.held if each.version == group.version and (each.has_begun or each.model not in others)
        ]
        return [self._fail(each, None, group.failure) for each in waiting]

    def drain(self, name: str, now_s: float) -> None:
        """The engine accepts no new requests. Its requests finish there."""
        member = self.members[name]
        member.is_draining = True
        self._update(member, now_s)

    def change_version(self, name: str, version: str, weights: str, now_s: float) -> list[Decision]:
        """The engine has loaded other weights on request: its requests continue with them, there and on engines of the
        same version. version, weights: its new `EngineFacts`."""
        member = self.members[name]
        former = self._groups[member.facts.version]
        former.remove(member)
        member.facts = msgspec.structs.replace(member.facts, version=version, weights=weights)
        self._groups.setdefault(version, Group(version)).add(member)
        self.prefixes.forget(member.bit)
        for request in member.requests:
            request.version = version
        self._update(member, now_s)
        return self._fail_hopeless(former) + self._place_held(now_s)

    def heard(self, name: str, now_s: float) -> None:
        """A message arrived from the engine at this time."""
        member = self.members.get(name)
        if member is not None:
            member.heard_s = max(member.heard_s, now_s)

    def worked(self, name: str, worked_s: float) -> None:
        """The engine's process, on this host, was found at work at this time."""
        member = self.members.get(name)
        if member is not None:
            member.worked_s = max(member.worked_s, worked_s)

    def load(self, name: str, num_running: int, num_waiting: int, now_s: float, *, is_paused: bool = False) -> None:
        """The engine reports the number of its requests, of all its clients."""
        member = self.members.get(name)
        if member is not None:
            member.note_load(num_running + num_waiting, now_s + _LOAD_HOLDS_S)
            member.is_paused = is_paused
            self.watched[member] = None
            member.heard_s = max(member.heard_s, now_s)
            self._update(member, now_s)

    def load_elsewhere(
        self, name: str, num_running: int, num_waiting: int, now_s: float, *, is_paused: bool = False
    ) -> None:
        """The same as reported by a coordinator, which does not show that the engine can be reached from here."""
        member = self.members.get(name)
        if member is None or member.requests:
            return
        had, member.is_paused = member.requests_elsewhere, is_paused
        member.note_load(num_running + num_waiting, now_s + _LOAD_ELSEWHERE_HOLDS_S)
        if member.requests_elsewhere != had:  # a second coordinator repeats the reports of the first
            self._update(member, now_s)

    # --- requests -----------------------------------------------------------------------------------------------

    def place(self, request: RoutedRequest, now_s: float) -> Member:
        """Assigns a new request to an engine, which is returned.

        Raises NoEngineError and AllFullError.
        """
        request._arrival, request.placed_s = next(self._arrivals), now_s
        member, reason = self._choose(request, now_s, is_new=True)
        self.choices[reason] += 1
        self._board(request, member, now_s)
        return member

    def end(self, request: RoutedRequest, now_s: float) -> None:
        """The request has ended, successfully or not."""
        self.held.pop(request, None)
        member, work = request.member, request.work
        if member is not None:
            member.note_end(request, now_s)
            self._disembark(request, now_s)
        num_tokens = work.num_tokens
        self._mean_output_tokens += 0.02 * (num_tokens / request.num_outputs - self._mean_output_tokens)
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_expected_cached_tokens += request.expected_cached_tokens
        self.num_cached_tokens += work.num_cached_tokens or 0
        # The work refers to the request too, and the garbage collector runs too rarely to free such cycles soon.
        request.work = Progress(num_tokens, work.first_token_s, work.num_cached_tokens)

    def refused(self, request: RoutedRequest, failure: Failure, now_s: float) -> Decision:
        """Its engine refuses the request, so another may take it. If the engine is shutting down, and others are
        awaited or full, the request waits, as it would if it had been running there."""
        member = request.member
        assert member is not None, "a request is refused by the engine that it was sent to"
        request.refusals.add(member)
        is_ending = failure.type == SHUT_DOWN
        member.is_draining |= is_ending
        if failure.retry_after_s > 0:
            member.full_until_s = now_s + min(failure.retry_after_s, 1.0)
            self.watched[member] = None
        self._update(member, now_s)
        self._disembark(request, now_s)
        try:
            target, _ = self._choose(request, now_s)
        except (NoEngineError, AllFullError):
            group = self._groups[member.facts.version]
            if is_ending and (group.awaited or any(not each.is_draining for each in group.members)):
                request.rank = None
                request.refusals.clear()
                self.held[request] = "held"
                return Wait(request, member, "refused")
            return self._fail(request, member, failure)
        self._board(request, target, now_s)
        self.migrations["refused"] += 1
        return Move(request, member, target, "refused")

    def stored(self, name: str, keys: Iterable[int]) -> None:
        """The engine reports that it caches the prefixes of these names (ipc/prefix_names.py)."""
        if (member := self.members.get(name)) is not None:
            self.prefixes.add(keys, member.bit)

    def evicted(self, name: str, keys: Iterable[int]) -> None:
        if (member := self.members.get(name)) is not None:
            self.prefixes.discard(keys, member.bit)

    # --- time ---------------------------------------------------------------------------------------------------

    def wake(self, now_s: float) -> None:
        """Call before the first request after a time without requests, and so without ticks: it was no pause."""
        self._allowance.refill(now_s - (self._last_tick_s if self._last_tick_s is not None else now_s), self._capacity)
        self._last_tick_s = now_s
        self._forget(now_s)

    def tick(self, now_s: float) -> list[Decision]:
        """Call a few times a second while there are requests: measures, checks engines, assigns waiting requests."""
        since_s = now_s - (self._last_tick_s if self._last_tick_s is not None else now_s)
        self._last_tick_s = now_s
        if since_s > self.options.own_pause_s:
            for member in self.watched:
                member.busy_since_s = now_s
                member.progress_s = now_s
            return []
        self._allowance.refill(since_s, self._capacity)
        decisions: list[Decision] = []
        self._measure(now_s)
        self._forget(now_s)
        for member in list(self.watched):
            reason = self._what_ails(member, now_s)
            if reason != member.unhealthy_reason:
                member.unhealthy_reason = reason
                self._update(member, now_s)
            if reason:
                decisions += self._move_off(member, reason, now_s)
            elif member.full_until_s and member.full_until_s <= now_s:
                member.full_until_s = 0.0
                self._update(member, now_s)
            if not (member.requests or member.requests_elsewhere or member.unhealthy_reason or member.full_until_s):
                self.watched.pop(member, None)
        return decisions + self._place_held(now_s)

    def _measure(self, now_s: float) -> None:
        """Measures the progress of the watched members, and updates their speeds, paces and costs."""
        measured: dict[Group, list[Member]] = {}
        for member in self.watched:
            if member.measure(now_s):
                measured.setdefault(self._groups[member.facts.version], []).append(member)
        weighed = {member: None for group, news in measured.items() for member in group.learn(news, now_s)}
        for member in weighed | self.watched:
            self._update(member, now_s)

    def _forget(self, now_s: float) -> None:
        """Updates what becomes untrue with time: the reports about engines without requests, and their speeds."""
        changed = [member for member in self.watched if member.drop_report(now_s)]
        for member in itertools.chain(changed, *(group.age(now_s) for group in self._groups.values())):
            self._update(member, now_s)

    def _what_ails(self, member: Member, now_s: float) -> str:
        """Why the engine should get no requests now; "" if it may."""
        options = self.options
        if member.requests:
            if member.silent_s(now_s) > self._suspect_after_s(member, now_s):
                return "silent"
            if not member.is_paused and now_s - max(member.progress_s, member.busy_since_s) > options.stalled_after_s:
                return "stalled"
        elif member.unhealthy_reason in ("silent", "stalled"):
            return member.unhealthy_reason if member.heard_s <= member.unhealthy_since_s else ""
        if member.unhealthy_reason == "slow":
            if now_s - member.unhealthy_since_s < options.slow_for_s:
                return "slow"
            member.forget_times()
            return ""
        if not member.requests:
            return ""
        if self._groups[member.facts.version].is_slow(member, options.slow_factor):
            member.unhealthy_since_s = now_s
            return "slow"
        return ""

    def _suspect_after_s(self, member: Member, now_s: float) -> float:
        options = self.options
        is_working = now_s - member.worked_s <= options.suspect_after_s
        return options.suspect_after_s * (options.working_suspect_factor if is_working else 1.0)

    # --- choice -------------------------------------------------------------------------------------------------

    def _choose(self, request: RoutedRequest, now_s: float, *, is_new: bool = False) -> tuple[Member, str]:
        """Raises NoEngineError and AllFullError."""
        group = self._group_of(request)
        if request.is_suspect:
            return self._alone(group, request, now_s), "load"
        if request.rank is not None and not request.has_begun:
            return self._of_rank(request.rank, request), "rank"
        if len(group.members) == 1:
            (only,) = group.members
            if only.is_usable(now_s) and only not in request.refusals:
                return only, "only"
        best = group.least_loaded(now_s, request.refusals)
        if best is None:
            for each in self._groups.values():
                each.look_again(now_s)
            group = self._group_of(request)
            best = group.least_loaded(now_s, request.refusals)
        if best is None and is_new:  # better than failing: a suspected engine may be alive
            best = group.least_suspected(now_s, request.refusals)
        if best is None:
            raise self._why_none(group, now_s)
        chunk = chunk_tokens(best.facts.block_size)
        names = request.names(best.facts.weights, chunk) if best.facts.caches_prefixes else []
        masks = self.prefixes.holders(names, group.usable) if names else []
        best_cached = _cached_chunks(masks, best.bit) * chunk
        best_s = best.cost_s + (request.num_prompt_tokens - best_cached) * best.cost_per_token_s
        reason = "prefix" if best_cached else "load"
        for member, num_tokens in self._candidates(request, group, masks, chunk):
            if member is best or not member.is_usable(now_s) or member in request.refusals:
                continue
            cost_s = member.cost_s + (request.num_prompt_tokens - num_tokens) * member.cost_per_token_s
            if cost_s < best_s:
                best, best_s, best_cached, reason = member, cost_s, num_tokens, "prefix"
        if request.session and self._sessions.get(request.session, ("",))[0] == best.facts.name:
            reason = "session"
        request.expected_cached_tokens = best_cached
        return best, reason

    def _alone(self, group: Group, request: RoutedRequest, now_s: float) -> Member:
        """The engine for a request that may be what kills engines: one without another such request, so that the next
        death shows which it was. Raises NoEngineError."""
        usable = [
            each
            for each in group.members
            if each.is_usable(now_s) and each not in request.refusals and not crash_suspects(each.requests)
        ]
        if not usable:
            raise NoEngineError("every engine runs a request that is suspected of having killed other engines")
        request.expected_cached_tokens = 0
        return min(usable, key=lambda each: each.cost_s)

    def _group_of(self, request: RoutedRequest) -> Group:
        """Raises NoEngineError."""
        if request.version is not None and request.has_begun:
            return self._groups[request.version]
        serving = [group for group in self._groups.values() if group.serves(request.model)]
        if not serving:
            raise NoEngineError(f"no engine serves {request.model!r:.200}")
        if len(serving) == 1:
            return serving[0]
        # Of several versions one that accepts requests, preferably the one with the lower load.
        return min(serving, key=lambda group: (not group.usable, group.load()))

    def _candidates(
        self, request: RoutedRequest, group: Group, masks: list[int], chunk: int
    ) -> Iterator[tuple[Member, int]]:
        """Members that may cache a prefix of the prompt, with its number of tokens."""
        known = self._sessions.get(request.session) if request.session else None
        if known is not None and (member := self.members.get(known[0])) is not None and member in group.members:
            # A session continues: its last prompt is assumed to be cached, if the engine has a prefix cache.
            said = min(known[1], request.num_prompt_tokens) if member.facts.caches_prefixes else 0
            held = max(_cached_chunks(masks, member.bit) * chunk, said)
            yield member, held
        seen = 0
        for length in (len(masks), (len(masks) + 1) // 2, 1) if masks else ():
            mask = masks[length - 1] & ~seen
            if not mask:
                continue
            seen |= mask
            start = self._chance.randrange(mask.bit_length())  # a random start spreads requests over many holders
            for part, shift in ((mask >> start, start), (mask & ((1 << start) - 1), 0)):
                for _ in range(_HOLDERS_LOOKED_AT):
                    if not part:
                        break
                    lowest = part & -part
                    part ^= lowest
                    yield group.by_bit[lowest << shift], length * chunk

    def _of_rank(self, rank: int, request: RoutedRequest) -> Member:  # of any version
        serving = [each for each in self.members.values() if request.model in each.facts.models]
        for member in serving:
            if member.facts.rank == rank and member not in request.refusals:
                return member
        ranks = ", ".join(map(str, sorted(member.facts.rank for member in serving))) or "none"
        raise NoEngineError(f"no engine of data_parallel_rank {rank} has {request.model!r:.200}; there are {ranks}")

    @staticmethod
    def _why_none(group: Group, now_s: float) -> Exception:
        full = [each for each in group.members if each.is_full(now_s)]
        full = [each for each in full if not each.unhealthy_reason and not each.is_draining]
        if full:
            return AllFullError(max(1.0, min(each.wait_s for each in full)))
        return NoEngineError("no engine takes requests now", group.failure)

    # --- moves --------------------------------------------------------------------------------------------------

    def _part(self, request: RoutedRequest, member: Member, reason: str, now_s: float, failure: Failure) -> Decision:
        """Decides about a request that has lost its engine."""
        limit = self.options.max_migrations
        counts = failure.type != PEER_LOST
        if not limit or (counts and request.moves_without_token >= limit):
            return self._fail(request, member, used_up(limit, failure))
        self._disembark(request, now_s)
        if counts:
            request.note_move()
        if now_s < self._places_held_from_s:
            request.rank = None
            self.held[request] = reason
            return Wait(request, member, reason)
        return self._resume(request, member, reason, now_s, failure)

    def _resume(
        self, request: RoutedRequest, source: Member | None, reason: str, now_s: float, failure: Failure
    ) -> Decision:
        request.rank = None
        if self._allowance.take(self._capacity):
            try:
                target, _ = self._choose(request, now_s)
            except (NoEngineError, AllFullError):
                group = self._groups[request.version] if request.version is not None else None
                if group is not None and not group.members and not group.awaited:
                    return self._fail(request, source, group.failure or failure)
            else:
                self._board(request, target, now_s)
                self.migrations[reason] += 1
                return Move(request, source, target, reason)
        self.held[request] = "held"
        return Wait(request, source, reason)

    def _place_held(self, now_s: float) -> list[Decision]:
        """Assigns waiting requests: by priority, then the oldest first."""
        decisions: list[Decision] = []
        if now_s < self._places_held_from_s:
            return decisions
        for request in sorted(self.held, key=lambda each: (each.priority, each._arrival)):
            if not self._allowance.take(self._capacity):
                break
            try:
                target, _ = self._choose(request, now_s)
            except (NoEngineError, AllFullError):
                continue
            reason = self.held.pop(request)
            self._board(request, target, now_s)
            self.migrations[reason] += 1
            decisions.append(Move(request, None, target, reason))
        return decisions

    def _move_off(self, member: Member, reason: str, now_s: float) -> list[Decision]:
        """Moves requests off a live engine. Those without another engine, or without migrations left, stay."""
        decisions: list[Decision] = []
        evidence = member.silent_s(now_s) / self.options.suspect_after_s if reason == "silent" else math.inf
        for request in list(member.requests):
            if evidence <= self.options.again_suspect_factor**request.suspicions_without_token:
                continue
            if request.moves_without_token >= self.options.max_migrations:
                continue
            if not self._can_leave(request, member):
                continue
            if not self._allowance.take(self._capacity):
                break
            self._disembark(request, now_s)
            request.rank = None
            try:
                target, _ = self._choose(request, now_s)
            except (NoEngineError, AllFullError):
                self._board(request, member, now_s)
                break
            request.note_move()
            request.note_suspicion()
            self._board(request, target, now_s)
            self.migrations[reason] += 1
            decisions.append(Move(request, member, target, reason))
        return decisions

    def _can_leave(self, request: RoutedRequest, member: Member) -> bool:
        """Whether another engine may take it: of any version if it has no token yet."""
        if self._groups[member.facts.version].usable & ~member.bit:
            return True
        return not request.has_begun and any(
            group.usable & ~member.bit and group.serves(request.model) for group in self._groups.values()
        )

    def _fail(self, request: RoutedRequest, source: Member | None, failure: Failure) -> Fail:
        if request.member is not None:
            self._leave_board(request)
        self.held.pop(request, None)
        return Fail(request, source, failure)

    # --- assignment to members ----------------------------------------------------------------------------------

    def _board(self, request: RoutedRequest, member: Member, now_s: float) -> None:
        if not member.requests:
            member.busy_since_s = member.progress_s = now_s
            self.watched[member] = None
        member.requests[request] = None
        member.num_outputs += request.num_outputs
        request.member, request.version = member, member.facts.version
        computed = request.num_prompt_tokens + request.work.num_tokens - request.expected_cached_tokens
        request.pending_tokens = max(1, computed)
        request.tokens_seen = request.work.num_tokens
        request.seen_s = math.inf if request.has_begun else None  # its tokens have to be recomputed first
        member.pending_tokens += request.pending_tokens
        if member.facts.caches_prefixes and request.has_names:  # the engine will cache what it computes
            names = request.names(member.facts.weights, chunk_tokens(member.facts.block_size))
            self.prefixes.add(names, member.bit)
        if request.session:
            self._sessions[request.session] = (member.facts.name, request.num_prompt_tokens)
            self._sessions.move_to_end(request.session)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)
        self._update(member, now_s)

    def _leave_board(self, request: RoutedRequest) -> Member:
        member = request.member
        assert member is not None, "a request that is moved has an engine"
        del member.requests[request]
        member.num_outputs -= request.num_outputs
        member.pending_tokens -= request.pending_tokens
        request.pending_tokens, request.member = 0, None
        return member

    def _disembark(self, request: RoutedRequest, now_s: float) -> None:
        self._update(self._leave_board(request), now_s)

    def _update(self, member: Member, now_s: float) -> None:
        """Call when a member's cost has changed, or whether it accepts requests."""
        if not member.is_gone:
            member.weigh(self._mean_output_tokens)
            self._groups[member.facts.version].update(member, now_s)


def _cached_chunks(masks: list[int], bit: int) -> int:
    """How many chunks of the prompt the engine with this bit caches."""
    length = len(masks)
    while length and not masks[length - 1] & bit:
        length -= 1
    return length
