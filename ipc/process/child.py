"""What every program that Headrace starts as a child does at its start and at its end."""

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
"""Each of them asks for an orderly end."""


def die_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends, should the orderly ways fail."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def leave_signals_to_parent() -> None:
    """A signal to all processes at once (systemd's, `docker stop`'s, a closed terminal's) is the parent's to obey.

    It ends its children in order, once what they do for it is done.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def show_stacks_when_asked() -> None:
    """On SIGUSR1, and before a crash, this process writes to its stderr where its threads are."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


@contextlib.contextmanager
def exit_when_slow(after_s: float, sentence: Callable[[], str], status: int) -> Iterator[None]:
    """What is done within may take `after_s`; then the process says the sentence and where it hangs, and exits.

    For a program that no parent watches.
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
    """Exits at once: everything is closed by now, and tearing the interpreter and torch down takes a second or two."""
    logging.shutdown()
    with contextlib.suppress(OSError, ValueError):  # nobody may be left to read it
        sys.stdout.flush()
    drain_stderr()
    os._exit(status)
