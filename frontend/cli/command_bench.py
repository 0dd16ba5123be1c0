"""Measure servers, throughput, latency, start-up and overhead; compare and plot results.

Commands and options are named as those of `vllm bench`. Results are JSON files that hold the machine, the versions,
the seed and the raw samples; `compare` says which differences are noise, `plot` draws them.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from headrace.ipc.failure import OptionError

_COMMANDS = ("latency", "throughput", "serve", "startup", "overhead", "sweep", "compare", "plot")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "headrace bench [-h] COMMAND ..."
    column = "COMMAND".ljust(14)
    subparsers = parser.add_subparsers(dest="bench_command", metavar=column, title="benchmarks", prog="headrace bench")
    for name in _COMMANDS:
        module = _load(name)
        text = (module.__doc__ or "").strip()
        module.add_arguments(subparsers.add_parser(name, help=text.splitlines()[0], description=text))


def run(arguments: argparse.Namespace) -> int:
    if arguments.bench_command is None:
        raise OptionError(f"name what to measure: {', '.join(_COMMANDS)}")
    status: int = _load(arguments.bench_command).run(arguments)
    return status


def _load(name: str) -> Any:
    return importlib.import_module(f"headrace.frontend.bench.command_{name}")
