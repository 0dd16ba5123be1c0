"""What a child program writes: passed on to our stderr, and its last lines kept for the day it fails."""

from __future__ import annotations

import codecs
import collections
import contextlib
import sys
import threading

from headrace.ipc.wait import Deadline

LOG_TAIL_LINES = 30
QUIET_S = 0.05
"""After that long without another line, a program that was asked for something has written it all."""


class ChildLog:
    """`take` is for one thread, everything else for any."""

    def __init__(self) -> None:
        self.num_lines = 0
        """Written so far."""
        self._last: collections.deque[str] = collections.deque(maxlen=LOG_TAIL_LINES)
        self._unfinished_line = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._changed = threading.Condition()

    def take(self, data: bytes) -> None:
        """What was read of the program's output, however it was cut."""
        text = self._decoder.decode(data)
        with self._changed:
            *lines, rest = (self._unfinished_line + text).split("\n")  # a line may come in many writes
            self._last.extend(line.rstrip("\r") for line in lines if line.strip())
            self._unfinished_line = rest
            self.num_lines += len(lines)
            self._changed.notify_all()
        write_beside_bars(text)

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines, oldest first."""
        with self._changed:
            return (*self._last, *filter(str.strip, [self._unfinished_line]))[-LOG_TAIL_LINES:]

    def wait(self, num_lines: int, deadline: Deadline) -> None:
        """Until there are more than `num_lines` lines in all, and then no more for a moment."""
        with self._changed:
            self._changed.wait_for(lambda: self.num_lines > num_lines, deadline.remaining_s)
            while not deadline.passed and self._changed.wait(QUIET_S):
                pass


def write_beside_bars(text: str) -> None:
    """To stderr, above the progress bars that stand there, if any do."""
    if sys.stderr is None:
        return
    with contextlib.suppress(ValueError, OSError):  # it may be closed
        if "tqdm" in sys.modules:
            from tqdm import tqdm

            tqdm.write(text, file=sys.stderr, end="")
        else:
            sys.stderr.write(text)
        sys.stderr.flush()


class BesideBars:
    """A stream for a log handler: stderr, above the progress bars."""

    def write(self, text: str) -> None:
        write_beside_bars(text)

    def flush(self) -> None:
        """It never keeps anything back."""
