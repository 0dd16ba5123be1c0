"""Sources of engines: child processes, or addresses of engines that others run."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from headrace.frontend.client.client import CONNECT_TIMEOUT_S, CoreClient
from headrace.frontend.client.own_engine import CAUSE_GRACE_S
from headrace.frontend.client.tokenizers_in_advance import read_in_advance
from headrace.frontend.client.transport import Transport, ZmqTransport
from headrace.ipc.failure import EngineStartError
from headrace.ipc.messages import Ready
from headrace.ipc.transport.sockets import is_ipv6

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.core.engine.engine import EngineThread
    from headrace.core.process.child import OnExit, OnProgress, OnTokenizer

STABLE_AFTER_S = 60.0
"""An engine that served for this long before it died is restarted without delay."""


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
    waits_alone = False
    """Whether requests wait a while for its return also where there is no other engine."""

    async def open(self) -> CoreClient:
        """Connects to the engine, waiting until it is ready. Raises HeadraceError if it cannot become ready."""
        raise NotImplementedError

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

    @property
    def is_awaited(self) -> bool:
        return True


class EngineChild(Protocol):
    """A `Child`, or an object with the same interface."""

    @property
    def pid(self) -> int: ...
    @property
    def alive(self) -> bool: ...
    @property
    def runs(self) -> bool:
        """As `alive`, but asks the system."""
        ...

    @property
    def ready(self) -> Ready | None: ...
    @property
    def weights_path(self) -> str:
        """Where its weights come from; empty: from its own model."""
        ...

    @property
    def keys(self) -> Path | None:
        """The key file for its address, if it is not the one that HEADRACE_KEYS names."""
        ...

    def wait_ready(
        self,
        timeout_s: float | None = None,
        on_progress: OnProgress | None = None,
        on_tokenizer: OnTokenizer | None = None,
    ) -> Ready: ...
    def on_exit(self, callback: OnExit) -> None: ...
    def ask_to_stop(self, deadline_s: float) -> None: ...
    def stop(self, deadline_s: float = 5.0) -> None: ...
    def kill(self) -> None: ...
    def left(self) -> None:
        """It has ended as it was asked to, and will not be replaced. Does not wait."""

    def make_way(self) -> None:
        """As `kill`, to make room for a replacement."""
        ...


class Owned(Source):
    """An engine-core that this process starts, and that ends with it. After it was drained it has left, and is not
    restarted."""

    is_own = True

    def __init__(
        self, start: Callable[[str], EngineChild], first: EngineChild, *, restarts: int, rank: int | None = None
    ) -> None:
        """`first` is running already; `start` starts a replacement, with weights of a path, up to `restarts` times in a
        row."""
        self.rank = rank
        self._start, self._child = start, first
        self._used = False
        self._restarts = self._restarts_left = restarts
        self._ready_s = math.inf
        self.address = ""
        self.on_ready: Callable[[Ready], None] = lambda ready: None
        self.on_restart: Callable[[], None] = lambda: None
        """Called before each restart."""

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def weights_path(self) -> str:
        """Where the engine's weights come from; empty: from its own model."""
        return self._child.weights_path

    @property
    def runs(self) -> bool:
        """Whether its process has not ended, also where nothing has noticed its end yet."""
        return self._child.runs

    @property
    def comes_back(self) -> bool:
        return self._restarts_left > 0 or (self._restarts > 0 and self._was_stable)

    @property
    def is_awaited(self) -> bool:
        return self.comes_back

    def left(self) -> None:
        self.is_gone = True
        self._child.left()

    @property
    def _was_stable(self) -> bool:
        return time.monotonic() - self._ready_s > STABLE_AFTER_S

    async def open(self) -> CoreClient:
        if self._used:
            self._restarts_left = (self._restarts if self._was_stable else self._restarts_left) - 1
            self._ready_s = math.inf
            weights_path = await asyncio.to_thread(lambda: self.weights_path)
            # A lost connection does not mean that it died: a process that lives would keep its weights and cache.
            await asyncio.to_thread(self._child.make_way)
            if self._child.alive:
                raise EngineStartError(f"engine-core (pid {self._child.pid}) does not end, so no other is started")
            self.on_restart()
            starting = asyncio.ensure_future(asyncio.to_thread(self._start, weights_path))
            try:
                self._child = await asyncio.shield(starting)
            except asyncio.CancelledError:
                self._child = await starting  # so that `close` ends it
                raise
        self._used = True
        ready = await asyncio.to_thread(
            self._child.wait_ready, on_progress=self.on_progress, on_tokenizer=read_in_advance
        )
        self.on_ready(ready)
        self.address = ready.address
        keys = self._child.keys
        transport = ZmqTransport(ready.address, ready.peer_timeout_s, keys=None if keys is None else str(keys))
        client = CoreClient(transport, cause_grace_s=CAUSE_GRACE_S)
        await client.start()
        self._ready_s = time.monotonic()
        self._child.on_exit(client.fail_threadsafe)
        return client

    def drain(self, deadline_s: float) -> None:
        """Makes the engine refuse new requests, finish the current ones and exit. It is not restarted."""
        self._restarts = self._restarts_left = 0
        self._child.ask_to_stop(deadline_s)

    def ask_to_stop(self, deadline_s: float) -> None:
        if self._child.ready is not None:
            self._child.ask_to_stop(deadline_s)

    def stop(self, deadline_s: float) -> None:
        if self._child.ready is None:  # while it loads a model it cannot receive requests to stop, nor lose any
            self._child.kill()
        else:
            self._child.stop(deadline_s)
