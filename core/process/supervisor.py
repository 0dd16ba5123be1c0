"""Keeps a child program running: starts it, and another in its place when it dies, as often as its restarts allow.

Its owner's event loop has all of it: the parent of HTTP processes follows each of its children with `keep`, and a pool
of engines, which connects to them as well, calls `start` by itself. What blocks runs in threads of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from headrace.ipc.failure import EngineStartError, Failure, HeadraceError

if TYPE_CHECKING:
    from pathlib import Path

    from headrace.core.process.child import OnExit, OnProgress, OnTokenizer
    from headrace.ipc.messages import Ready

STABLE_AFTER_S = 60.0
"""A child that dies after it has served for this long is replaced as if it were the first."""
_MOST_DOUBLINGS = 30
T = TypeVar("T")


class Restarts(msgspec.Struct, frozen=True):
    """How often a child that dies is replaced: at most so many times in a row, after pauses that double."""

    most: int
    first_pause_s: float = 0.25
    longest_pause_s: float = 30.0


class SupervisedChild(Protocol):
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
        """Where an engine's weights come from; empty: from its own model."""
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


C = TypeVar("C", bound=SupervisedChild)


class Supervised(Generic[C]):
    """A child, and those that replace it one after another."""

    def __init__(
        self,
        name: str,
        launch: Callable[[str], C],
        restarts: Restarts,
        child: C | None = None,
        *,
        weights_path: str = "",
    ) -> None:
        """name: the process in a failure. launch: starts a child, with an engine's weights of a path, in any thread;
        may raise HeadraceError. child: the first one, if it has been started already; else its weights are of
        `weights_path`."""
        self.name, self.child = name, child
        self._launch, self._restarts, self._weights_path = launch, restarts, weights_path
        self._is_used = False
        """`start` has been called."""
        self._is_due = False
        """The pause before another start goes on, or that start."""
        self._ready_s: float | None = None
        """When the current child became ready (monotonic seconds)."""
        self.num_replaced = 0
        """In a row, without one in between that was stable."""
        self.is_leaving = False
        """It was asked to end, and none replaces it."""
        self.on_progress: OnProgress | None = None
        """Called with the progress of a start, on another thread."""
        self.on_restart: Callable[[], None] = lambda: None
        """Called before each replacement is started."""
        self.on_launch: Callable[[], None] = lambda: None
        """Called when there is a new child, which is not ready yet."""

    @property
    def pid(self) -> int:
        """Of the current child; 0 before there is one."""
        return 0 if self.child is None else self.child.pid

    @property
    def weights_path(self) -> str:
        """Where an engine's weights come from; empty: from its own model."""
        return self._weights_path if self.child is None else self.child.weights_path

    @property
    def is_ready(self) -> bool:
        return self._ready_s is not None and self.child is not None and self.child.alive

    @property
    def runs(self) -> bool:
        """It is ready, and its process has not ended, also where nothing has noticed its end yet."""
        return self.is_ready and self.child is not None and self.child.runs

    @property
    def comes_back(self) -> bool:
        """Another child is about to replace it, or would do so if it ended now."""
        return not self.is_leaving and (self._is_due or self._num_in_row < self._restarts.most)

    @property
    def _num_in_row(self) -> int:
        is_stable = self._ready_s is not None and time.monotonic() - self._ready_s > STABLE_AFTER_S
        return 0 if is_stable else self.num_replaced

    async def start(self, on_tokenizer: OnTokenizer | None = None) -> Ready:
        """Waits until the first child is ready, or replaces the one that there was, which is ended if it still lives.

        on_tokenizer: called with an engine's tokenizer, on another thread. Raises HeadraceError if the child cannot be
        started or does not become ready.
        """
        try:
            if self.child is None or self._is_used:
                await self._replace()
            self._is_used = True
            assert self.child is not None, "it was launched"
            wait = partial(self.child.wait_ready, on_progress=self.on_progress, on_tokenizer=on_tokenizer)
            ready = await in_thread(wait)
            self._ready_s = time.monotonic()
            return ready
        finally:
            self._is_due = False

    async def _replace(self) -> None:
        weights_path = self._weights_path
        if (before := self.child) is not None:
            weights_path = await in_thread(lambda: before.weights_path)
            # A lost connection does not mean that it died: a process that lives would keep its weights and cache.
            await in_thread(before.make_way)
            if before.alive:
                raise EngineStartError(f"{self.name} (pid {before.pid}) does not end, so no other is started")
            self.on_restart()
        launching = in_thread(lambda: self._launch(weights_path))
        try:
            self.child = await asyncio.shield(launching)
        except asyncio.CancelledError:
            self.child = await launching  # so that `stop` ends it
            raise
        self.on_launch()

    def pause_s(self) -> float:
        """Call once it has ended or could not be started, before it is started again: how long to wait. Doubles each
        time."""
        pause_s = self._restarts.first_pause_s * 2 ** min(self._num_in_row, _MOST_DOUBLINGS)
        self.num_replaced = self._num_in_row + 1
        self._ready_s, self._is_due = None, True
        return min(pause_s, self._restarts.longest_pause_s)

    async def keep(self, on_ready: Callable[[Ready], None], on_end: Callable[[Failure], bool]) -> None:
        """Starts it again whenever it ends without having been asked to, until `on_end` returns False."""
        while True:
            try:
                ready = await self.start()
            except HeadraceError as error:  # a model's files may be back later
                failure = Failure.of(error, process=self.name, phase="start")
            else:
                on_ready(ready)
                failure = await self._until_ended()
            if not on_end(failure):
                return
            await asyncio.sleep(self.pause_s())

    async def _until_ended(self) -> Failure:
        assert self.child is not None, "it is ready"
        ended: concurrent.futures.Future[Failure] = concurrent.futures.Future()

        def settle(failure: Failure) -> None:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # nobody waits any more
                ended.set_result(failure)

        self.child.on_exit(settle)
        return await asyncio.wrap_future(ended)

    async def drain(self, deadline_s: float) -> None:
        """Has the child take no more work, finish what it has within `deadline_s` and end, and none replace it. Does
        not wait for that."""
        self.is_leaving = True
        if self.child is not None:
            await in_thread(partial(self.child.ask_to_stop, deadline_s))

    def stop(self, deadline_s: float) -> None:
        """Ends the child, which may finish its work within `deadline_s`. Blocks, and may be called again, from any
        thread."""
        if self.child is None:
            return
        if self.child.ready is None:  # while it starts it cannot receive requests to stop, nor has work to lose
            self.child.kill()
        else:
            self.child.stop(deadline_s)


def in_thread(call: Callable[[], T]) -> asyncio.Future[T]:
    """Begins `call` in a daemon thread of its own, since it may take for hours: `asyncio.to_thread` has few threads for
    all, and a program that ends would wait for them."""
    done: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(call())
        except BaseException as error:  # raised where it is awaited
            done.set_exception(error)

    threading.Thread(target=run, name="supervisor", daemon=True).start()
    return asyncio.wrap_future(done)
