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
    parser.add_argument("base", metavar="A", help="Result file, or folder with results of one benchmark")
    parser.add_argument("new", metavar="B", help="Result file or folder that is compared with A")
    parser.add_argument("--json", action="store_true", help="Print JSON instead of text")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Random seed of the bootstrap (default: 0)")


def _plot_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("results", nargs="+", metavar="RESULT", help="Result files, or folders with result files")
    parser.add_argument(
        "-o",
        "--output",
        default="benchmark",
        metavar="NAME",
        help="Name of the files without extension (default: %(default)s)",
    )
    parser.add_argument(
        "--format", action="append", choices=PLOT_FORMATS, help="Write this format only; repeatable (default: all)"
    )


def _sweep_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--serve-cmd", metavar="COMMAND", help="Command that starts the server (default: it is running already)"
    )
    parser.add_argument(
        "--bench-cmd",
        metavar="COMMAND",
        default="headrace bench serve",
        help="Command that runs the load (default: %(default)s)",
    )
    parser.add_argument(
        "--after-bench-cmd", metavar="COMMAND", help="Command to execute after each run, for example to clear a cache"
    )
    parser.add_argument("--serve-params", metavar="FILE", help="JSON file with combinations of server options")
    parser.add_argument("--bench-params", metavar="FILE", help="JSON file with combinations of options of the load")
    parser.add_argument(
        "-o", "--output-dir", default="results", metavar="DIR", help="Folder for the results (default: %(default)s)"
    )
    parser.add_argument(
        "-e",
        "--experiment-name",
        metavar="NAME",
        help="Name of the folder below output-dir (default: the time of the start)",
    )
    parser.add_argument("--num-runs", type=int, default=3, metavar="N", help="Runs of each combination (default: 3)")
    parser.add_argument(
        "--server-ready-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="Time limit of starting a server (default: 300)",
    )
    parser.add_argument("--continue-on-error", action="store_true", help="Continue with the next server if a run fails")
    parser.add_argument("--resume", action="store_true", help="Run only the combinations that have no result yet")
    parser.add_argument("--dry-run", action="store_true", help="Print the commands without running them")
    parser.add_argument("--show-stdout", action="store_true", help="Show the output of the commands")


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
            "Measure the latency of a batch of requests, without an HTTP server.",
            (declared.LatencyOptions, declared.ResultOptions, Options),
        ),
        "throughput": Command(
            "offline",
            "Measure offline throughput: submit all requests of a workload at once, without an HTTP server.",
            (Options, declared.ThroughputOptions, declared.WorkloadOptions, declared.ResultOptions),
        ),
        "serve": Command(
            "serve",
            """Measure a server with OpenAI's API under load: throughput, time to first token, inter-token latency.

The load is open-loop: requests are sent when they are due, however slow the server is, and latencies count from then.
Failures are counted by cause. The server may be Headrace, vLLM, SGLang or llama.cpp.""",
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
            """Measure the time from an engine's start to its first token, cold and warm, by phase.

A cold start finds nothing compiled; the model's file may still be in the machine's memory.""",
            (declared.StartupOptions, declared.ResultOptions, Options),
        ),
        "overhead": Command(
            "overhead",
            "Measure the overhead of everything but the model, with an engine that computes nothing.",
            (declared.OverheadOptions, declared.ResultOptions),
        ),
        "sweep": Command(
            "sweep",
            """Run `bench serve` with each combination of server and load options, and plot throughput against latency.

A parameter file holds a JSON list of objects with options, or an object with such objects by name. Each run is stored
in a file of its own, so that --resume can continue a sweep that was interrupted.""",
            arguments=_sweep_arguments,
        ),
        "compare": Command(
            "results.compare",
            "Compare two results, or two folders with results, and show which differences are significant.",
            arguments=_compare_arguments,
        ),
        "plot": Command(
            "results.plot",
            """Plot results as PNG, SVG and a self-contained HTML page.

Several results of one benchmark share their plots. The summary.json of a sweep gives a Pareto plot.""",
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
