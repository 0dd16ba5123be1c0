"""The commands of `headrace bench`, with their arguments and modules. A command's module is imported when it runs."""

from __future__ import annotations

import argparse
import importlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.core.options.engine_options import Options
from headrace.core.options.parsing import add_options
from headrace.frontend.bench import options as declared

PLOT_FORMATS = ("png", "svg", "html")


def _compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("base", metavar="A", help="A result, or a folder of results of one thing")
    parser.add_argument("new", metavar="B", help="What to compare with it")
    parser.add_argument("--json", action="store_true", help="Print JSON")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Of the resampling")


def _plot_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="+", metavar="RESULT", help="Result files, or folders of them")
    parser.add_argument("-o", "--output", default="benchmark", metavar="NAME", help="Files are NAME.png and so on")
    parser.add_argument(
        "--format", action="append", choices=PLOT_FORMATS, help="Only this kind of file; repeatable (default: all)"
    )


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
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


_WITHOUT_EFFECT = {
    "--trust-remote-code": "a tokenizer.json holds no code",
    "--tokenizer-mode": "--tokenizer names a tokenizer.json, which says what it is",
    "--skip-tokenizer-init": "without --tokenizer none is read",
}


class _Without(argparse.Action):
    """An option of vLLM's that is accepted with a note that it has no effect."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        name = self.option_strings[0]
        print(f"headrace: {name} has no effect: {_WITHOUT_EFFECT[name]}", file=sys.stderr)


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    for name in _WITHOUT_EFFECT:
        parser.add_argument(
            name, action=_Without, nargs=None if name.endswith("mode") else 0, help=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
        )  # fmt: skip


class Command(NamedTuple):
    """A command. It is the function `bench_<name>(arguments)` of `module`, which returns the exit status."""

    module: str
    description: str
    """The text of its `--help`; the first line is shown in the list of commands."""
    structs: Sequence[type[msgspec.Struct]] = ()
    """Its options. If two structs declare the same name (--seed), the later one counts."""
    arguments: Callable[[argparse.ArgumentParser], None] | None = None
    """Adds arguments that are not declared in `structs`."""


COMMANDS: Mapping[str, Command] = types.MappingProxyType(
    {
        "latency": Command(
            "offline",
            "Time one batch of one shape, again and again, in our engine.",
            (declared.LatencyOptions, declared.ResultOptions, Options),
        ),
        "throughput": Command(
            "offline",
            "Give our engine all requests of a workload at once, and tell tokens per second.",
            (Options, declared.ThroughputOptions, declared.WorkloadOptions, declared.ResultOptions),
        ),
        "serve": Command(
            "serve",
            """Put an open-loop load on any server of OpenAI's API.

Requests are sent when they are due, whatever the server does; latencies count from then. Failures are counted by
cause. The server may be ours, vLLM's, SGLang's or llama.cpp's.""",
            (
                declared.TargetOptions,
                declared.WorkloadOptions,
                declared.TrafficOptions,
                declared.SamplingOptions,
                declared.ServingResultOptions,
            ),
            arguments=_serve_arguments,
        ),
        "startup": Command(
            "startup",
            """Time starts of our engine to the first token, cold and warm, by phase.

A cold start finds nothing compiled; the model's file may still be in the machine's memory.""",
            (declared.StartupOptions, declared.ResultOptions, Options),
        ),
        "overhead": Command(
            "overhead",
            "Measure what everything but the model costs, with an engine that computes nothing.",
            (declared.OverheadOptions, declared.ResultOptions),
        ),
        "sweep": Command(
            "sweep",
            """Run a grid over options of a server and of the load on it, and plot throughput against latency.

Parameter files hold a list of objects of options, or an object of such by name. Each run is a file of its own, so
--resume goes on with a sweep that was interrupted.""",
            arguments=_sweep_arguments,
        ),
        "compare": Command(
            "results.compare",
            "Compare two results, or two folders of runs, and say which differences are more than chance.",
            arguments=_compare_arguments,
        ),
        "plot": Command(
            "results.plot",
            """Draw results: PNG, SVG, and a self-contained HTML page.

Several results of one benchmark are drawn over each other. A sweep's summary.json gives a Pareto plot.""",
            arguments=_plot_arguments,
        ),
    }
)


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of one command to its parser."""
    command = COMMANDS[name]
    parser.conflict_handler = "resolve"
    for struct in command.structs:
        is_engine = struct is Options
        add_options(parser, struct, positional_model=is_engine, folded=is_engine)
    if command.arguments is not None:
        command.arguments(parser)


def run(name: str, arguments: argparse.Namespace) -> int:
    """Runs a command, and returns its exit status. Raises HeadraceError."""
    module = importlib.import_module(f"headrace.frontend.bench.{COMMANDS[name].module}")
    status: int = getattr(module, f"bench_{name}")(arguments)
    return status
