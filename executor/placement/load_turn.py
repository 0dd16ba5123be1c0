"""Turns to read weights: at most N workers of a host read at the same time, whichever programs started them.

A turn is a name in the kernel's abstract socket namespace, `headrace-NAME-0` to `headrace-NAME-(N-1)`, which one
process at a time can bind. So workers that Ray or several agents placed on one host share turns without knowing of each
other, no lock file is left behind, and a worker that dies releases its turn.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable, Iterator

RETRY_S = 0.02
"""Polling interval; a turn takes seconds, so the delay does not matter."""


@contextlib.contextmanager
def turn_to_load(name: str, most: int | None, on_wait: Callable[[], object]) -> Iterator[None]:
    """Waits for one of `most` turns (None: no limit) and holds it in the context. `on_wait`: called if it must wait.

    name: not guessable, and the same for all workers of an engine. The start-up deadline ends the wait.
    """
    if most is None:
        yield
        return
    turn = _take(name, most)
    if turn is None:
        on_wait()
    while turn is None:
        time.sleep(RETRY_S)
        turn = _take(name, most)
    with turn:
        yield


def _take(name: str, most: int) -> socket.socket | None:
    """A turn, held until the socket is closed; None when all are taken."""
    for number in range(most):
        turn = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            turn.bind(f"\0headrace-{name}-{number}")
        except OSError as error:
            turn.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return turn
    return None
