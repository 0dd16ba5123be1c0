"""An engine's program that is started before its options are known: meanwhile it imports what every engine needs.

`headrace serve` spends as long on its options as the program spends on its imports. The program gets its options, as
any child does, in its Start message; it ends by itself when this process does, and is ended when no engine is started
here after all.

Imports little, as it comes before everything else.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Sequence

from headrace.ipc.process.program import (
    child_environment,
    occupy_standard_descriptors,
    python_command,
    starting_folder,
)

ENGINE = ("-m", "headrace.core.process.daemon", "--parent-fd")
"""The arguments of an engine's program, but for the descriptor of its channel, which comes last."""


class EarlyProgram:
    """A program that waits for its Start message at the other end of `ours`."""

    def __init__(self) -> None:
        """Raises OSError."""
        self.environment, self.folder = child_environment(), _folder()
        occupy_standard_descriptors()
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.process = spawn(ENGINE, theirs)
        except OSError:
            self.ours.close()
            raise

    @property
    def would_be_the_same(self) -> bool:
        """A program that is started now would be no other one."""
        is_alive = self.process.poll() is None
        return is_alive and self.environment == child_environment() and self.folder == _folder()

    def begun(self) -> subprocess.Popen[bytes]:
        """What `spawn` would return."""
        return self.process

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.ours.close()
        if self.process.stdout is not None:
            self.process.stdout.close()


_early: list[EarlyProgram] = []
"""At most one."""


def start_early() -> None:
    """Starts an engine's program for the first engine that this process starts."""
    with contextlib.suppress(OSError):  # starting the engine will say why
        _early.append(EarlyProgram())


def take_early(arguments: Sequence[str]) -> EarlyProgram | None:
    """The program that was started early, if these arguments would start the same one now. One that would be another,
    as the environment has changed since, is ended."""
    if not _early or tuple(arguments) != ENGINE:
        return None
    if _early[0].would_be_the_same:
        return _early.pop()
    drop_early()
    return None


def drop_early() -> None:
    """Ends the program that was started early, unless it has become an engine."""
    while _early:
        _early.pop().end()


def spawn(arguments: Sequence[str], theirs: socket.socket, pass_fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """Starts `python arguments...` with the descriptor of `theirs`, its end of the channel, as its last argument, and
    closes that end here. Raises OSError."""
    with theirs:
        return subprocess.Popen(
            python_command(*arguments, str(theirs.fileno())),
            cwd=starting_folder(),
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno(), *pass_fds],
            # The terminal's Ctrl-C goes only to the parent, which stops the child in order.
            start_new_session=True,
        )


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None
