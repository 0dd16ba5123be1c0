"""Several engines for one frontend without processes: sessions with one core, each of which can die by itself."""

from __future__ import annotations

from headrace.core.engine.engine import EngineThread
from headrace.frontend.client.client import CoreClient
from headrace.frontend.client.transport import MemoryTransport
from headrace.frontend.fleet.sources import Source
from headrace.ipc.failure import Failure
from headrace.ipc.messages import ClientMessage, CoreMessage, Hello

KILLED = Failure(message="it was killed", type="SIGKILL", process="engine-core")


class Session(Source):
    """A source (frontend/fleet/sources.py) that opens sessions with a core on a thread of this process."""

    address = "memory"

    def __init__(self, thread: EngineThread, *, num_lives: int = 1) -> None:
        self._thread, self._lives_left = thread, num_lives
        self.transport: MemoryTransport | None = None
        self.is_deaf = False
        """What the core says does not come through, as from one that is stopped."""

    @property
    def comes_back(self) -> bool:
        return self._lives_left > 0

    @property
    def is_awaited(self) -> bool:
        return self.comes_back

    async def open(self) -> CoreClient:
        self._lives_left -= 1

        def greet(hello: ClientMessage) -> None:
            assert isinstance(hello, Hello)
            transport.deliver = self._thread.port.open(hello, self._hear)

        self.transport = transport = MemoryTransport(greet)
        client = CoreClient(transport)
        await client.start()
        return client

    def _hear(self, message: CoreMessage) -> None:
        if self.transport is not None and not self.is_deaf:
            self.transport.push(message)

    def kill(self) -> None:
        """As a core that is killed: its last messages may be lost, and nothing follows."""
        assert self.transport is not None
        self.is_deaf, dead = True, self.transport
        dead.end(KILLED)
        self.is_deaf = False
