"""Event loops of programs and clients: uvloop's if it is installed, with a defined handling of Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_INTERRUPTED = 130


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A loop of uvloop, or of asyncio if uvloop is not installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def run_async(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs `work()` in a new loop, as asyncio.run does.

    The first SIGINT cancels it and is raised as KeyboardInterrupt once it has cleaned up; a second one ends the
    process. A signal while the loop is created or closed is remembered, as an exception would leave half a loop.
    `work` may install its own handlers in the loop.
    """
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # since the program's start, so it stays so
    if threading.current_thread() is not threading.main_thread() or is_ignored:  # only the main thread handles signals
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(work())
    received: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))

    async def interruptible() -> T:
        task = asyncio.current_task()
        assert task is not None

        def interrupt() -> None:
            received.append(signal.SIGINT)
            if len(received) > 1:
                os._exit(_INTERRUPTED)
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupt)
        if received:
            raise KeyboardInterrupt
        return await work()

    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(interruptible())
    except asyncio.CancelledError:
        if not received:
            raise
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, before)
