"""The engines that coordinators have reported: a state machine without I/O.

Coordinators know an engine for a lease; a frontend keeps it until a coordinator that has run for long enough no longer
lists it. So nothing is forgotten when the only coordinator dies, or when one restarts and has not received all
announcements yet; and with two coordinators, it is enough that one of them knows the engine.
    Members of coordinator A --+                           Found, Changed: an engine to connect to
                                > listed by any? --------> Left: it withdrew, or nobody has listed it recently
    Members of coordinator B --+
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

import msgspec

from headrace.ipc.coordination import FOLLOW_EVERY_S, SCHEMA_HASH, EngineEntry, Follow, Gone, Members

FORGET_AFTER_S = 10.0
"""How long an engine may be missing from all coordinators' lists before it is forgotten: two leases."""
_MOST_FORMER = 16
"""How many former epochs of a coordinator are remembered, as their messages may arrive late."""
QUIET_AFTER_S = 5.0
"""A coordinator that has been silent for this long is disregarded; it sends a message each second."""


class Found(msgspec.Struct, frozen=True):
    """A new engine, a new life of a known one, or a change of its entry."""

    entry: EngineEntry


class Left(msgspec.Struct, frozen=True):
    """The engine has withdrawn, or no coordinator has listed it for FORGET_AFTER_S."""

    entry: EngineEntry
    withdrew: bool


class Loads(msgspec.Struct, frozen=True):
    """The loads of engines, as one message reports them."""

    of: list[tuple[str, int, int, bool]]
    """Per engine: its address, number of running requests, number of waiting requests, and whether it is paused."""


Change = Found | Left | Loads


class _Coordinator:
    """The state received from one coordinator."""

    def __init__(self) -> None:
        self.epoch, self.former = "", tuple[str, ...]()
        self.number = -1
        self.needs_all = True
        self.heard_s = self.since_s = float("-inf")
        """Times of the last message, and of the first one of the current epoch."""
        self.next_follow_s = float("-inf")
        self.lease_s = 0.0
        self.listed: dict[str, EngineEntry] = {}
        self.address_of: dict[int, str] = {}

    def forget(self, epoch: str, now_s: float) -> None:
        """Starts a new epoch: the coordinator is another one or was restarted, so its former state is discarded."""
        self.former = (*self.former[-_MOST_FORMER:], self.epoch)
        self.epoch, self.number, self.needs_all, self.since_s = epoch, -1, True, now_s
        self.listed, self.address_of = {}, {}

    def knows_all(self, now_s: float) -> bool:
        """It is reachable, and has run for long enough to have received all announcements."""
        return not self.needs_all and now_s - self.heard_s < QUIET_AFTER_S and now_s - self.since_s > self.lease_s


class Directory:
    """All known engines, of all coordinators that the frontend subscribes to."""

    def __init__(self, coordinators: Sequence[str]) -> None:
        """coordinators: their addresses."""
        self._coordinators = {address: _Coordinator() for address in coordinators}
        self._known: dict[str, EngineEntry] = {}  # by address
        self._unlisted_since_s: dict[str, float] = {}

    @property
    def entries(self) -> list[EngineEntry]:
        return list(self._known.values())

    def heard_all(self, now_s: float) -> bool:
        """Whether a reachable coordinator has sent its complete list."""
        return any(not each.needs_all and now_s - each.heard_s < QUIET_AFTER_S for each in self._coordinators.values())

    def take(self, coordinator: str, members: Members, now_s: float) -> Iterator[Change]:
        """Handles a coordinator's message. Late and duplicate ones are ignored; after a gap it requests all again."""
        said = self._coordinators[coordinator]
        if members.epoch != said.epoch:
            if members.epoch in said.former:
                return  # late
            said.forget(members.epoch, now_s)
        said.heard_s, said.lease_s = now_s, members.lease_s
        if members.number < said.number or (members.number == said.number and not members.is_all):
            return
        if members.is_all:
            said.listed = {}
            said.address_of = {}
            said.needs_all = False
        elif members.number > said.number + 1:
            said.needs_all, said.next_follow_s = True, now_s
        said.number = members.number
        for gone in members.gone:
            yield from self._gone(said, gone)
        for each in members.listed:
            yield from self._list(said, each.key, each.entry)
        if len(members.loads):
            yield Loads(self._loads(said, members.loads.tolist()))

    def tick(self, now_s: float) -> Iterator[Change]:
        """Call about once a second."""
        speaking = [each for each in self._coordinators.values() if now_s - each.heard_s < QUIET_AFTER_S]
        if not any(each.knows_all(now_s) for each in speaking):
            self._unlisted_since_s.clear()  # no coordinator can tell that an engine is gone
            return
        unlisted: Set[str] = self._known.keys()
        for each in speaking:
            unlisted = unlisted - each.listed.keys()
        for address in self._unlisted_since_s.keys() - unlisted:
            del self._unlisted_since_s[address]
        for address in [each for each in self._known if each in unlisted] if unlisted else ():
            if now_s - self._unlisted_since_s.setdefault(address, now_s) > FORGET_AFTER_S:
                yield self._forget(address, withdrew=False)

    def follow(self, now_s: float) -> Iterator[tuple[str, Follow]]:
        """The messages to send now, with the coordinators' addresses. Call about once a second, and after `take`."""
        for address, said in self._coordinators.items():
            if now_s >= said.next_follow_s:
                said.next_follow_s = now_s + FOLLOW_EVERY_S
                yield address, Follow(schema_hash=SCHEMA_HASH, needs_all=said.needs_all)

    def lost(self, coordinator: str) -> None:
        """The connection to a coordinator is lost, so messages may be missing."""
        said = self._coordinators[coordinator]
        said.needs_all, said.next_follow_s = True, float("-inf")

    # --- engines ------------------------------------------------------------------------------------------------

    def _list(self, said: _Coordinator, key: int, entry: EngineEntry) -> Iterator[Change]:
        said.listed[entry.address], said.address_of[key] = entry, entry.address
        known = self._known.get(entry.address)
        if known == entry or (known is not None and known.life == entry.life and known.is_draining):
            return  # it is draining, and this coordinator may not know that yet
        self._known[entry.address] = entry
        yield Found(entry)

    def _gone(self, said: _Coordinator, gone: Gone) -> Iterator[Change]:
        listed, known = said.listed.get(gone.address), self._known.get(gone.address)
        if listed is not None and listed.life == gone.life:
            del said.listed[gone.address]
        if gone.withdrew and known is not None and known.life == gone.life:
            yield self._forget(gone.address, withdrew=True)

    def _forget(self, address: str, *, withdrew: bool) -> Left:
        self._unlisted_since_s.pop(address, None)
        return Left(self._known.pop(address), withdrew)

    @staticmethod
    def _loads(said: _Coordinator, numbers: list[int]) -> list[tuple[str, int, int, bool]]:
        address_of, columns = said.address_of, (numbers[each::4] for each in range(4))
        return [
            (address_of[key], num_running, num_waiting, bool(is_paused))
            for key, num_running, num_waiting, is_paused in zip(*columns, strict=False)
            if key in address_of
        ]
