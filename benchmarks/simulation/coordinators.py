"""Simulated coordinators, and a network to them that loses, delays, duplicates and reorders messages.

Registry, announcements, directory and discovery are the real code. The clocks of coordinators and engines run at
different speeds.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace.core.coordinator.announcer import AnnouncedState, Announcements
from headrace.core.coordinator.registry import Registry
from headrace.frontend.client.transport import OnClosed, OnMessage
from headrace.ipc.coordination import ANNOUNCE_EVERY_S, EngineEntry
from headrace.ipc.failure import Failure
from simulation.engines import SimulatedEngine

_MEAN_DELAY_S = 0.001
_LATE_SHARE, _LONGEST_DELAY_S = 0.02, 8.0
"""The share of messages that are late, and their longest delay, which exceeds a lease."""
_LOST_SHARE, _DOUBLED_SHARE = 0.05, 0.05
_SKEW = 0.1
"""Largest relative deviation of a clock's speed."""


class Datagrams:
    """One direction of an unreliable connection: messages may be lost, duplicated and reordered."""

    def __init__(self, chance: random.Random) -> None:
        self._chance, self._loop = chance, asyncio.get_running_loop()
        self.is_cut = False

    def send(self, deliver: Callable[[Any], None], message: Any) -> None:
        if self.is_cut or self._chance.random() < _LOST_SHARE:
            return
        for _ in range(1 + (self._chance.random() < _DOUBLED_SHARE)):
            is_late = self._chance.random() < _LATE_SHARE
            delay_s = self._chance.uniform(0.0, _LONGEST_DELAY_S) if is_late else 0.0
            self._loop.call_later(delay_s + self._chance.expovariate(1 / _MEAN_DELAY_S), deliver, message)


class SimulatedCoordinator:
    """A coordinator that can die and start again, with an empty registry. `name` is its address."""

    def __init__(self, name: str, chance: random.Random) -> None:
        self.name, self._chance, self._loop = name, chance, asyncio.get_running_loop()
        self._speed = 1.0 + chance.uniform(-_SKEW, _SKEW)
        self._peers: dict[bytes, Callable[[Any], None]] = {}
        self.registry: Registry | None = None
        self.up_since_s = float("inf")
        self._life = 0
        self.start()

    def start(self) -> None:
        if self.registry is not None:
            return
        self.registry = Registry(f"{self._chance.getrandbits(64):x}")
        self.up_since_s = self._loop.time()
        self._life += 1
        self._turn(self._life)

    def die(self) -> None:
        self.registry, self.up_since_s = None, float("inf")
        self._peers.clear()

    def receive(self, peer: bytes, answer: Callable[[Any], None], message: Any) -> None:
        """Handles a message of a peer. answer: sends a message to that peer."""
        if self.registry is None:
            return
        self._peers[peer] = answer
        self._send(self.registry.receive(peer, message, self._now_s))
        self._send(self.registry.tick(self._now_s))

    @property
    def _now_s(self) -> float:
        return self._loop.time() * self._speed

    def _turn(self, life: int) -> None:
        if self.registry is None or life != self._life:
            return
        self._send(self.registry.tick(self._now_s))
        self._loop.call_later(max(0.001, self.registry.due_s - self._now_s) / self._speed, self._turn, life)

    def _send(self, outgoing: Sequence[Any]) -> None:
        for each in outgoing:
            for peer in each.peers:
                self._peers[peer](each.message)


class Announcing:
    """The thread of an engine that announces it to coordinators while the engine is up."""

    def __init__(
        self, engine: SimulatedEngine, rank: int, coordinators: Sequence[SimulatedCoordinator], chance: random.Random
    ) -> None:
        self.engine, self._rank, self._coordinators, self._chance = engine, rank, coordinators, chance
        self._loop = asyncio.get_running_loop()
        self.ways = [Datagrams(chance) for _ in coordinators]
        self._every_s = ANNOUNCE_EVERY_S * (1.0 + chance.uniform(-_SKEW, _SKEW))
        self._said: Announcements | None = None
        engine.on_start = self.start
        self.start()

    def start(self) -> None:
        engine = self.engine
        entry = EngineEntry(
            address=engine.name,
            life=f"{self._chance.getrandbits(64):x}",
            model="simulated",
            served_model_names=("simulated",),
            rank=self._rank,
            host="host",
            pid=1,
            max_num_seqs=engine.shape.max_num_seqs,
            max_waiting_requests=engine.shape.max_waiting,
            block_size=engine.shape.block_size,
        )
        self._said = Announcements(entry)
        self._loop.call_later(self._chance.uniform(0.0, self._every_s), self._turn, self._said)

    def leave(self) -> None:
        """Announces that the engine has ended in order."""
        said, self._said = self._said, None
        if said is not None:
            self._send(said.last())

    def _turn(self, said: Announcements) -> None:
        if said is not self._said or not self.engine.listens:
            return
        if not self.engine.is_frozen:
            self._send(said.next(AnnouncedState(self.engine.load, is_draining=self.engine.is_draining)))
        self._loop.call_later(self._every_s, self._turn, said)

    def _send(self, message: Any) -> None:
        for coordinator, way in zip(self._coordinators, self.ways, strict=True):
            way.send(functools.partial(coordinator.receive, self.engine.name.encode(), _unanswered), message)


def _unanswered(message: Any) -> None:
    """Ignores a coordinator's answer: engines get answers only to announcements that are refused."""


class FollowerLink:
    """A frontend's connection to a coordinator; the Transport that its `Discovery` uses."""

    is_full = False

    def __init__(self, coordinator: SimulatedCoordinator, peer: str, chance: random.Random) -> None:
        self.address, self._coordinator, self._peer = coordinator.name, coordinator, peer.encode()
        self._up, self._down = Datagrams(chance), Datagrams(chance)
        self._chance, self._loop = chance, asyncio.get_running_loop()
        self._on_message: OnMessage | None = None

    def open(self, on_message: OnMessage, on_closed: OnClosed) -> None:
        self._on_message = on_message
        if self._coordinator.registry is None:
            failure = Failure(message=f"no coordinator listens at {self.address}")
            self._loop.call_later(_MEAN_DELAY_S, on_closed, failure)

    def send(self, message: Any) -> None:
        self._up.send(lambda sent: self._coordinator.receive(self._peer, self._answer, sent), message)

    def close(self) -> None:
        self._on_message = None

    def _answer(self, message: msgspec.Struct) -> None:
        self._down.send(self._arrive, message)

    def _arrive(self, message: Any) -> None:
        if self._on_message is not None:
            self._on_message(message)
