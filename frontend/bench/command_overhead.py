"""Measure what everything but the model costs, with an engine that computes nothing."""

from __future__ import annotations

import argparse

from headrace.core.options.parsing import add_options
from headrace.frontend.bench.options import OverheadOptions, ResultOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for struct in (OverheadOptions, ResultOptions):
        add_options(parser, struct)


def run(arguments: argparse.Namespace) -> int:
    from headrace.frontend.bench.overhead import bench_overhead

    return bench_overhead(arguments)
