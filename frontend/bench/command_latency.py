"""Time one batch of one shape, again and again, in our engine."""

from __future__ import annotations

import argparse

from headrace.core.options.parsing import add_options
from headrace.frontend.bench.options import LatencyOptions, ResultOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for struct in (LatencyOptions, ResultOptions):
        add_options(parser, struct)
    add_options(parser)


def run(arguments: argparse.Namespace) -> int:
    from headrace.frontend.bench.offline import bench_latency

    return bench_latency(arguments)
