"""Reports the prefix cache's content to clients that follow it: a few messages a second, the same for all of them, and
fewer if there are many."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from headrace.core.schedule.prefix_events import PrefixObserver
from headrace.core.schedule.scheduler import Scheduler
from headrace.ipc import messages
from headrace.ipc.codec import Tensor
from headrace.ipc.prefix_names import tell_every_s

MOST_TOLD_AT_FIRST = 1 << 16


class PrefixFollowers:
    """Clients that follow the prefix cache. Nothing is recorded until the first one."""

    def __init__(self, scheduler: Scheduler, send: Callable[[int, messages.CoreMessage], None]) -> None:
        self._scheduler, self._send = scheduler, send
        self._clients: set[int] = set()
        self._events: PrefixObserver | None = None
        self.due_s = math.inf
        """When `tell` is next due while steps run (monotonic seconds)."""

    def add(self, client: int) -> None:
        """Adds a client and sends it the names of the prefixes known to be cached."""
        hasher = self._scheduler.hasher
        if hasher is None:  # prefix caching is off
            return
        if self._events is None:
            self._events = PrefixObserver(self._scheduler.pool, hasher)
        if not self._clients:  # changes recorded while nobody followed may be incomplete
            self._events.take()
        self._clients.add(client)
        self.due_s = min(self.due_s, time.monotonic() + tell_every_s(len(self._clients)))
        self._send(client, _message(self._events.held()[-MOST_TOLD_AT_FIRST:], []))

    def forget(self, client: int) -> None:
        self._clients.discard(client)
        if not self._clients:
            self.due_s = math.inf

    def tell(self, now_s: float | None = None) -> None:
        """Sends all followers the changes since the last call."""
        if self._events is None or not self._clients:
            return
        self.due_s = (time.monotonic() if now_s is None else now_s) + tell_every_s(len(self._clients))
        if not len(self._events):
            return
        message = _message(*self._events.take())
        for client in tuple(self._clients):
            self._send(client, message)


def _message(stored: list[int], evicted: list[int]) -> messages.PrefixEvents:
    return messages.PrefixEvents(stored=Tensor.of("int64", stored), evicted=Tensor.of("int64", evicted))
