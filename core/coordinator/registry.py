"""The state machine of a coordinator: the engines that it knows and the frontends that follow it. Without I/O.

It has no socket and no clock: each call passes the time (seconds, of any single clock). It knows the engines whose
announcement is still within its lease; after a restart it knows all engines again after one round of announcements.

    Announce --> engine listed until its lease runs out or Withdraw     Members: changes soon, loads once a second
    Follow   --> follower until its lease runs out or Unfollow
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from headrace.ipc.codec import Tensor
from headrace.ipc.coordination import (
    LEASE_S,
    SCHEMA_HASH,
    Announce,
    Denied,
    Ended,
    EngineEntry,
    Follow,
    FromCoordinator,
    Gone,
    Listed,
    Members,
    ToCoordinator,
    Unfollow,
    Withdraw,
)

CHANGES_EVERY_S = 0.05
"""Delay in which changes are collected into one message."""
LOADS_EVERY_S = 1.0
MOST_FORMER = 4096
"""How many ended lives are remembered, so that their late messages are ignored."""

Peer = bytes
Load = tuple[int, int, int]
"""Number of running requests, number of waiting requests, and 1 if the engine is paused, else 0."""


class Outgoing(msgspec.Struct, frozen=True):
    """One message to several peers."""

    peers: tuple[Peer, ...]
    message: FromCoordinator


class _Engine:
    def __init__(self, key: int, announced: Announce) -> None:
        self.key, self.entry = key, announced.entry
        self.number = -1
        self.load: Load = (0, 0, 0)
        self.lease_ends_s = 0.0

    def hear(self, announced: Announce, now_s: float) -> None:
        self.entry, self.number = announced.entry, announced.number
        self.load = (announced.num_running, announced.num_waiting, int(announced.is_paused))
        self.lease_ends_s = now_s + announced.lease_s


class Registry:
    """All engines and all followers of one coordinator."""

    def __init__(self, epoch: str) -> None:
        """`epoch` must be different at each start of a coordinator."""
        self.epoch = epoch
        self.num_changes = 0
        """How often an engine has joined or left."""
        self._engines: dict[str, _Engine] = {}  # by address
        self._former: OrderedDict[tuple[str, str], None] = OrderedDict()  # address and life
        self._followers: dict[Peer, float] = {}  # the end of each one's lease
        self._keys = itertools.count()
        self._number = 0
        self._changed: dict[str, None] = {}  # addresses
        self._gone: dict[tuple[str, str], Gone] = {}
        self._moved_loads: dict[str, None] = {}  # addresses whose load has changed since it was sent
        self._changes_due_s: float | None = None
        self._loads_due_s = 0.0

    @property
    def entries(self) -> list[EngineEntry]:
        return [engine.entry for engine in self._engines.values()]

    @property
    def addresses(self) -> Iterable[str]:
        return self._engines

    def receive(self, peer: Peer, message: ToCoordinator, now_s: float) -> list[Outgoing]:
        """Takes a peer's message. Returns the messages to send at once."""
        if isinstance(message, Announce | Follow) and message.schema_hash != SCHEMA_HASH:
            why = "the coordinator is of another version of Headrace: install the same on all hosts"
            return [Outgoing((peer,), Denied(schema_hash=SCHEMA_HASH, why=why))]
        match message:
            case Announce():
                if self._has_ended(message.entry):
                    return self._say_ended(peer, message.entry)
                self._announced(message, now_s)
            case Withdraw():
                self._end_life(message.address, message.life, now_s)
            case Follow():
                is_new = peer not in self._followers
                self._followers[peer] = now_s + message.lease_s
                if is_new or message.needs_all:
                    return [Outgoing((peer,), self._all())]
            case Unfollow():
                self._followers.pop(peer, None)
        return []

    def lost(self, peer: Peer) -> None:
        """Removes a follower that is gone."""
        self._followers.pop(peer, None)

    def tick(self, now_s: float) -> list[Outgoing]:
        """The messages that are due now. Call it after each `receive`, and at `due_s`."""
        if now_s >= self._loads_due_s:
            self._loads_due_s = now_s + LOADS_EVERY_S
            self._expire(now_s)
            return self._publish()
        if self._changes_due_s is not None and now_s >= self._changes_due_s:
            return self._publish(with_loads=False)
        return []

    @property
    def due_s(self) -> float:
        return self._loads_due_s if self._changes_due_s is None else min(self._loads_due_s, self._changes_due_s)

    # --- engines ------------------------------------------------------------------------------------------------

    def _has_ended(self, entry: EngineEntry) -> bool:
        return (entry.address, entry.life) in self._former

    def _say_ended(self, peer: Peer, entry: EngineEntry) -> list[Outgoing]:
        """What to answer to a life that has ended: it may live on, unless another one has taken its address."""
        if entry.address in self._engines:
            return []
        return [Outgoing((peer,), Ended(address=entry.address, life=entry.life))]

    def _announced(self, message: Announce, now_s: float) -> None:
        entry = message.entry
        engine = self._engines.get(entry.address)
        if engine is not None and engine.entry.life != entry.life:
            self._end_life(entry.address, engine.entry.life, now_s)  # a new life at its address: the old one has ended
            engine = None
        if engine is None:
            engine = self._engines[entry.address] = _Engine(next(self._keys), message)
            self.num_changes += 1
            self._change(entry.address, now_s)
        elif message.number <= engine.number:
            return  # late or duplicated
        elif engine.entry != entry:
            self._change(entry.address, now_s)
        before = engine.load
        engine.hear(message, now_s)
        if engine.load != before:
            self._moved_loads[entry.address] = None

    def _end_life(self, address: str, life: str, now_s: float) -> None:
        self._former[address, life] = None
        if len(self._former) > MOST_FORMER:
            self._former.popitem(last=False)
        engine = self._engines.get(address)
        if engine is not None and engine.entry.life == life:
            self._remove(engine, now_s, withdrew=True)

    def _expire(self, now_s: float) -> None:
        for peer in [peer for peer, ends_s in self._followers.items() if ends_s <= now_s]:
            del self._followers[peer]
        for engine in [each for each in self._engines.values() if each.lease_ends_s <= now_s]:
            self._remove(engine, now_s, withdrew=False)

    def _remove(self, engine: _Engine, now_s: float, *, withdrew: bool) -> None:
        entry = engine.entry
        del self._engines[entry.address]
        self.num_changes += 1
        self._changed.pop(entry.address, None)
        self._moved_loads.pop(entry.address, None)
        self._gone[entry.address, entry.life] = Gone(address=entry.address, life=entry.life, withdrew=withdrew)
        self._note_change(now_s)

    def _change(self, address: str, now_s: float) -> None:
        self._changed[address] = None
        self._moved_loads[address] = None
        self._note_change(now_s)

    def _note_change(self, now_s: float) -> None:
        if self._changes_due_s is None:
            self._changes_due_s = now_s + CHANGES_EVERY_S

    # --- followers ----------------------------------------------------------------------------------------------

    def _publish(self, *, with_loads: bool = True) -> list[Outgoing]:
        """A message with the changes since the last one. An empty one still shows that the coordinator is alive."""
        self._number += 1
        listed = [self._listed(self._engines[address]) for address in self._changed]
        gone, moved = list(self._gone.values()), self._moved_loads if with_loads else dict.fromkeys(self._changed)
        message = self._members(listed, gone, [self._engines[address] for address in moved], is_all=False)
        for address in list(moved):
            self._moved_loads.pop(address, None)
        self._changed.clear()
        self._gone.clear()
        self._changes_due_s = None
        return [Outgoing(tuple(self._followers), message)] if self._followers else []

    def _all(self) -> Members:
        engines = list(self._engines.values())
        return self._members([self._listed(each) for each in engines], [], engines, is_all=True)

    def _members(self, listed: list[Listed], gone: list[Gone], loads: list[_Engine], *, is_all: bool) -> Members:
        numbers: list[int] = []
        for engine in loads:
            numbers += (engine.key, *engine.load)
        return Members(
            epoch=self.epoch,
            number=self._number,
            is_all=is_all,
            lease_s=LEASE_S,
            listed=tuple(listed),
            gone=tuple(gone),
            loads=Tensor.of("int32", numbers),
        )

    @staticmethod
    def _listed(engine: _Engine) -> Listed:
        return Listed(key=engine.key, entry=engine.entry)
