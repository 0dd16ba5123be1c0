"""What a child program writes: passed on to our stderr, and its last lines kept for the day it fails."""

from __future__ import annotations

import codecs
import collections
import contextlib
import sys
import threading

from headrace.ipc.wait import Deadline

LOG_TAIL_LINES = 30
LAST_FRAME = "in _run_module_as_main"
"""The outermost one of the main thread of a program that `python -m` started: it ends what faulthandler writes."""


class ChildLog:
    """`take` is for one thread, everything else for any."""

    def __init__(self) -> None:
        self.num_stacks = 0
        """How many times it has written, to the end, where its threads are."""
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
            self.num_stacks += sum(LAST_FRAME in line for line in lines)
            self._changed.notify_all()
        write_beside_bars(text)

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines, oldest first."""
        with self._changed:
            return (*self._last, *filter(str.strip, [self._unfinished_line]))[-LOG_TAIL_LINES:]

    def wait(self, num_stacks: int, deadline: Deadline) -> None:
        """Until it has written more than `num_stacks` times where its threads are."""
        with self._changed:
            self._changed.wait_for(lambda: self.num_stacks > num_stacks, deadline.remaining_s)


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
