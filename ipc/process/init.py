"""A program that is process 1, as a container's command is, has init's duty to wait for orphans, which else stay in
the process table as zombies.

    process 1 (this file): forwards signals, waits for every process that ends
        `-- the command: everything else, as it would be anywhere
              `-- engines, HTTP processes, workers ...; their orphans go to process 1

The duty is not the command's own: waiting for any child would take the exit statuses for which subprocess and asyncio
wait.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Set
from typing import NoReturn

_OF_THIS_PROCESS = {
    *(signal.SIGCHLD, signal.SIGKILL, signal.SIGSTOP, signal.SIGTTIN, signal.SIGTTOU),
    *(signal.SIGFPE, signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS),
}


def run_below_init() -> None:
    """In process 1: goes on in a child, whose end, with its status, is this process's too. Elsewhere: does nothing.

    Call before any thread is started.
    """
    if os.getpid() != 1:
        return
    forwarded = signal.valid_signals() - _OF_THIS_PROCESS
    before = signal.pthread_sigmask(signal.SIG_BLOCK, forwarded | {signal.SIGCHLD})
    command = os.fork()
    if command:
        _be_init(command, forwarded)
    _lead_the_terminal()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _be_init(command: int, forwarded: Set[int]) -> NoReturn:
    while True:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # the command is there until it is waited for here
            if ended[0] == command:
                code = os.waitstatus_to_exitcode(ended[1])
                os._exit(code if code >= 0 else 128 - code)  # what else runs ends with process 1
        number = signal.sigwaitinfo(forwarded | {signal.SIGCHLD}).si_signo
        if number != signal.SIGCHLD:
            os.kill(command, number)


def _lead_the_terminal() -> None:
    """The command becomes a process group of its own, and the terminal's if there is one: Ctrl-C must not reach it
    twice, from there and from process 1."""
    os.setpgid(0, 0)
    if sys.stdin is None or not sys.stdin.isatty():
        return
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # which the terminal sends to groups that are not its own
    with contextlib.suppress(OSError):
        os.tcsetpgrp(sys.stdin.fileno(), os.getpgrp())
    signal.signal(signal.SIGTTOU, before)
