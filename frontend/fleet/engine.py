"""`Engine`: a frontend's record of one engine, over all its lives."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from headrace.frontend.client.client import CoreClient, CoreListener
from headrace.frontend.fleet.sources import Owned, Source
from headrace.ipc.adapters import AdapterInfo
from headrace.ipc.failure import EngineDeadError, Failure, HeadraceError
from headrace.ipc.messages import EngineStats, Load, PrefixEvents, Welcome

if TYPE_CHECKING:
    from headrace.core.process.supervisor import Supervised
    from headrace.frontend.client.request_stream import RequestStream
    from headrace.frontend.fleet.pool import EnginePool

SILENT_AFTER_S = 5.0
"""An engine with requests that sends nothing for this long is reported as silent by health checks."""
STATS_TIMEOUT_S = 2.0


class Engine(CoreListener):
    """What its client hears, it passes on to the pool and the pool's router."""

    def __init__(self, pool: EnginePool, index: int, source: Source, *, is_needed: bool) -> None:
        """is_needed: whether it is an error if the engine does not start."""
        self._pool = pool
        self.index, self.source, self.is_needed = index, source, is_needed
        self.adapters = pool.adapters
        """Of all engines of the pool."""
        self.name = f"engine {index}"
        self.client: CoreClient | None = None
        self.names: tuple[str, ...] = ()
        self.failure: Failure | None = None
        """Why it is not connected; None before its first connection."""
        self.may_return = False
        """It was removed, and another will be added in its place."""
        self.follows_prefixes = False
        """Whether its current connection subscribes to the content of its prefix cache."""
        self.busy_since_s = 0.0
        """When this process last gave it a request while it had none of this process (monotonic seconds)."""
        self.hold: asyncio.TimerHandle | None = None
        """Timer that ends the wait of requests for this engine."""
        self._late_tokens_before = 0
        self.task: asyncio.Task[None] | None = None
        """The task that keeps it connected."""

    @property
    def usable(self) -> bool:
        return self.client is not None and self.client.failure is None and not self.client.draining

    @property
    def connected(self) -> CoreClient:
        """Its client. Raises EngineDeadError while it is not connected, which it may be at any time: other threads
        prepare requests for it."""
        if (client := self.client) is None:
            raise EngineDeadError.from_failure(self.failure or Failure(message="the engine is not running"))
        return client

    @property
    def has_ended(self) -> bool:
        """For good: it is not connected, and nothing tries to connect it again."""
        return self.client is None and (self.task is None or self.task.done())

    @property
    def process(self) -> Supervised[Any]:
        """Of an own engine."""
        assert isinstance(self.source, Owned), "this program starts it"
        return self.source.process

    @property
    def is_foreign(self) -> bool:
        """Someone else runs it: it may return, but this process cannot know."""
        return self.source.comes_back and not self.source.is_awaited

    @property
    def is_awaited(self) -> bool:
        return self.source.is_awaited and not self.source.is_gone

    @property
    def is_silent(self) -> bool:
        """It has requests of this process, sends nothing and does not work: it may be dead, or stopped and continue
        later."""
        if self.client is None or not len(self.client.requests):
            return False
        signs_s = (self.client.last_heard_s, self.client.last_worked_s, self.busy_since_s)
        return time.monotonic() - max(signs_s) > SILENT_AFTER_S

    def note_work(self) -> None:
        """Call before each submission."""
        if self.client is not None and not len(self.client.requests):
            self.busy_since_s = time.monotonic()

    def num_late_tokens(self) -> int:
        """Tokens that arrived for requests after they were aborted, over all its lives."""
        now = self.client.requests.num_tokens_after_abort if self.client is not None else 0
        return self._late_tokens_before + now

    def disconnected(self, failure: Failure) -> None:
        self._late_tokens_before = self.num_late_tokens()
        self.client, self.failure, self.follows_prefixes = None, failure, False

    async def stats(self, timeout_s: float = STATS_TIMEOUT_S) -> EngineStats | None:
        """The core's statistics; None if it does not reply in time."""
        if self.client is None:
            return None
        with contextlib.suppress(HeadraceError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                return await self.client.get_stats()
        return None

    # --- what its client hears ------------------------------------------------------------------------------------

    def on_lost(self, streams: Sequence[RequestStream], failure: Failure) -> None:
        self._pool.lost(self, streams, failure)

    def on_refused(self, stream: RequestStream, failure: Failure) -> bool:
        return self._pool.refused(stream, failure)

    def on_load(self, load: Load) -> None:
        router = self._pool.router
        router.load(self.name, load.num_running, load.num_waiting, time.monotonic(), is_paused=load.is_paused)

    def on_prefixes(self, events: PrefixEvents) -> None:
        self._pool.router.evicted(self.name, events.evicted.tolist())
        self._pool.router.stored(self.name, events.stored.tolist())

    def on_draining(self) -> None:
        self._pool.drains(self)

    def on_welcome(self, welcome: Welcome) -> None:
        self._pool.changed(self, welcome)

    def on_adapters(self, infos: Sequence[AdapterInfo]) -> None:
        self._pool.adapters.heard(self, infos)
