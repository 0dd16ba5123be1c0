"""The `headrace` command. A subcommand is one module, `commands/<name>.py` (with _ for -): its docstring is its help.

Exit status: 0 success, 1 an error (one sentence on stderr), 2 a wrong command line, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import importlib
import os
import pkgutil
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Any, Protocol, cast

import headrace.frontend.cli.commands
from headrace.core.options.parsing import OptionParser
from headrace.ipc.failure import EngineStartError, HeadraceError, OptionError
from headrace.ipc.process.log import printable

EXIT_ERROR, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


class CommandModule(Protocol):
    """The interface of a `commands/<name>.py`. Importing it must be cheap: it imports what it needs when it runs."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def run(self, arguments: argparse.Namespace) -> int:
        """Runs the command, and returns the exit status. Raises HeadraceError; an OptionError means a wrong command
        line."""
        ...


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    _open_what_is_closed()
    # After Ctrl-C, coroutines that never started are expected.
    warnings.filterwarnings("ignore", message="coroutine .* was never awaited", category=RuntimeWarning)
    before = signal.getsignal(signal.SIGINT)
    try:
        _set_interrupt(signal.default_int_handler)
        status = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        _set_interrupt(before)
    except KeyboardInterrupt:
        _set_interrupt(before)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has closed it
        _forget_output()
        return EXIT_ERROR
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _forget_output()
        return _complain(HeadraceError("cannot write the output: there is no space left on the device"), EXIT_ERROR)
    return status


def _set_interrupt(handler: Any) -> None:
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # since the start, so it stays so
    if threading.current_thread() is threading.main_thread() and not is_ignored:
        signal.signal(signal.SIGINT, handler)


def _run(given: list[str]) -> int:
    parser = make_parser(given)
    if given and not given[0].startswith("-") and given[0] not in commands():
        return _misused(_unknown_command(given[0]), "headrace --help")
    parsed = parser.parse_args(given)
    if parsed.version:
        parsed.command = "version"
    if parsed.command is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    try:
        return _load(parsed.command).run(parsed)
    except EngineStartError as error:  # the command line itself was valid, even if the engine refused an option
        return _complain(error, EXIT_ERROR)
    except OptionError as error:
        command = " ".join(filter(None, (parsed.command, getattr(parsed, "bench_command", None))))
        return _misused(error, f"headrace {command} --help")
    except HeadraceError as error:
        return _complain(error, EXIT_ERROR)


def _open_what_is_closed() -> None:
    """Opens closed standard streams on the null device, so that no other file or socket gets their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - as long as the process


def _forget_output() -> None:
    """Redirects stdout to the null device, since Python would try to write the buffered output again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def commands() -> tuple[str, ...]:
    """The names of all commands."""
    modules = pkgutil.iter_modules(headrace.frontend.cli.commands.__path__)
    return tuple(sorted(module.name.replace("_", "-") for module in modules))


def _load(name: str) -> CommandModule:
    return cast(CommandModule, importlib.import_module(f"headrace.frontend.cli.commands.{name.replace('-', '_')}"))


def _unknown_command(name: str) -> OptionError:
    from headrace.frontend.vllm.unsupported import COMMANDS

    if name in COMMANDS:
        return OptionError(f"there is no command {name}: {COMMANDS[name]}")
    close = difflib.get_close_matches(name, commands(), n=1)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(commands())}"
    return OptionError(f"unknown command {name}; {hint}")


def make_parser(given: list[str]) -> OptionParser:
    """The parser. Only the named command gets its arguments, since declaring those of all would slow the start-up."""
    usage = "headrace [-h] [--version] COMMAND ..."
    parser = OptionParser(prog="headrace", usage=usage, description="Headrace, an LLM inference engine.")
    parser.add_argument("--version", action="store_true", help="Print the version")
    # Padded, since argparse's column is two characters too narrow for the longest name unless the heading is longer.
    longest = max(map(len, commands()))
    column = "COMMAND".ljust(longest + 2)
    subparsers = parser.add_subparsers(dest="command", metavar=column, title="commands", prog="headrace")
    for name in commands():
        module = _load(name)
        text = (module.__doc__ or "").strip()
        sub = subparsers.add_parser(name, help=text.partition("\n")[0], description=text)  # no text with python -OO
        if name in given:
            module.add_arguments(sub)
    return parser


def _complain(error: HeadraceError, status: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    said = f"headrace: {error}" + (f"\n{error.hint}" if error.hint and error.hint not in str(error) else "")
    # A checkpoint's own text may have what a terminal takes as commands.
    print("\n".join(map(printable, said.split("\n"))), file=sys.stderr)
    return status


def _misused(error: OptionError, help_command: str) -> int:
    _complain(error, EXIT_USAGE)
    print(f"Try: {help_command}", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
