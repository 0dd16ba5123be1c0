"""`headrace bench sweep`: runs a grid of server options and load options, and draws a Pareto plot.

Each combination of `--serve-params` and `--bench-params` is run `--num-runs` times. Every run writes its own file, so
that an interrupted sweep can be resumed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headrace.frontend.bench.options import ResultOptions, TargetOptions
from headrace.frontend.bench.results import record as records
from headrace.frontend.bench.results.metrics import columns, number
from headrace.frontend.bench.serve import target_of
from headrace.frontend.bench.traffic.child_server import ChildServer, running
from headrace.frontend.bench.traffic.http_client import ExchangeError, Pool, Whole
from headrace.frontend.client.event_loop import run_async
from headrace.ipc.failure import HeadraceError, OptionError
from headrace.ipc.process.program import python_command

SUMMARY = "summary.json"
FIGURES = (
    "request_throughput",
    "output_throughput",
    "median_ttft_ms",
    "median_tpot_ms",
    "median_itl_ms",
    "p99_ttft_ms",
)
_READY_PERIOD_S = 0.2
_LONGEST_NAME = 160
"""Bytes of a point's name; a file's may have 255."""


class Combination(NamedTuple):
    """One point of the grid."""

    name: str
    serve: dict[str, Any]
    bench: dict[str, Any]


def bench_sweep(arguments: argparse.Namespace) -> int:
    """Returns exit status 1 if a run failed and `--continue-on-error` is set. Raises OptionError, and without
    `--continue-on-error` the error of the first run that failed."""
    points = combinations(
        read_params(arguments.serve_params, "serve-params"), read_params(arguments.bench_params, "bench-params")
    )
    if arguments.num_runs < 1:
        raise OptionError(f"--num-runs={arguments.num_runs}: it must be at least 1")
    if arguments.serve_params and not arguments.serve_cmd:
        raise OptionError("--serve-params needs a server to give them to: name it with --serve-cmd")
    folder = Path(arguments.output_dir) / (arguments.experiment_name or time.strftime("%Y%m%d-%H%M%S", time.gmtime()))
    if any(folder.glob("*-run*.json")) and not arguments.resume:
        raise OptionError(f"{folder} has results already: go on with --resume, or name another --experiment-name")
    serve, bench = shlex.split(arguments.serve_cmd or ""), own_program(shlex.split(arguments.bench_cmd))
    if arguments.dry_run:
        for serve_params, same in itertools.groupby(points, key=lambda point: point.serve):
            print(*([shlex.join([*serve, *flags(serve_params)])] if serve else []), sep="\n")
            for point in same:
                print("  " + shlex.join([*bench, *flags(point.bench)]))
        return 0
    check_parameters(points, folder, arguments)
    failed = run_grid(points, serve, bench, folder, arguments)
    summary = summarise(points, folder, arguments)
    if summary is not None:
        print(sweep_table(summary))
        print(f"\nwrote {folder / SUMMARY}")
        _plot(folder)
    return 1 if failed else 0


def check_parameters(points: Sequence[Combination], folder: Path, arguments: argparse.Namespace) -> None:
    """Raises OptionError if a result to be kept is of other parameters, which its name need not show."""
    for point in points:
        for path in run_paths(point, folder, arguments.num_runs):
            if not path.exists():
                continue
            had = records.read(path).get("sweep")
            if had is not None and had != _asked(point, arguments):
                changed = ", ".join(name for name, value in _asked(point, arguments).items() if had.get(name) != value)
                raise OptionError(f"--resume: {path} is of another {changed}: remove it, or name another experiment")


def _asked(point: Combination, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a point's result depends on."""
    return {
        "serve_params": point.serve,
        "bench_params": point.bench,
        "serve_cmd": arguments.serve_cmd,
        "bench_cmd": arguments.bench_cmd,
    }


def run_grid(
    points: Sequence[Combination], serve: list[str], bench: list[str], folder: Path, arguments: argparse.Namespace
) -> int:
    """Runs the points without a result, with one server for each group of points that share its options.

    A failure skips the rest of its group. Returns the number of groups that failed."""
    failed = 0
    for serve_params, group in itertools.groupby(points, key=lambda point: point.serve):
        todo = [
            (point, path)
            for point in group
            for path in run_paths(point, folder, arguments.num_runs)
            if not path.exists()
        ]
        if not todo:
            continue
        try:
            with _server(serve, serve_params, bench, arguments) as server:
                for point, path in todo:
                    print(f"{path.stem} ...", file=sys.stderr, flush=True)
                    _one_run(bench, point, path, server, arguments)
        except HeadraceError as error:
            if not arguments.continue_on_error:
                raise
            failed += 1
            print(f"headrace: {error}", file=sys.stderr)
    return failed


def _one_run(
    bench: list[str], point: Combination, path: Path, server: ChildServer | None, arguments: argparse.Namespace
) -> None:
    """Runs the load once. Raises ResultError with the end of the command's output, and EngineStartError if the server
    has ended."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [*bench, *flags(point.bench), "--output-json", str(path), "--label", point.name, "--no-machine-probe"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=not arguments.show_stdout, text=True, check=False
    )
    if server is not None:
        server.check()
    if done.returncode or not path.exists():
        path.unlink(missing_ok=True)  # so that --resume repeats a run in which every request failed
        said = f"{done.stdout or ''}{done.stderr or ''}".strip()
        raise records.ResultError(f"{shlex.join(command)} ended with exit status {done.returncode}:\n{said[-1500:]}")
    records.write(path, {**records.read(path), "sweep": _asked(point, arguments)})
    if arguments.after_bench_cmd:
        subprocess.run(shlex.split(arguments.after_bench_cmd), check=False, capture_output=not arguments.show_stdout)


@contextlib.contextmanager
def _server(
    serve: list[str], params: dict[str, Any], bench: list[str], arguments: argparse.Namespace
) -> Iterator[ChildServer | None]:
    """Starts a group's server and waits until it is ready; yields None without --serve-cmd, when one runs already."""
    if not serve:
        yield None
        return
    with running([*own_program(serve), *flags(params)]) as server:
        run_async(lambda: _until_ready(server, bench, arguments.server_ready_timeout))
        yield server


async def _until_ready(server: ChildServer, bench: list[str], timeout_s: float) -> None:
    """Waits until the server lists its models at the address of the load. Raises EngineStartError with the end of the
    server's log."""
    import asyncio

    target = target_of(_where(bench))
    pool = Pool(target, connect_timeout_s=5, stall_timeout_s=10, request_timeout_s=10)
    end_s = time.monotonic() + timeout_s
    try:
        while True:
            server.check(time.monotonic() > end_s, f"did not answer at {target.url} within {timeout_s:g} s")
            reader = Whole()
            with contextlib.suppress(ExchangeError):
                await pool.send(target.get("/v1/models"), reader)
            health = Whole()
            with contextlib.suppress(ExchangeError):
                await pool.send(target.get("/health"), health)
            if reader.status == 200 and health.status in (200, 404):
                return
            await asyncio.sleep(_READY_PERIOD_S)
    finally:
        await pool.close()


def _where(bench: Sequence[str]) -> TargetOptions:
    """The address to which `bench serve` with these arguments sends its requests."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, kind in (("--base-url", str), ("--host", str), ("--port", int)):
        parser.add_argument(name, type=kind, default=argparse.SUPPRESS)
    found, _ = parser.parse_known_args(list(bench))
    return TargetOptions(**vars(found))


def own_program(command: list[str]) -> list[str]:
    """Makes `headrace ...` run with this Python, whatever PATH has."""
    if command and command[0] == "headrace":
        return python_command("-m", "headrace", *command[1:])
    return command


def read_params(path: str | None, option: str) -> list[tuple[str, dict[str, Any]]]:
    """Named combinations from a JSON file: a list of objects, or an object of them by name. Raises OptionError."""
    if path is None:
        return [("", {})]
    try:
        content = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise OptionError(f"--{option}={path}: {error}") from None
    if isinstance(content, list) and all(isinstance(each, dict) for each in content):
        found = [(str(each.pop("_benchmark_name", "")) or _name_of(each), each) for each in content]
    elif isinstance(content, dict) and all(isinstance(each, dict) for each in content.values()):
        found = list(content.items())
    else:
        raise OptionError(f"--{option}={path}: it must be a list of objects of options, or an object of such by name")
    names = [name for name, _ in found]
    if not found or len(set(names)) < len(names):
        raise OptionError(f"--{option}={path}: it must name at least one combination, and none twice")
    return found


def combinations(
    serve: Sequence[tuple[str, dict[str, Any]]], bench: Sequence[tuple[str, dict[str, Any]]]
) -> list[Combination]:
    """Every combination of a server and a load, grouped by server. Each has a name of its own, fit for a file."""
    points = [
        Combination("-".join(filter(None, (serve_name, bench_name))) or "default", serve_params, bench_params)
        for serve_name, serve_params in serve
        for bench_name, bench_params in bench
    ]
    # Compared without case, as some file systems do.
    common = Counter(_safe(point.name).lower() for point in points)
    return [
        point._replace(name=_distinct(point) if common[_safe(point.name).lower()] > 1 else _safe(point.name))
        for point in points
    ]


def _name_of(params: dict[str, Any]) -> str:
    return "_".join(f"{name.replace('_', '-')}={value}" for name, value in params.items())


def _safe(name: str) -> str:
    safe = "".join(character if character.isalnum() or character in "-_=.," else "_" for character in name)
    return safe if len(safe.encode()) <= _LONGEST_NAME else f"{safe[: _LONGEST_NAME // 4]}-{_digest(name)}"


def _distinct(point: Combination) -> str:
    return f"{_safe(point.name)}-{_digest([point.name, point.serve, point.bench])}"


def _digest(of: Any) -> str:
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:8]


def run_paths(point: Combination, folder: Path, num_runs: int) -> list[Path]:
    return [folder / f"{point.name}-run{number}.json" for number in range(num_runs)]


def flags(params: dict[str, Any]) -> list[str]:
    """Options as command-line flags: a boolean as --name or --no-name, a list as several values, and nothing for null.
    Of a dotted name only the option's own part is spelt as flags are: the rest are keys."""
    found: list[str] = []
    for name, value in params.items():
        option, dot, keys = name.removeprefix("--").partition(".")
        flag = f"--{option.replace('_', '-')}{dot}{keys}"
        if value is None:
            continue
        if isinstance(value, bool):
            whole = f"{flag}={json.dumps(value)}" if dot else flag if value else "--no-" + flag.removeprefix("--")
            found.append(whole)
        elif isinstance(value, list):
            found += [flag, *map(str, value)]
        else:
            found += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


def summarise(points: Sequence[Combination], folder: Path, arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Writes and returns a summary with the medians of each point's runs; None if no run has a result."""
    rows = []
    for point in points:
        runs = [records.read(path) for path in run_paths(point, folder, arguments.num_runs) if path.exists()]
        if not runs:
            continue
        row: dict[str, Any] = {"name": point.name, "serve": point.serve, "bench": point.bench, "num_runs": len(runs)}
        for figure in FIGURES:
            values = [run["results"][figure] for run in runs if run["results"].get(figure) is not None]
            row[figure] = statistics.median(values) if values else None
        row["failed"] = sum(run["results"].get("failed", 0) for run in runs)
        rows.append(row)
    if not rows:
        return None
    asked = {name: getattr(arguments, name) for name in ("serve_cmd", "bench_cmd", "num_runs")}
    record = records.new_record("sweep", ResultOptions(label=folder.name), asked, 0)
    record["results"] = {"points": rows}
    record["samples"] = {
        point.name: [path.name for path in run_paths(point, folder, arguments.num_runs) if path.exists()]
        for point in points
    }
    records.write(folder / SUMMARY, record)
    return record


def sweep_table(record: dict[str, Any]) -> str:
    rows = [["", "runs", "out tok/s", "req/s", "TTFT ms", "TPOT ms", "TTFT p99 ms", "failed"]]
    keys = ("output_throughput", "request_throughput", "median_ttft_ms", "median_tpot_ms", "p99_ttft_ms", "failed")
    for point in record["results"]["points"]:
        rows.append([point["name"], str(point["num_runs"]), *(number(point[key]) for key in keys)])
    return columns(rows, indent=0)


def _plot(folder: Path) -> None:
    """Writes the Pareto plot beside the results, if matplotlib is installed."""
    from headrace.frontend.bench.results.plot import plot

    try:
        plot([str(folder / SUMMARY)], str(folder / "pareto"), ("png", "svg", "html"))
    except OptionError as error:
        print(f"no plot: {error}", file=sys.stderr)
