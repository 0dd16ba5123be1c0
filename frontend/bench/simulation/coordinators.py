"""Coordinators of a simulation, and a network to them that loses, delays, doubles and reorders what it carries.

The registry, the engines' announcements, the frontends' directory and what they do with it are the real ones; time
passes faster or slower for each of them.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from headrace.core.coordinator.announcer import Announcements, State
from headrace.core.coordinator.registry import Registry
from headrace.frontend.bench.simulation.engines import SimulatedEngine
from headrace.frontend.client.transport import OnClosed, OnMessage
from headrace.ipc.coordination import ANNOUNCE_EVERY_S, EngineEntry
from headrace.ipc.failure import Failure

_MEAN_DELAY_S = 0.001
_LATE_SHARE, _LONGEST_DELAY_S = 0.02, 8.0
"""Of messages that come late, some after a lease has run out, and how late."""
_LOST_SHARE, _DOUBLED_SHARE = 0.05, 0.05
_SKEW = 0.1
"""By how much clocks run faster or slower."""


class Datagrams:
    """One direction: each message comes never, once or twice, sooner or later than those before it."""

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
    """`name` is its address. It is up or down, and knows nothing each time that it starts."""

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
        """answer: how the peer is reached."""
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
    """An engine's thread that announces it, for as long as the engine is up."""

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
        """The engine has ended in order, and says so."""
        said, self._said = self._said, None
        if said is not None:
            self._send(said.last())

    def _turn(self, said: Announcements) -> None:
        if said is not self._said or not self.engine.listens:
            return
        if not self.engine.is_frozen:
            self._send(said.next(State(self.engine.load, is_draining=self.engine.is_draining)))
        self._loop.call_later(self._every_s, self._turn, said)

    def _send(self, message: Any) -> None:
        for coordinator, way in zip(self._coordinators, self.ways, strict=True):
            way.send(functools.partial(coordinator.receive, self.engine.name.encode(), _unanswered), message)


def _unanswered(message: Any) -> None:
    """Engines are told only what cannot be taken."""


class FollowerLink:
    """A frontend's way to a coordinator and back; to its `Discovery` it is a transport."""

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
