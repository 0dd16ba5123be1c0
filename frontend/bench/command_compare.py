"""Compare two results, or two folders of runs, and say which differences are noise."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", metavar="A", help="A result, or a folder of results of one thing")
    parser.add_argument("new", metavar="B", help="What to compare with it")
    parser.add_argument("--json", action="store_true", help="Print JSON")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Of the resampling")


def run(arguments: argparse.Namespace) -> int:
    from headrace.frontend.bench.compare import bench_compare

    return bench_compare([arguments.base], [arguments.new], as_json=arguments.json, seed=arguments.seed)
