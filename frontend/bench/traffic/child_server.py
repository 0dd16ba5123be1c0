"""A server that a benchmark starts as a child process and stops at its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.ipc.failure import EngineStartError
from headrace.ipc.process.own_folder import OwnFolder

STOP_DEADLINE_S = 20.0
POLL_S = 0.05
_SHOWN_LOG_LINES = 25


class ChildServer:
    """The server's process and its log."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        """Starts the program. Raises EngineStartError if it cannot be started at all."""
        self.command, self._log = list(command), log
        with log.open("wb") as file:
            try:
                self.process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise EngineStartError(f"{self.command[0]} cannot be started: {error.strerror}") from None

    def wait_line(self, marker: str, timeout_s: float) -> str:
        """Waits for the first line of the log that contains `marker`, and returns it. Raises EngineStartError with the
        end of the log."""
        end_s = time.monotonic() + timeout_s
        while True:
            text = self._log.read_text(encoding="utf-8", errors="replace")
            for line in text.splitlines(keepends=True):
                if marker in line and line.endswith("\n"):
                    return line.strip()
            self.check(time.monotonic() > end_s, f"was not ready within {timeout_s:g} s")
            time.sleep(POLL_S)

    def check(self, failed: bool = False, how: str = "") -> None:
        """Raises EngineStartError, with the end of the log, if the server has ended or `failed` is set. how: what went
        wrong."""
        status = self.process.poll()
        if status is not None:
            failed, how = True, f"ended with exit status {status}"
        if failed:
            lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LOG_LINES:]
            raise EngineStartError(f"the server ({' '.join(self.command)}) {how}:\n" + "\n".join(lines))

    def stop(self) -> None:
        """Terminates the server, and after STOP_DEADLINE_S at most kills what is left of its process group."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_DEADLINE_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def running(command: Sequence[str]) -> Iterator[ChildServer]:
    """Runs the server while the `with` block runs."""
    with OwnFolder("bench") as folder:
        server = ChildServer(command, folder.path / "log")
        try:
            yield server
        finally:
            server.stop()
