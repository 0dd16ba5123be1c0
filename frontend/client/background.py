"""An asyncio loop in its own thread, for synchronous interfaces such as LLM."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
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
_TASKS_END_S = 2.0
"""Longest wait at a stop for the tasks that still run, which are cancelled."""
_LOOKS_FOR_SIGNALS_S = 0.25
"""Interval at which waits wake up. A signal that arrives just before the main thread blocks, or on another thread, does
not wake it, and Python calls the signal's handler only once the main thread is awake."""


class BackgroundLoop:
    """Runs coroutines for other threads. Works beside a loop in the caller's thread, as in a notebook."""

    def __init__(self, name: str) -> None:
        self.loop = new_event_loop()
        self._is_stopping = False
        self._process_id = os.getpid()
        # A daemon thread: a user's script that ends without closing must not hang.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T], meanwhile: Callable[[], None] | None = None) -> T:
        """Returns the coroutine's result. If the waiting thread is interrupted (Ctrl-C), the coroutine is cancelled,
        and the interruption is raised once it has cleaned up.

        meanwhile: called in the waiting thread about four times a second; its error ends the wait as an interruption
        does. Raises HeadraceError where nothing would end the wait: see `check_may_wait`, and once the loop is stopped.
        """
        result: concurrent.futures.Future[T] = concurrent.futures.Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            if self._is_stopping:
                return  # the waiting thread finds the loop's own gone
            try:
                tasks.append(self.loop.create_task(coroutine))
            except TypeError as error:  # not a coroutine: without this the caller would wait for ever
                result.set_exception(error)
                return
            tasks[0].add_done_callback(pass_on)

        def pass_on(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                result.set_exception(_closed() if self._is_stopping else asyncio.CancelledError())
            elif (error := task.exception()) is not None:
                result.set_exception(error)
            else:
                result.set_result(task.result())

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        try:
            self.check_may_wait()
            self._call(begin)
            while not concurrent.futures.wait([result], _LOOKS_FOR_SIGNALS_S).done:
                if meanwhile is not None:
                    meanwhile()
                if not self._thread.is_alive() and not result.done():
                    raise _closed()
            return result.result()
        except BaseException:
            if not result.done() and self._thread.is_alive() and not self.is_current_thread:
                self.call_soon(cancel)
                concurrent.futures.wait([result], _CANCEL_WAIT_S)
            raise
        finally:
            if not tasks and asyncio.iscoroutine(coroutine):
                coroutine.close()  # it was not begun

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs in the loop's own thread, which must not wait for the loop."""
        return threading.current_thread() is self._thread

    def check_may_wait(self) -> None:
        """Raises HeadraceError in the loop's own thread, where a wait would never end and would keep every other
        request too, and in a process that was forked from the loop's, which does not have its thread."""
        if os.getpid() != self._process_id:
            raise HeadraceError(
                f"this LLM belongs to process {self._process_id}, and this one was forked from it: create one here, "
                "or attach to a running engine with headrace.connect(address)"
            )
        if self.is_current_thread:
            raise HeadraceError(
                "this call waits for the client, and was made from a callback that runs on the client's own thread, "
                "such as a stat logger's: make it from another thread"
            )

    def take(self, items: queue.SimpleQueue[T]) -> T:
        """Returns the next item that the loop's thread has put, waiting for it if necessary. Raises as `run` does."""
        self.check_may_wait()
        try:
            while True:
                is_alive = self._thread.is_alive()  # before looking, so that what it put last is seen
                with contextlib.suppress(queue.Empty):
                    return items.get(timeout=_LOOKS_FOR_SIGNALS_S)
                if not is_alive:
                    raise _closed()
        except BaseException as interrupt:
            raise interrupt from None  # hides queue.Empty, which is not the cause

    def call_soon(self, callback: Callable[..., Any], *args: Any) -> None:
        """Calls `callback` in the loop's thread; does nothing once the loop is stopped."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(callback, *args)

    def stop(self) -> None:
        """Stops the loop and its thread, and ends what others wait for in `run`. May be called again."""
        self._is_stopping = True
        self.call_soon(self.loop.stop)
        self._thread.join(_STOP_WAIT_S)
        if not self._thread.is_alive() and not self.loop.is_closed():
            self.loop.close()

    def _call(self, callback: Callable[[], None]) -> None:
        """As `call_soon`. Raises HeadraceError once the loop is closed."""
        try:
            self.loop.call_soon_threadsafe(callback)
        except RuntimeError:
            raise _closed() from None

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while not self._is_stopping:
            self._guarded(self.loop.run_forever)
        self._guarded(lambda: self.loop.run_until_complete(_end_tasks()))

    def _guarded(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException:  # such as SystemExit in a user's callback, which asyncio raises here
            logger.exception("a callback tried to end the client's thread, on which other requests depend")


async def _end_tasks() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_TASKS_END_S)
    await asyncio.sleep(0)  # what waits for tasks that had just ended


def _closed() -> HeadraceError:
    return HeadraceError("this LLM is closed")
