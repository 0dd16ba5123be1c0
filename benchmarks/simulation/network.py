"""Simulated connections between frontends and engines: ordered, delayed, and possibly cut in one or both directions.

As with TCP, an open connection neither loses nor duplicates messages: a direction that is cut holds them back, and a
connection that is still cut after the peer time-out is closed. Messages under way when a connection ends may be lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

from headrace.frontend.client.transport import CONNECTION_LOST, OnClosed, OnMessage
from headrace.ipc.failure import Failure
from headrace.ipc.messages import ClientMessage, CoreMessage
from simulation.virtual_time import virtual_loop

MEAN_DELAY_S = 0.0005
PEER_TIMEOUT_S = 60.0


class Listener(Protocol):
    """The engine's side of connections."""

    name: str

    @property
    def listens(self) -> bool: ...

    def opened(self, link: Link) -> None: ...

    def received(self, link: Link, message: ClientMessage) -> None: ...

    def closed(self, link: Link) -> None: ...


class _Way:
    """One direction of a connection."""

    __slots__ = ("_chance", "_deliver", "_held", "_last_s", "_loop", "delay_s", "is_cut")

    def __init__(self, chance: random.Random, deliver: Callable[[Any], None]) -> None:
        self._chance, self._deliver = chance, deliver
        self._loop = virtual_loop()
        self._last_s = 0.0
        self._held: list[Any] | None = None  # messages sent while the direction is cut
        self.is_cut = False
        self.delay_s = MEAN_DELAY_S

    def send(self, message: Any) -> None:
        if self.is_cut:
            self._held = self._held or []
            self._held.append(message)
            return
        self._last_s = max(self._last_s, self._loop.time() + self._chance.expovariate(1 / self.delay_s))
        self._loop.post(self._last_s, self._deliver, message)

    def cut(self) -> None:
        self.is_cut = True

    def heal(self) -> None:
        self.is_cut = False
        held, self._held = self._held, None
        for message in held or ():
            self.send(message)


class Link:
    """A frontend's connection to an engine; the Transport that its CoreClient uses."""

    __slots__ = ("_chance", "_listener", "_loop", "_on_closed", "_on_message", "address", "down", "is_open", "up")
    is_full = False

    def __init__(self, listener: Listener, chance: random.Random) -> None:
        self.address, self._listener, self._chance = listener.name, listener, chance
        self._loop = virtual_loop()
        self.up = _Way(chance, self._arrive_up)
        self.down = _Way(chance, self._arrive_down)
        self._on_message: OnMessage | None = None
        self._on_closed: OnClosed | None = None
        self.is_open = False

    def open(self, on_message: OnMessage, on_closed: OnClosed) -> None:
        self._on_message, self._on_closed = on_message, on_closed
        if self._listener.listens:
            self.is_open = True
            self._listener.opened(self)
        else:
            self._loop.call_later(MEAN_DELAY_S, self.lose, "nobody listens there")

    def send(self, message: ClientMessage) -> None:
        if self.is_open:
            self.up.send(message)

    def push(self, message: CoreMessage) -> None:
        """Sends a message from the engine to the frontend."""
        if self.is_open:
            self.down.send(message)

    def close(self) -> None:
        """Closes the connection from the frontend's side."""
        self._on_message = self._on_closed = None
        if self.is_open:
            self.is_open = False
            self._listener.closed(self)

    def lose(self, why: str) -> None:
        """Ends the connection, and reports that to both sides. Messages that are still under way are lost."""
        was_open, self.is_open = self.is_open, False
        if was_open:
            self._listener.closed(self)
        if (on_closed := self._on_closed) is not None:
            self._on_message = self._on_closed = None
            on_closed(Failure(message=f"{self.address} is gone: {why}", type=CONNECTION_LOST, phase="connection"))

    def cut(self, *, up: bool, down: bool) -> None:
        """Holds messages back in one or both directions, until `heal` or the peer time-out."""
        for way, is_cut in ((self.up, up), (self.down, down)):
            if is_cut:
                way.cut()
        self._loop.call_later(PEER_TIMEOUT_S, self._give_up)

    def heal(self) -> None:
        self.up.heal()
        self.down.heal()

    @property
    def is_cut(self) -> bool:
        return self.up.is_cut or self.down.is_cut

    def _give_up(self) -> None:
        if self.is_cut:
            self.lose("nothing was heard of it for the peer time-out")

    def _arrive_up(self, message: ClientMessage) -> None:
        if self.is_open:
            self._listener.received(self, message)

    def _arrive_down(self, message: CoreMessage) -> None:
        if self._on_message is not None:
            self._on_message(message)
