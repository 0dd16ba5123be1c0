"""The start and end of every program that Headrace starts as a child."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NoReturn

from headrace.ipc.process.log import drain_stderr

_PR_SET_PDEATHSIG = 1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Each of them asks for an orderly shutdown."""


def heeded_signals() -> list[signal.Signals]:
    """Those of STOP_SIGNALS that this program was not started to ignore: `nohup` has it ignore SIGHUP, and a shell's
    script SIGINT in what it runs in the background."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def die_with_parent(parent: int | None = None) -> None:
    """Makes the kernel kill this process when the thread that started it ends, in case orderly shutdown fails.

    parent: its id, for a child that nothing else would tell of an end before this call.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def leave_signals_to_parent() -> None:
    """Ignores the signals that reach all processes at once (systemd's, `docker stop`'s, a closed terminal's).

    The parent obeys them: it ends its children in order, once their work for it is done.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def show_stacks_when_asked() -> None:
    """On SIGUSR1, and before a crash, this process writes the stacks of its threads to stderr."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


@contextlib.contextmanager
def exit_when_slow(after_s: float, sentence: Callable[[], str], status: int) -> Iterator[None]:
    """Limits the block to `after_s`; then the process prints the sentence and its stacks, and exits with `status`.

    For programs that no parent watches.
    """

    def end() -> None:
        print(sentence(), file=sys.stderr, flush=True)
        drain_stderr()
        faulthandler.dump_traceback(all_threads=True)
        os._exit(status)

    timer = threading.Timer(after_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def leave(status: int) -> NoReturn:
    """Exits at once: everything is closed by now, and tearing down the interpreter and torch takes a second or two."""
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError):  # stdout may have no reader any more
        sys.stdout.flush()
    drain_stderr()
    os._exit(status)
