"""Time starts of our engine to the first token, cold and warm, by phase.

A cold start finds nothing compiled; the model's file may still be in the machine's memory.
"""

from __future__ import annotations

import argparse

from headrace.core.options.parsing import add_options
from headrace.frontend.bench.options import ResultOptions, StartupOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for struct in (StartupOptions, ResultOptions):
        add_options(parser, struct)
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    from headrace.frontend.bench.startup import bench_startup

    return bench_startup(arguments)
