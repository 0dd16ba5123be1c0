"""The port for a client in the core's own process: it passes the same messages without encoding them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from headrace.core.engine.sessions import Broadcaster, Sessions
from headrace.ipc.messages import ClientMessage, CoreMessage, Goodbye, Hello, Load

Deliver = Callable[[CoreMessage], None]
"""Receives a message for the client, on the core's thread. Must not block."""


class MemoryPort(Broadcaster):
    """Any thread may `open` sessions; `send` is for the loop's thread."""

    address = "memory"

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._deliver: dict[int, Deliver] = {}

    def serve(self, sessions: Sessions) -> None:
        self._sessions = sessions

    def open(self, hello: Hello, deliver: Deliver) -> int:
        """Begins a session and returns the client's number. The Welcome or the refusal goes to `deliver`."""
        with self._greeting:
            answer = self._sessions.greet(hello)
            if not isinstance(answer, tuple):
                deliver(answer)
                return 0
            client, welcome = answer
            with self._lock:
                self._deliver[client] = deliver
            deliver(welcome)
            draining = self._draining
        if draining is not None:
            deliver(draining)
        return client

    def send(self, client: int, message: CoreMessage) -> None:
        with self._lock:
            deliver = self._deliver.get(client)
        if deliver is not None:
            deliver(message)

    def set_load(self, load: Load, busy_clients: frozenset[int]) -> None:
        """Does nothing: a client in the same process needs no heartbeat."""

    @property
    def clients(self) -> list[int]:
        with self._lock:
            return list(self._deliver)

    def close(self) -> None:
        with self._lock:
            self._deliver.clear()

    def receive(self, client: int, message: ClientMessage) -> None:
        """Takes a client's message; does nothing after its Goodbye, or if it was refused."""
        if client not in self._deliver:
            return
        reply = self._sessions.receive(client, message)
        if isinstance(message, Goodbye):
            with self._lock:
                self._deliver.pop(client, None)
        elif reply is not None:
            self.send(client, reply)
