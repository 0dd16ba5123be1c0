"""The `headrace` command on a pseudo-terminal, where tests can press Ctrl-C and Ctrl-D."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager

from patience import within

_START = (
    "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "from headrace.frontend.cli.main import main; sys.exit(main(sys.argv[1:]))"
)


class Terminal:
    """A command on a pseudo-terminal. `shown` has its output as far as it was waited for."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self._ours, self.theirs = pty.openpty()
        self.settings = termios.tcgetattr(self.theirs)
        """The terminal's settings before the command began."""
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, *arguments],
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", **(env or {})},
        )
        self.shown = ""
        self._unread = ""

    def keys(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_for(self, text: str, timeout_s: float = 30.0) -> str:
        """Reads until the text is shown, and returns the output up to its end."""
        assert self._read_until(text, timeout_s), f"no {text!r}: {self.shown + self._unread!r}"
        end = self._unread.index(text) + len(text)
        seen, self._unread = self._unread[:end], self._unread[end:]
        self.shown += seen
        return seen

    def press_until(self, key: str, text: str) -> str:
        """Presses the key every second until the text is shown, since a Ctrl-C between readline's prompt and its wait
        is lost."""
        for _ in range(30):
            self.keys(key)
            if self._read_until(text, 1.0):
                break
        return self.wait_for(text, 0.0)

    def _read_until(self, text: str, timeout_s: float) -> bool:
        end_s = time.monotonic() + timeout_s
        while text not in self._unread:
            if not self._read(end_s - time.monotonic()):
                return False
        return True

    def _read(self, timeout_s: float) -> bool:
        """Takes what the command writes within this time; False if it is nothing."""
        if not select.select([self._ours], [], [], max(0.0, timeout_s))[0]:
            return False
        self._unread += os.read(self._ours, 65536).decode("utf-8", "replace")
        return True

    def ends(self, timeout_s: float = 20.0) -> int:
        """Waits for the command to end, and returns its exit status; `shown` then has all of its output."""
        # What a command writes at its end must be taken before it ends, in case it is more than the terminal holds.
        end_s = time.monotonic() + within(timeout_s)
        while self.process.poll() is None and time.monotonic() < end_s:
            self._read(0.1)
        while self._read(0.0):
            pass
        self.shown, self._unread = self.shown + self._unread, ""
        assert self.process.returncode is not None, f"it goes on: {self.shown!r}"
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self.theirs)


@contextmanager
def on_terminal(*arguments: str, env: dict[str, str] | None = None) -> Iterator[Terminal]:
    terminal = Terminal(*arguments, env=env)
    try:
        yield terminal
    finally:
        terminal.close()
