"""What our programs write to stderr: one form of line, nothing forged, and never a wait or an error for who writes.

    logging, print, progress bars --> sys.stderr = NeverBlocking --> descriptor 2
                                                              `--> queue --> thread --> the same, where that is full

A log that nobody reads (a full pipe), that is gone (a broken one) or that has no room (a full disk) costs lines, not
service: the thread waits or fails, and what does not fit the queue is dropped and counted.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import select
import sys
import threading
from typing import Any, TextIO

LEVEL_VARIABLE = "HEADRACE_LOG_LEVEL"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_STDERR = 2
MOST_QUEUED = 10_000
"""Pieces of text, of a line or so each, that may wait to be written."""
DRAIN_S = 1.0
"""How long a program that ends waits for its last lines to be written."""


def set_up_logging(process: str, default_level: str) -> None:
    """Lines like `INFO 12:00:00 server: message`, of HEADRACE_LOG_LEVEL and above."""
    asked = os.environ.get(LEVEL_VARIABLE, "").upper()
    handler = logging.StreamHandler(_CurrentStderr())
    handler.setFormatter(LogFormatter(f"%(levelname)s %(asctime)s {process}: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=asked if asked in LEVELS else default_level, handlers=[handler])
    if asked and asked not in LEVELS:
        known = ", ".join(LEVELS).lower()
        logging.getLogger(__name__).warning("%s=%s is none of %s", LEVEL_VARIABLE, printable(asked), known)


class LogFormatter(logging.Formatter):
    """No record can look like another: further lines are indented, and control characters are spelt out."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n    ".join(printable(line) for line in super().format(record).split("\n"))


def printable(text: str) -> str:
    """With control characters and their like, such as line ends and those that change directions, spelt out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _CurrentStderr:
    """A stream for a log handler: stderr, above the progress bars that stand there, if any do."""

    def write(self, text: str) -> None:
        write_beside_bars(text)

    def flush(self) -> None:
        """It never keeps anything back."""


def write_beside_bars(text: str) -> None:
    """To stderr, above the progress bars that stand there, if any do. Raises nothing."""
    if sys.stderr is None:
        return
    with contextlib.suppress(ValueError, OSError):  # it may be closed
        bars: Any = sys.modules.get("tqdm")  # this folder imports no such thing itself
        if bars is not None:
            bars.tqdm.write(text, file=sys.stderr, end="")
        else:
            sys.stderr.write(text)
        sys.stderr.flush()


class NeverBlocking:
    """A text stream before another. What that takes at once is written at once, so that it is there after a crash.

    Everything else is left to a thread.
    """

    encoding, errors = "utf-8", "backslashreplace"

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._fd = stream, stream.fileno()
        self._queue: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()  # a signal's handler may write
        self._writing = threading.Lock()
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLOUT)
        self._num_dropped = 0
        threading.Thread(target=self._run, name="stderr", daemon=True).start()

    def write(self, text: str) -> int:
        data = text.encode(self.encoding, self.errors)
        # A pipe that can be written takes so much without waiting (pipe(7)).
        if len(data) <= select.PIPE_BUF and self._queue.empty() and self._writing.acquire(blocking=False):
            try:
                if self._poll.poll(0):
                    data = data[os.write(self._fd, data) :]
            except OSError:  # nobody is there to read, or there is no room
                data = b""
            finally:
                self._writing.release()
        if self._queue.qsize() >= MOST_QUEUED:
            self._num_dropped += 1
        elif data:
            self._queue.put(data)
        return len(text)

    def flush(self) -> None:
        """Nothing is kept back, and nobody is to wait; see `drain`."""

    def drain(self, timeout_s: float = DRAIN_S) -> None:
        """Waits until everything is written, but not for long."""
        written = threading.Event()
        self._queue.put(written)
        written.wait(timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            if self._num_dropped and self._queue.empty():
                item += b"headrace: %d pieces of log are missing, as nobody read them in time\n" % self._num_dropped
                self._num_dropped = 0
            with self._writing, contextlib.suppress(OSError):
                while item:
                    try:
                        item = item[os.write(self._fd, item) :]
                    except BlockingIOError:
                        select.select([], [self._fd], [])


def protect_stderr() -> None:
    """From now on nothing that this process writes to stderr can fail or wait."""
    if sys.stderr is None or isinstance(sys.stderr, NeverBlocking):
        return
    try:
        is_ours = sys.stderr.fileno() == _STDERR
    except (OSError, ValueError):  # a stream in memory, such as a test's
        return
    if is_ours:
        stream: Any = NeverBlocking(sys.stderr)
        sys.stderr = stream
        atexit.register(drain_stderr)


def drain_stderr() -> None:
    """Before a process ends without further ado: its last lines get their time."""
    if isinstance(sys.stderr, NeverBlocking):
        sys.stderr.drain()
