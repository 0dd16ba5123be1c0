"""What this host reveals about the end of an engine-core process that another program started.

The process's parent knows the signal. An attached client knows only that the connection was lost, and what Linux shows
anyone: whether the process exists, how many processes the kernel killed for lack of memory, and, if the process's
stderr is a file, the end of its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from headrace.ipc.failure import Failure
from headrace.ipc.process.proc import is_dying, oom_kill_count, status_of, wants_to_run
from headrace.ipc.transport.sockets import ipc_path

END_SEEN_WITHIN_S = 1.0
"""How long a process may take to end after its connection is lost; after this it is considered hung or stopped."""
END_LOOK_S = 0.02
LOG_LINES = 10
_LOG_BYTES = 8192
_PROBE_S = 0.5
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: ucred of unix(7)
_PROGRAMS = (b"engine-core", b"headrace")
"""An engine's command line contains one of these; otherwise the pid belongs to another host or container."""


def listener_of(address: str) -> int | None:
    """The pid of the process that listens at an ipc:// address, even if stopped; None if there is none visible."""
    path = ipc_path(address)
    if path is None:
        return None
    with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
        probe.settimeout(_PROBE_S)
        probe.connect(os.fspath(path))
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(credentials)[0]) or None
    return None


def is_local(address: str) -> bool:
    """Whether what listens at the address runs on this host, so that its pid is one of this host's."""
    return address.startswith(("ipc://", "tcp://127.", "tcp://localhost:", "tcp://[::1]:"))


class EngineProcess:
    """One engine process, observed from the time of the connection on."""

    def __init__(self, pid: int, started: int) -> None:
        self.pid, self._started = pid, started
        self._log = _log_of(pid)
        self._oom_kills = oom_kill_count()
        self._used_ticks: int | None = None

    @classmethod
    def find(cls, pid: int) -> EngineProcess | None:
        """None if the process is not visible from here. pid: 0 if the engine does not report it."""
        status = status_of(pid) if pid else None
        if status is None:
            return None
        command = b""
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        if not any(name in command for name in _PROGRAMS):
            return None
        return cls(pid, status.started)

    @property
    def has_ended(self) -> bool:
        status = status_of(self.pid)
        # A pid may be reused; and a zombie has ended, but its parent has not waited for it yet.
        return status is None or status.started != self._started or status.state in "ZX"

    @property
    def is_ending(self) -> bool:
        """It has ended, or a signal that has been sent ends it."""
        return self.has_ended or is_dying(self.pid)

    def has_worked(self) -> bool:
        """Whether it has used processor time since the last call, waits for a processor, or for its memory or files:
        on a busy host an engine may say nothing for seconds and still be well. A stopped or blocked one does neither.
        """
        status = status_of(self.pid)
        if status is None or status.started != self._started:
            return False
        before, self._used_ticks = self._used_ticks, status.used_ticks
        return (before is not None and status.used_ticks > before) or wants_to_run(self.pid)

    def explain_soon(self, lost: Failure, tell: Callable[[Failure], None]) -> None:
        """Calls `tell` with the explanation, in the running asyncio loop, once the process has ended or hangs."""
        self._look(lost, tell, time.monotonic() + END_SEEN_WITHIN_S)

    def _look(self, lost: Failure, tell: Callable[[Failure], None], deadline_s: float) -> None:
        if self.has_ended or time.monotonic() > deadline_s:
            tell(self.explain(lost))
        else:
            asyncio.get_running_loop().call_later(END_LOOK_S, self._look, lost, tell, deadline_s)

    def explain(self, lost: Failure) -> Failure:
        """The failure of a lost connection, extended with what is known of the process."""
        if not self.has_ended:
            status = status_of(self.pid)
            is_stopped = status is not None and status.state in "Tt"
            how = "is stopped, by a signal or a debugger" if is_stopped else "runs, but does not answer"
            hint = f"`kill -CONT {self.pid}` lets it go on; requests must be sent again." if is_stopped else ""
            return self._failure(lost, f"its process {self.pid} {how}", hint)
        how = "ended without a word, as one does that is killed"
        if kills := oom_kill_count() - self._oom_kills:
            how += f"; since this client attached the kernel killed {kills} for lack of memory"
        log = f"its log is {self._log}" if self._log is not None else "its log, where it was started, may tell more"
        return self._failure(lost, f"its process {self.pid} {how}", f"Start it anew and attach again; {log}.")

    def _failure(self, lost: Failure, how: str, hint: str) -> Failure:
        return msgspec.structs.replace(
            lost,
            message=f"{lost.message}; {how}",
            process="engine-core",
            pid=self.pid,
            hint=hint,
            log_tail=_last_lines(self._log),
        )


def _log_of(pid: int) -> Path | None:
    """The file that its stderr is redirected to, if it is a readable file."""
    with contextlib.suppress(OSError):
        path = Path(os.readlink(f"/proc/{pid}/fd/2"))
        if path.is_file() and os.access(path, os.R_OK):
            return path
    return None


def _last_lines(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES)
            file.seek(start)
            text = file.read(_LOG_BYTES).decode(errors="replace")
    except OSError:
        return ()
    lines = text.splitlines()[1 if start else 0 :]  # the first one may be incomplete
    return tuple(line for line in lines if line.strip())[-LOG_LINES:]
