"""The installed programs. An interrupt (Ctrl-C) ends them quietly with status 130 at any time.

at the start                   nothing needs an orderly end yet: the process exits at once
while a command runs           KeyboardInterrupt, or the command's own handler (an event loop's, an engine core's)
after the command              as at the start
"""

import atexit
import os
import signal
import sys

INTERRUPTED = 130
_START_ENGINES = {"chat", "complete", "demo", "serve"}
"""Commands that start an engine here, unless an option says that there is one already."""
_OF_NO_ENGINE = {"-h", "--help", "--engine", "--url", "--coordinator"}


def _exit_at_once(*_: object) -> None:
    os._exit(INTERRUPTED)


# Before any other import.
if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a signal that is ignored at the start stays ignored
    signal.signal(signal.SIGINT, _exit_at_once)
# Registered first, so called last: during the interpreter's shutdown SIGINT is ignored, as the status is decided.
atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)

from headrace.core.process.early import drop_early, start_early  # noqa: E402 - imports take most of the start-up time
from headrace.ipc.process.init import run_below_init  # noqa: E402


def headrace() -> int:
    """The `headrace` command; returns its exit status."""
    run_below_init()
    if (
        sys.argv[1:2]
        and sys.argv[1] in _START_ENGINES
        and _OF_NO_ENGINE.isdisjoint(each.partition("=")[0] for each in sys.argv)
    ):
        start_early()
    try:
        return _run_command()
    finally:
        drop_early()


def _run_command() -> int:
    from headrace.frontend.cli.main import main

    sys.unraisablehook = _exit_on_lost_interrupt
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _exit_at_once)  # a command may leave another handler when it is interrupted
    try:
        return main()
    except KeyboardInterrupt:  # a second interrupt, while the first one was being handled
        os._exit(INTERRUPTED)


def openai_server() -> int:
    """`python -m headrace.entrypoints.openai.api_server --model MODEL`: `headrace serve`."""
    sys.argv.insert(1, "serve")
    return headrace()


def run_batch() -> int:
    """`python -m headrace.entrypoints.openai.run_batch -i FILE -o FILE --model MODEL`: `headrace run-batch`."""
    sys.argv.insert(1, "run-batch")
    return headrace()


def engine_core() -> None:
    """The `engine-core` command, which installs its own handler once there is something to stop."""
    run_below_init()
    from headrace.core.process.daemon import main

    main()


def _exit_on_lost_interrupt(unraisable: "sys.UnraisableHookArgs") -> None:
    """Exits on an interrupt during a destructor or a callback of C code, which Python would only print."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        os._exit(INTERRUPTED)
    sys.__unraisablehook__(unraisable)
