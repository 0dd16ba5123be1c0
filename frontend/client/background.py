"""An asyncio loop in its own thread, for synchronous interfaces such as LLM."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from headrace.frontend.client.event_loop import new_event_loop
from headrace.ipc.failure import HeadraceError

logger = logging.getLogger(__name__)
T = TypeVar("T")

_CANCEL_WAIT_S = 5.0
_STOP_WAIT_S = 5.0
_LOOKS_FOR_SIGNALS_S = 0.25
"""Interval at which waits wake up. A signal that arrives just before the main thread blocks, or on another thread, does
not wake it, and Python calls the signal's handler only once the main thread is awake."""


class BackgroundLoop:
    """Runs coroutines for other threads. Works beside a loop in the caller's thread, as in a notebook."""

    def __init__(self, name: str) -> None:
        self.loop = new_event_loop()
        self._is_stopping = False
        # A daemon thread: a user's script that ends without closing must not hang.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], meanwhile: Callable[[], None] | None = None) -> T:
        """Returns the coroutine's result. If the waiting thread is interrupted (Ctrl-C), the coroutine is cancelled,
        and the interruption is raised once it has cleaned up.

        meanwhile: called in the waiting thread about four times a second; its error ends the wait as an interruption
        does. Raises HeadraceError in the loop's own thread, which cannot wait for itself.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            self.check_may_wait()
        result: concurrent.futures.Future[T] = concurrent.futures.Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            try:
                tasks.append(self.loop.create_task(coroutine))
            except TypeError as error:  # not a coroutine: without this the caller would wait for ever
                result.set_exception(error)
                return
            tasks[0].add_done_callback(functools.partial(_pass_on, result))

        def cancel() -> None:
            tasks[0].cancel()

        try:
            self.loop.call_soon_threadsafe(begin)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            raise
        try:
            while not concurrent.futures.wait([result], _LOOKS_FOR_SIGNALS_S).done:
                if meanwhile is not None:
                    meanwhile()
            return result.result()
        except BaseException:
            if not result.done():
                self.call_soon(cancel)
                concurrent.futures.wait([result], _CANCEL_WAIT_S)
            raise

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs in the loop's own thread, which must not wait for the loop."""
        return threading.current_thread() is self._thread

    def check_may_wait(self) -> None:
        """Raises HeadraceError in the loop's own thread: it would wait for ever, and every other request with it."""
        if self.is_current_thread:
            raise HeadraceError(
                "this call waits for the client, and was made from a callback that runs on the client's own thread, "
                "such as a stat logger's: make it from another thread"
            )

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> None:
        """Calls `callback` in the loop's thread; does nothing once the loop is stopped."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(callback, *args)

    def stop(self) -> None:
        """Stops the loop and its thread. May be called again."""
        self._is_stopping = True
        self.call_soon(self.loop.stop)
        self._thread.join(_STOP_WAIT_S)
        if not self._thread.is_alive() and not self.loop.is_closed():
            self.loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._is_stopping:
            try:
                self.loop.run_forever()
            except BaseException:  # such as SystemExit in a user's callback, which asyncio raises here
                logger.exception("a callback tried to end the client's thread, on which other requests depend")


def take(items: queue.SimpleQueue[T]) -> T:
    """Returns the next item, waiting for it if necessary."""
    try:
        while True:
            with contextlib.suppress(queue.Empty):
                return items.get(timeout=_LOOKS_FOR_SIGNALS_S)
    except BaseException as interrupt:
        raise interrupt from None  # hides queue.Empty, which is not the cause


def _pass_on(result: concurrent.futures.Future[T], task: asyncio.Task[T]) -> None:
    if task.cancelled():
        result.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(task.result())
