"""The stderr of Headrace's programs: uniform log lines that cannot be forged, and writes that never block or fail.

    logging, print, progress bars --> sys.stderr = NeverBlocking --> descriptor 2
                                                              `--> queue --> thread --> the same, if that is full

If nobody reads the log (a full pipe), its reader is gone (a broken pipe) or it has no room (a full disk), lines are
lost but the program goes on: only the thread waits or fails, and what does not fit the queue is dropped and counted.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import logging
import os
import queue
import select
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

from headrace.ipc.failure import OptionError

LEVEL_VARIABLE = "HEADRACE_LOG_LEVEL"
FORMAT_VARIABLE = "HEADRACE_LOG_FORMAT"
CONFIG_VARIABLE = "HEADRACE_LOG_CONFIG"
FORMATS = ("text", "json")
FIELDS = "fields"
"""The attribute of a log record whose dict is added to its JSON."""
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_STDERR = 2
MOST_QUEUED = 10_000
"""Limit of queued pieces of text, of about a line each."""
DRAIN_S = 1.0
"""How long a program waits at its end for its last lines to be written."""


def set_up_logging(process: str, default_level: str) -> None:
    """Log lines look like `INFO 2026-01-31 12:00:00.123 server: message`, in local time, or are JSON objects.
    HEADRACE_LOG_LEVEL sets the lowest level, HEADRACE_LOG_FORMAT the form: text or json. In the place of all that,
    HEADRACE_LOG_CONFIG names a JSON file for logging.config.dictConfig. Raises OptionError if that cannot be used."""
    if path := os.environ.get(CONFIG_VARIABLE):
        _configure(path)
        return
    asked = os.environ.get(LEVEL_VARIABLE, "").upper()
    form = os.environ.get(FORMAT_VARIABLE, "").lower()
    handler = logging.StreamHandler(_CurrentStderr())
    handler.setFormatter(JsonFormatter(process) if form == "json" else TextFormatter(process))
    logging.basicConfig(level=asked if asked in LEVELS else default_level, handlers=[handler])
    for variable, given, known in ((LEVEL_VARIABLE, asked, LEVELS), (FORMAT_VARIABLE, form, FORMATS)):
        if given and given not in known:
            words = ", ".join(known).lower()
            logging.getLogger(__name__).warning("%s=%s is unknown; allowed: %s", variable, printable(given), words)


def _configure(path: str) -> None:
    import logging.config

    try:
        config = json.loads(Path(path).read_text())
        logging.config.dictConfig({"version": 1, "disable_existing_loggers": False, **config})
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        why = error if error.__cause__ is None else f"{error}: {error.__cause__}"
        raise OptionError(
            f"log_config_file={printable(path)}: {why}; it must be a JSON object as logging.config.dictConfig takes it"
        ) from error


class TextFormatter(logging.Formatter):
    """Prevents forged records: continuation lines are indented, and control characters are escaped."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(levelname)s %(asctime)s.%(msecs)03d {process}: %(message)s", "%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return "\n    ".join(printable(line) for line in super().format(record).split("\n"))


class JsonFormatter(logging.Formatter):
    """One JSON object per line, with the time in UTC."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        told = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            told["exception"] = self.formatException(record.exc_info)
        return json.dumps({**told, **getattr(record, FIELDS, {})}, default=str)


def printable(text: str) -> str:
    """The text with unprintable characters escaped, such as line ends and marks of text direction."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class _CurrentStderr:
    """A stream for a log handler: writes to the current sys.stderr, above any progress bars."""

    def write(self, text: str) -> None:
        write_beside_bars(text)

    def flush(self) -> None:
        """Nothing to do: `write` flushes."""


class Unfailing:
    """A text stream in front of another one, whose errors go no further. For tqdm, which keeps the lock that all bars
    of a program share if a write raises: the next thread that shows one would wait for ever."""

    def __init__(self, stream: Any) -> None:
        self._wrapped = stream  # the name by which tqdm compares streams

    def write(self, text: str) -> int:
        with contextlib.suppress(Exception):
            self._wrapped.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(Exception):
            self._wrapped.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    def __eq__(self, other: object) -> bool:
        return bool(self._wrapped == getattr(other, "_wrapped", other))

    def __hash__(self) -> int:
        return hash(self._wrapped)


def write_beside_bars(text: str) -> None:
    """Writes to stderr, above any progress bars. Raises nothing."""
    if sys.stderr is None:
        return
    with contextlib.suppress(Exception):  # it may be closed, or an object of the program's with errors of its own
        bars: Any = sys.modules.get("tqdm")  # ipc does not import tqdm itself
        if bars is not None:
            bars.tqdm.write(text, file=Unfailing(sys.stderr), end="")
        else:
            sys.stderr.write(text)
        sys.stderr.flush()


class NeverBlocking:
    """A text stream in front of another one. Text that the other accepts at once is written at once, so that it
    survives a crash; the rest is left to a thread.
    """

    encoding, errors = "utf-8", "backslashreplace"

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._fd = stream, stream.fileno()
        self._queue: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()  # reentrant, for signal handlers
        self._writing = threading.Lock()
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLOUT)
        self._num_dropped = 0
        threading.Thread(target=self._run, name="stderr", daemon=True).start()

    def write(self, text: str) -> int:
        data = text.encode(self.encoding, self.errors)
        # A pipe that polls as writable accepts this much without blocking (pipe(7)).
        if len(data) <= select.PIPE_BUF and self._queue.empty() and self._writing.acquire(blocking=False):
            try:
                if self._poll.poll(0):
                    data = data[os.write(self._fd, data) :]
            except OSError:  # there is no reader, or no room
                data = b""
            finally:
                self._writing.release()
        if self._queue.qsize() >= MOST_QUEUED:
            self._num_dropped += 1
        elif data:
            self._queue.put(data)
        return len(text)

    def flush(self) -> None:
        """Nothing is buffered, and callers must not wait; see `drain`."""

    def drain(self, timeout_s: float = DRAIN_S) -> None:
        """Waits until everything is written, at most for `timeout_s`."""
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
                item += b"headrace: %d log records were dropped, as stderr was not read in time\n" % self._num_dropped
                self._num_dropped = 0
            with self._writing, contextlib.suppress(OSError):
                while item:
                    try:
                        item = item[os.write(self._fd, item) :]
                    except BlockingIOError:
                        select.select([], [self._fd], [])


def protect_stderr() -> None:
    """From now on nothing that this process writes to stderr can fail or block."""
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
    """Gives the last log lines time to be written, before the process ends abruptly."""
    if isinstance(sys.stderr, NeverBlocking):
        sys.stderr.drain()
