"""Result files: figures, raw samples, arguments, machine and versions of a benchmark, as JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.options.option import Secret
from headrace.core.options.values import shown_options
from headrace.frontend.bench.options import ResultOptions
from headrace.ipc.failure import HeadraceError, OptionError
from headrace.ipc.process.program import python_command

SCHEMA = 1
PROBE_TIMEOUT_S = 120.0
_ABSENT = "not installed"
_PROBE = ("-m", "headrace.kernels.cpu.linear.limits")
VERSIONS = ("headrace", "Python", "torch", "transformers", "tokenizers", "numpy", "msgspec", "pyzmq", "triton")


class ResultError(HeadraceError):
    """A result file cannot be written or read."""


def parse_pairs(pairs: Sequence[str | Secret], option: str) -> dict[str, str]:
    """A dict from KEY=VALUE pairs. Raises OptionError, which names the option."""
    found = {}
    for pair in pairs:
        key, equals, value = (pair.value if isinstance(pair, Secret) else pair).partition("=")
        if not key or not equals:
            raise OptionError(f"--{option} {pair}: it must be KEY=VALUE")
        found[key] = value
    return found


def surroundings(*, probe: bool) -> dict[str, Any]:
    """This machine and its software. probe: also measure the machine's limits, which keeps all cores busy for some
    seconds."""
    from headrace.frontend.cli.commands.collect_env import collect

    found = collect()
    about = {key.replace(" ", "_"): value for key, value in found["machine"].items() if key != "Python executable"}
    installed = found["versions"]
    return {
        "machine": {
            **about,
            "cgroup": found["cgroup"],
            "GPU": found["GPU"],
            "kernel": platform.release(),
            "load_average": os.getloadavg()[0],
            "limits": measure_limits() if probe else None,
        },
        "versions": {name: installed[name] for name in VERSIONS if installed.get(name, _ABSENT) != _ABSENT},
    }


def measure_limits() -> dict[str, Any]:
    """Memory bandwidth and arithmetic rates, measured by a child program; or the reason why they were not measured."""
    try:
        done = subprocess.run(
            python_command(*_PROBE), capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
        if done.returncode == 0:
            limits: dict[str, Any] = json.loads(done.stdout)
            return limits
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reason = str(error)
    return {"not_measured": reason}


def commit() -> dict[str, Any]:
    """The git commit that this code runs from, and whether it has changes; empty for an installed wheel."""
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(here.parent), *arguments], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    if git("ls-files", "--error-unmatch", str(here)) is None:  # a wheel installed inside another repository
        return {}
    return {"commit": git("rev-parse", "HEAD"), "modified": bool(git("status", "--porcelain", "--untracked-files=no"))}


def new_record(benchmark: str, options: ResultOptions, arguments: dict[str, Any], seed: int) -> dict[str, Any]:
    """The record of a run that is about to begin, without its results. Measures the machine's limits if the record will
    be saved. Raises OptionError."""
    return {
        "benchmark": benchmark,
        "schema": SCHEMA,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "label": options.label or "",
        "metadata": parse_pairs(options.metadata, "metadata"),
        **commit(),
        **surroundings(probe=options.machine_probe and is_kept(options)),
        "seed": seed,
        "arguments": arguments,
    }


def is_kept(options: ResultOptions) -> bool:
    return bool(options.output_json or options.save_result or options.result_filename or options.report)


def given(*structs: msgspec.Struct) -> dict[str, Any]:
    """The options that differ from their defaults: the arguments of the run."""
    found: dict[str, Any] = {}
    for struct in structs:
        found |= shown_options(struct)
    return found


def check_writable(options: ResultOptions) -> None:
    """Checks before the run that the result can be saved. Raises OptionError."""
    if not is_kept(options):
        return
    if options.report:
        from headrace.frontend.bench.results.plot import check_drawable

        check_drawable()
    path = _path_of(options, "")
    named = "output_json" if options.output_json else "result_filename" if options.result_filename else "result_dir"
    said = f"--{named.replace('_', '-')}={getattr(options, named) or '.'}"
    if path.is_dir():
        raise OptionError(f"{said}: {path} is a folder; name a file")
    if _is_special(path):
        if options.report:
            raise OptionError(f"{said}: {path} is no regular file, beside which --report could write; name a file")
        if not os.access(path, os.W_OK):
            raise OptionError(f"{said}: {path} cannot be written to")
        return
    there = next(each for each in path.absolute().parents if each.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise OptionError(f"{said}: {there} is no folder that can be written to ({why})") from None


def save(record: dict[str, Any], options: ResultOptions) -> Path | None:
    """Writes the record atomically where the options say, and returns the path; None if they do not ask for it. Raises
    ResultError."""
    if not is_kept(options):
        return None
    path = _path_of(options, record["benchmark"])
    write(path, record)
    if options.report:
        from headrace.frontend.bench.results.plot import plot

        plot([str(path)], str(path.with_suffix("")), [options.report])
    return path


def _path_of(options: ResultOptions, benchmark: str) -> Path:
    if options.output_json:
        return Path(options.output_json)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    name = options.result_filename or f"{options.label or 'headrace'}-{benchmark}-{stamp}.json"
    return Path(options.result_dir or ".") / name


def write(path: Path, record: Any) -> None:
    """Writes a record as JSON: atomically, or into what is there if that is no regular file, such as /dev/stdout, whose
    place a file must not take. Raises ResultError."""
    text = json.dumps(record, indent=1) + "\n"
    part = path.with_name(path.name + ".part")
    try:
        if _is_special(path):
            path.write_text(text, encoding="utf-8")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise ResultError(f"the result cannot be written to {path}: {error}") from None


def _is_special(path: Path) -> bool:
    """Whether the path is a device, a pipe or a link."""
    return path.is_symlink() or (path.exists() and not path.is_file())


def read(path: str | Path) -> dict[str, Any]:
    """Reads a result of `headrace bench`, and checks the fields that every reader needs. Raises ResultError."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ResultError(f"{path} is not JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("results"), dict) or "benchmark" not in record:
        raise ResultError(f"{path} is no result of `headrace bench`: it lacks `benchmark` and `results`")
    return record


def read_all(paths: Sequence[str]) -> list[tuple[Path, dict[str, Any]]]:
    """The results in these files and folders, which must be of one benchmark. Raises OptionError, ResultError."""
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise OptionError(f"{' '.join(paths)}: there is no result in it")
    found = [(file, read(file)) for file in files]
    kinds = {record["benchmark"] for _, record in found}
    if len(kinds) > 1:
        several = ", ".join(sorted(kinds))
        raise OptionError(f"{' '.join(paths)}: results of several benchmarks cannot share a plot: {several}")
    return found
