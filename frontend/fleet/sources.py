"""Sources of engines: child processes, or addresses of engines that others run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.core.process.supervisor import Restarts, Supervised, SupervisedChild
from headrace.frontend.client.client import CONNECT_TIMEOUT_S, CoreClient
from headrace.frontend.client.own_engine import CAUSE_GRACE_S
from headrace.frontend.client.tokenizers_in_advance import read_in_advance
from headrace.frontend.client.transport import Transport, ZmqTransport
from headrace.ipc.messages import Ready
from headrace.ipc.transport.sockets import is_ipv6

if TYPE_CHECKING:
    from headrace.core.engine.engine import EngineThread
    from headrace.core.process.child import OnProgress

_FIRST_PAUSE_S, _SECOND_PAUSE_S = 0.1, 1.0
_STABLE_AFTER_S = 60.0
"""After a connection that lasted this long the next is tried without a pause."""


class Source:
    """Provides connections to one engine, over all its lives."""

    address = ""
    rank: int | None = None
    """data_parallel_rank of the engine; None: its index among the frontend's first engines."""
    is_own = False
    """Whether this program starts the engine."""
    is_gone = False
    """The engine was removed or has left: it is not reported as missing, and `open` is not called again."""

    @property
    def comes_back(self) -> bool:
        """Whether `open` may be called again after a death."""
        return True

    @property
    def is_awaited(self) -> bool:
        """Whether requests that no other engine can run wait for its return, and its model's name stays listed."""
        return False  # it is unknown whether it will return

    on_progress: OnProgress | None = None
    """Called with the progress of the start of an own engine, on another thread."""
    longest_pause_s = 30.0
    _pause_s = 0.0
    waits_alone = False
    """Whether requests wait a while for its return also where there is no other engine."""

    async def open(self) -> CoreClient:
        """Connects to the engine, waiting until it is ready. Raises HeadraceError if it cannot become ready."""
        raise NotImplementedError

    def pause_s(self, tried_s: float) -> float:
        """How long to wait before the next `open`, as there is no connection any more: longer each time. tried_s: since
        the call of the last one."""
        if tried_s > _STABLE_AFTER_S:
            self._pause_s = 0.0
        else:
            again_s = min(max(_SECOND_PAUSE_S, 2 * self._pause_s), self.longest_pause_s)
            self._pause_s = again_s if self._pause_s else _FIRST_PAUSE_S
        return self._pause_s

    async def close(self, deadline_s: float) -> None:
        """`stop`, without blocking the loop."""
        if self.is_own:
            await asyncio.to_thread(self.stop, deadline_s)

    def ask_to_stop(self, deadline_s: float) -> None:
        """Begins to `stop`, and does not wait."""

    def stop(self, deadline_s: float) -> None:
        """Ends the engine if it is this program's own; others keep running. May be called again."""

    def let_go(self) -> None:
        """Removes the engine: it will not return."""
        self.is_gone = True

    def stay(self) -> None:
        """Reverses `let_go`: the engine was reported again."""
        self.is_gone = False

    def left(self) -> None:
        """Call when the engine has shut down in order, as requested."""


class Connected(Source):
    """An engine behind a transport that there is, which is lost with it: such as one on a thread of this process."""

    comes_back = False

    def __init__(
        self, transport: Transport, timeout_s: float = CONNECT_TIMEOUT_S, *, engine: EngineThread | None = None
    ) -> None:
        """engine: the engine, if it is this program's own."""
        self.address, self._transport, self._timeout_s = transport.address, transport, timeout_s
        self._engine, self.is_own = engine, engine is not None

    async def open(self) -> CoreClient:
        client = CoreClient(self._transport, cause_grace_s=CAUSE_GRACE_S if self.is_own else 0.0)
        await client.start(self._timeout_s)
        if self._engine is not None:
            self._engine.on_exit(client.fail_threadsafe)
        return client

    def stop(self, deadline_s: float) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.stop(deadline_s)


class Attached(Source):
    """An engine that someone else runs, who may restart it at its address, or resume it if it was stopped."""

    longest_pause_s = 2.0
    """Trying to connect costs little."""

    def __init__(
        self,
        address: str,
        peer_timeout_s: float | None = None,
        *,
        keys: str | None = None,
        comes_back: bool = True,
        timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """keys: the key file for its address, by default the one that HEADRACE_KEYS names."""
        self.address, self._comes_back, self._timeout_s = address, comes_back, timeout_s
        self._peer_timeout_s, self._keys = peer_timeout_s, keys

    @property
    def comes_back(self) -> bool:
        return self._comes_back

    async def open(self) -> CoreClient:
        ipv6 = await asyncio.to_thread(is_ipv6, self.address)  # the loop does not wait for a name server
        client = CoreClient(ZmqTransport(self.address, self._peer_timeout_s, keys=self._keys, ipv6=ipv6))
        await client.start(self._timeout_s)
        return client


class Reconnecting(Attached):
    """The only engine of a client that goes on with whichever engine listens at this address next."""

    waits_alone = True


class Discovered(Attached):
    """An engine that a coordinator reported. If it does not answer, it is retried until it is removed."""

    longest_pause_s = 30.0

    @property
    def is_awaited(self) -> bool:
        return True


class Owned(Source):
    """An engine-core that this process starts, and that ends with it. After it was drained it has left, and is not
    restarted."""

    is_own = True

    def __init__(
        self,
        start: Callable[[str], SupervisedChild],
        first: SupervisedChild | None = None,
        *,
        restarts: int,
        rank: int | None = None,
        weights_path: str = "",
    ) -> None:
        """`start` starts the engine, with weights of a path, and replaces it up to `restarts` times in a row. first:
        its process, if it is running already; else it gets weights of `weights_path`."""
        self.rank = rank
        self.process: Supervised[SupervisedChild] = Supervised(
            "engine-core", start, Restarts(restarts), first, weights_path=weights_path
        )
        self.address = ""
        self.on_ready: Callable[[Ready], None] = lambda ready: None

    @property
    def comes_back(self) -> bool:
        return self.process.comes_back

    @property
    def is_awaited(self) -> bool:
        return self.comes_back

    def left(self) -> None:
        self.is_gone = True
        if self.process.child is not None:
            self.process.child.left()

    def pause_s(self, tried_s: float) -> float:
        return self.process.pause_s()

    async def open(self) -> CoreClient:
        self.process.on_progress = self.on_progress
        ready = await self.process.start(read_in_advance)
        child = self.process.child
        assert child is not None, "it is ready"
        self.on_ready(ready)
        self.address = ready.address
        keys = None if child.keys is None else str(child.keys)
        client = CoreClient(ZmqTransport(ready.address, ready.peer_timeout_s, keys=keys), cause_grace_s=CAUSE_GRACE_S)
        await client.start()
        child.on_exit(client.fail_threadsafe)
        return client

    def ask_to_stop(self, deadline_s: float) -> None:
        child = self.process.child
        if child is not None and child.ready is not None:
            child.ask_to_stop(deadline_s)

    def stop(self, deadline_s: float) -> None:
        self.process.stop(deadline_s)
