"""The engine of a server with several HTTP processes, as each of them has it: the parent runs it and says how it is.

parent                                    HTTP process
  EngineUp(address)                  ->     connects, serves
  EngineDown(failure, comes_back)    ->     its streams end with the cause
  EngineUp(address)                  ->     connects again, sends what had brought nothing
                                     <-   EngineLost(address, failure), when it was silent for too long
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable

from headrace.frontend.client.client import CoreClient
from headrace.frontend.client.transport import ZmqTransport
from headrace.frontend.http.engines import CAUSE_GRACE_S
from headrace.ipc.failure import EngineDeadError, Failure
from headrace.ipc.messages import Message


class EngineUp(Message, frozen=True):
    """The engine is ready at this address."""

    address: str


class EngineDown(Message, frozen=True):
    """The engine has ended, because of this."""

    failure: Failure
    comes_back: bool
    """An EngineUp will follow."""


class EngineLost(Message, frozen=True):
    """The connection to the engine at this address was lost, and no EngineDown has said why."""

    address: str
    failure: Failure


class ParentEngine:
    """A source that waits for the parent's word. Everything but `tell` happens in the server's loop."""

    def __init__(self, on_lost: Callable[[EngineLost], None]) -> None:
        """`on_lost` tells the parent."""
        self._on_lost = on_lost
        self.address = ""
        self.comes_back = True
        self._failure: Failure | None = None
        self._client: CoreClient | None = None
        self._news: collections.deque[EngineUp | EngineDown] = collections.deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_news = asyncio.Event()

    def tell(self, news: EngineUp | EngineDown) -> None:
        """Takes what the parent said. Thread-safe; may come before the loop runs."""
        self._news.append(news)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._take_news)

    async def open(self) -> CoreClient:
        """Waits for the engine. Raises EngineDeadError, with the cause, when it will not come back."""
        self._loop = asyncio.get_running_loop()
        self._take_news()
        if self.address and self._client is not None and self._client.failure is not None:
            self._on_lost(EngineLost(address=self.address, failure=self._client.failure))
        while not self.address:
            if self._failure is not None and not self.comes_back:
                raise EngineDeadError.from_failure(self._failure)
            self._has_news.clear()
            await self._has_news.wait()
        # Lost connections wait for the parent's word, which has the cause.
        self._client = CoreClient(ZmqTransport(self.address), cause_grace_s=CAUSE_GRACE_S)
        await self._client.start()
        return self._client

    async def close(self, deadline_s: float) -> None:
        """It is the parent's to end."""

    def _take_news(self) -> None:
        while self._news:
            news = self._news.popleft()
            if isinstance(news, EngineUp):
                self.address, self._client = news.address, None
                continue
            self.address, self.comes_back, self._failure = "", news.comes_back, news.failure
            if self._client is not None:
                self._client.fail(news.failure)
                self._failure = self._client.failure  # the engine's own words, if it had time for any
        self._has_news.set()
