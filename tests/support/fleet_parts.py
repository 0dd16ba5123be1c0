"""Several engines for one frontend without processes: sessions with one core that can be killed separately."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from headrace.core.engine.engine import EngineThread
from headrace.core.engine.memory_port import MemoryPort
from headrace.frontend.client.client import CoreClient
from headrace.frontend.client.transport import MemoryTransport
from headrace.frontend.fleet.sources import Source
from headrace.ipc.failure import Failure
from headrace.ipc.messages import ClientMessage, CoreMessage, Hello, StepOutputs

KILLED = Failure(message="it was killed", type="SIGKILL", process="engine-core")
_LOOKED_WITHIN_S = 60.0


class Between:
    """The port of a core, in front of which a test stands."""

    def __init__(
        self,
        port: MemoryPort,
        hear: Callable[[CoreMessage], None],
        heard_of_client: Callable[[ClientMessage], None],
    ) -> None:
        self._port, self._hear, self._heard_of_client = port, hear, heard_of_client

    def open(self, hello: Hello, deliver: Callable[[CoreMessage], None]) -> int:
        return self._port.open(hello, self._hear)

    def receive(self, client: int, message: ClientMessage) -> None:
        self._heard_of_client(message)
        self._port.receive(client, message)


class Session(Source):
    """A source (frontend/fleet/sources.py) that opens sessions with a core on a thread of this process."""

    address = "memory"

    def __init__(self, thread: EngineThread, *, num_lives: int = 1) -> None:
        self._thread, self._lives_left = thread, num_lives
        self.transport: MemoryTransport | None = None
        self.is_deaf = False
        """Whether messages of the core are dropped, as if its process were stopped."""
        self.on_step: Callable[[], None] | None = None
        """Called in the client's loop after it received a step's tokens, while the core waits, so that requests cannot
        progress meanwhile. The function sets it to None when it is done."""
        self._looked = threading.Event()

    @property
    def comes_back(self) -> bool:
        return self._lives_left > 0

    @property
    def is_awaited(self) -> bool:
        return self.comes_back

    async def open(self) -> CoreClient:
        self._lives_left -= 1

        self.transport = MemoryTransport(Between(self._thread.port, self._hear, self.heard_of_client))
        client = CoreClient(self.transport)
        self._loop = asyncio.get_running_loop()
        await client.start()
        return client

    def heard_of_client(self, message: ClientMessage) -> None:
        """Called with each message of the client but its Hello."""

    def _hear(self, message: CoreMessage) -> None:
        """Receives a message of the core, on the core's thread."""
        if self.transport is None or self.is_deaf:
            return
        self.transport.push(message)
        if isinstance(message, StepOutputs) and self.on_step is not None:
            looked = self._looked = threading.Event()
            with contextlib.suppress(RuntimeError):  # the client's loop is closed
                self._loop.call_soon_threadsafe(self._look, looked)
                looked.wait(_LOOKED_WITHIN_S)

    def _look(self, looked: threading.Event) -> None:
        try:
            if self.on_step is not None:
                self.on_step()
        finally:
            looked.set()

    async def close(self, deadline_s: float) -> None:
        self.on_step = None
        self._looked.set()

    def kill(self) -> None:
        """Ends the session as if the core were killed: its last messages may be lost, and no more follow."""
        assert self.transport is not None
        self.is_deaf, dead = True, self.transport
        dead.push(KILLED)
        self.is_deaf = False
