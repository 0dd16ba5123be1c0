"""Draw results: PNG, SVG, and a self-contained HTML page.

Several results of one benchmark are drawn over each other. A sweep's summary.json gives a Pareto plot.
"""

from __future__ import annotations

import argparse

FORMATS = ("png", "svg", "html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="+", metavar="RESULT", help="Result files, or folders of them")
    parser.add_argument("-o", "--output", default="benchmark", metavar="NAME", help="Files are NAME.png and so on")
    parser.add_argument(
        "--format", action="append", choices=FORMATS, help="Only this kind of file; repeatable (default: all)"
    )


def run(arguments: argparse.Namespace) -> int:
    from headrace.frontend.bench.plot import bench_plot

    return bench_plot(arguments.results, arguments.output, arguments.format or FORMATS)
