"""Work that may take long beside a running engine's steps, on threads of low priority."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable

from headrace.ipc.failure import let_interrupts_pass

logger = logging.getLogger(__name__)
NICENESS = 10
"""Beside a busy thread, one of this niceness gets a tenth of a core, so that steps take at most a tenth longer."""


def give_way() -> None:
    """Lowers the calling thread's priority below that of threads that compute steps."""
    if sys.platform == "linux":  # elsewhere niceness belongs to the whole process
        # A thread inherits niceness, so start from the process's: its creator may already have a low priority.
        of_process = os.getpriority(os.PRIO_PROCESS, os.getpid())
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), of_process + NICENESS)


class Background:
    """Makes one call after another, on a thread that begins with the first and does not outlive the process."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], object]) -> None:
        """Used from one thread. An error of the call is logged; the next one is made nevertheless."""
        self._calls.put(call)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the calls that were submitted."""
        self._calls.put(None)

    def _run(self) -> None:
        give_way()
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:
                let_interrupts_pass(error)
                logger.warning("%s: %s", self._name, error)
