"""Measure servers, throughput, latency, start-up and overhead; compare and plot results.

Commands and options are named as those of `vllm bench`. Results are JSON files that hold the machine, the versions,
the seed and the raw samples; `compare` says which differences are noise, `plot` draws them.
"""

from __future__ import annotations

import argparse

from headrace.ipc.failure import OptionError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from headrace.frontend.bench import commands

    parser.usage = "headrace bench [-h] COMMAND ..."
    column = "COMMAND".ljust(14)
    subparsers = parser.add_subparsers(dest="bench_command", metavar=column, title="benchmarks", prog="headrace bench")
    for name, command in commands.COMMANDS.items():
        text = command.description
        commands.add_arguments(name, subparsers.add_parser(name, help=text.splitlines()[0], description=text))


def run(arguments: argparse.Namespace) -> int:
    from headrace.frontend.bench import commands

    if arguments.bench_command is None:
        raise OptionError(f"name what to measure: {', '.join(commands.COMMANDS)}")
    return commands.run(arguments.bench_command, arguments)
