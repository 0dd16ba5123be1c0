"""Give our engine all requests of a workload at once, and tell tokens per second."""

from __future__ import annotations

import argparse

from headrace.core.options.parsing import add_options
from headrace.frontend.bench.options import ResultOptions, ThroughputOptions, WorkloadOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.conflict_handler = "resolve"  # --seed is the engine's and the workload's
    add_options(parser)
    for struct in (ThroughputOptions, WorkloadOptions, ResultOptions):
        add_options(parser, struct)


def run(arguments: argparse.Namespace) -> int:
    from headrace.frontend.bench.offline import bench_throughput

    return bench_throughput(arguments)
