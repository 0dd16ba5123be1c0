"""Run a grid over options of a server and of the load on it, and plot throughput against latency.

Parameter files hold a list of objects of options, or an object of such by name. Each run is a file of its own, so
--resume goes on with a sweep that was interrupted.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--serve-cmd", metavar="COMMAND", help="What starts the server (default: one runs already)")
    parser.add_argument(
        "--bench-cmd", metavar="COMMAND", default="headrace bench serve", help="The load (default: %(default)s)"
    )
    parser.add_argument("--after-bench-cmd", metavar="COMMAND", help="To be run after each run, as to clear a cache")
    parser.add_argument("--serve-params", metavar="FILE", help="Combinations of the server's options")
    parser.add_argument("--bench-params", metavar="FILE", help="Combinations of the load's options")
    parser.add_argument("-o", "--output-dir", default="results", metavar="DIR", help="(default: %(default)s)")
    parser.add_argument(
        "-e", "--experiment-name", metavar="NAME", help="A folder in it (default: the time of the start)"
    )
    parser.add_argument("--num-runs", type=int, default=3, metavar="N", help="Of each combination (default: 3)")
    parser.add_argument(
        "--server-ready-timeout", type=float, default=300.0, metavar="SECONDS", help="For each start (default: 300)"
    )
    parser.add_argument("--continue-on-error", action="store_true", help="Go on with the next server when a run fails")
    parser.add_argument("--resume", action="store_true", help="Run only what has no result yet")
    parser.add_argument("--dry-run", action="store_true", help="Print the commands alone")
    parser.add_argument("--show-stdout", action="store_true", help="Let the commands print")


def run(arguments: argparse.Namespace) -> int:
    from headrace.frontend.bench.sweep import bench_sweep

    return bench_sweep(arguments)
