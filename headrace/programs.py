"""The installed programs. An interrupt (Ctrl-C) ends them quietly with status 130, whatever they do when it comes.

from the first line here       nothing is begun that must be ended in order: the process exits at once
a command runs                 KeyboardInterrupt, or the command's own handler (an event loop's, an engine core's)
the command is over            as at first
"""

import atexit
import os
import signal
import sys

INTERRUPTED = 130


def _exit_at_once(*_: object) -> None:
    os._exit(INTERRUPTED)


# Before any other import, as those take most of a start.
signal.signal(signal.SIGINT, _exit_at_once)
# Registered first, so done last: while the interpreter takes itself down, no handler stands, and the status is decided.
atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def headrace() -> int:
    """The `headrace` command; its exit status."""
    from headrace.frontend.cli.main import main

    sys.unraisablehook = _exit_on_lost_interrupt
    signal.signal(signal.SIGINT, _exit_at_once)  # a command may leave another handler when it is interrupted
    try:
        return main()
    except KeyboardInterrupt:  # a second one, while the first was dealt with
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
    """The `engine-core` command, which sets a handler of its own once there is something to stop."""
    from headrace.core.process.daemon import main

    main()


def _exit_on_lost_interrupt(unraisable: "sys.UnraisableHookArgs") -> None:
    """An interrupt that comes while a destructor or a callback of C code runs would be printed, and forgotten."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        os._exit(INTERRUPTED)
    sys.__unraisablehook__(unraisable)
