"""`headrace bench startup`: times starts from a new process to the first token, by phase."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any

from headrace.core.options.parsing import options_from_arguments, struct_from_arguments
from headrace.core.options.values import plain_options
from headrace.frontend.bench.offline import finish, progress
from headrace.frontend.bench.options import ResultOptions, StartupOptions
from headrace.frontend.bench.results import record as records
from headrace.frontend.bench.results.metrics import columns, percentile
from headrace.ipc.cache import cache_folder
from headrace.ipc.failure import EngineStartError, OptionError
from headrace.ipc.process.own_folder import OwnFolder
from headrace.ipc.process.program import child_environment, python_command

START_TIMEOUT_S = 3600.0
_CHILD = ("-m", "headrace.frontend.bench.startup_child")
_SHOWN_ERROR_LINES = 30


def bench_startup(arguments: argparse.Namespace) -> int:
    """Raises OptionError, and EngineStartError with the end of the child's stderr."""
    asked, result = struct_from_arguments(arguments, StartupOptions), struct_from_arguments(arguments, ResultOptions)
    options = options_from_arguments(arguments)
    if asked.num_iters_cold + asked.num_iters_warm == 0:
        raise OptionError("--num-iters-cold and --num-iters-warm are both 0: nothing would be measured")
    records.check_writable(result)
    record = records.new_record("startup", result, records.given(asked, options), options.seed or 0)
    plain = json.dumps(plain_options(options))
    cold: list[dict[str, Any]] = []
    warm: list[dict[str, Any]] = []
    with progress(asked.num_iters_cold + asked.num_iters_warmup + asked.num_iters_warm, "start", result) as bar:
        for _ in range(asked.num_iters_cold):
            with empty_cache() as folder:
                cold.append(one_start(plain, {"HEADRACE_CACHE": folder}))
            bar.update()
        for index in range(asked.num_iters_warmup + asked.num_iters_warm):
            sample = one_start(plain, {})
            if index >= asked.num_iters_warmup:
                warm.append(sample)
            bar.update()
    record["results"] = {**startup_figures("cold", cold), **startup_figures("warm", warm)}
    record["samples"] = {"cold": cold, "warm": warm}
    print(startup_table(cold, warm))
    return finish(record, result)


def one_start(options: str, environment: dict[str, str]) -> dict[str, Any]:
    """One start in a new process: the seconds of each phase, in order, and in total. Raises EngineStartError."""
    began_s = time.time()
    done = subprocess.run(
        python_command(*_CHILD),
        input=options,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        env=child_environment(**environment),
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        tail = "\n".join(done.stderr.strip().splitlines()[-_SHOWN_ERROR_LINES:])
        raise EngineStartError(f"the start failed with exit status {done.returncode}:\n{tail}")
    told = json.loads(lines[-1])
    phases = {"python": told["python_s"] - began_s, **told["phases"]}
    return {"phases": phases, "total_s": sum(phases.values()), "engine": told["engine"]}


@contextlib.contextmanager
def empty_cache() -> Iterator[str]:
    """A cache folder without compiled kernels. It links to GGUF models in the user's cache, so that none is downloaded
    again."""
    own = cache_folder()
    with OwnFolder("cold") as folder:
        for name in os.listdir(own) if os.path.isdir(own) else ():
            if name.endswith(".gguf"):
                os.symlink(os.path.join(own, name), folder.path / name)
        yield str(folder.path)


def startup_figures(name: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures under vLLM's names. A phase that a start lacks counts as 0 s."""
    if not samples:
        return {}
    totals = sorted(sample["total_s"] for sample in samples)
    phases = list(dict.fromkeys(phase for sample in samples for phase in sample["phases"]))
    return {
        f"avg_{name}_startup_time": sum(totals) / len(totals),
        f"{name}_startup_percentiles": {f"{each:g}": percentile(totals, each) for each in (10, 50, 90, 99)},
        f"{name}_phases_s": {phase: _median(samples, phase) for phase in phases},
    }


def startup_table(cold: list[dict[str, Any]], warm: list[dict[str, Any]]) -> str:
    """A table of each phase's median. The engine's own phases are part of `start the engine`."""
    kinds = [(name, samples) for name, samples in (("cold", cold), ("warm", warm)) if samples]
    rows = [["seconds, median", *(f"{name} ({len(samples)})" for name, samples in kinds)]]
    phases = list(dict.fromkeys(phase for _, samples in kinds for sample in samples for phase in sample["phases"]))
    for phase in phases:
        rows.append([phase, *(f"{_median(samples, phase):.3f}" for _, samples in kinds)])
        if phase == "start the engine":
            for inner in dict.fromkeys(each for _, samples in kinds for sample in samples for each in sample["engine"]):
                rows.append([f"  {inner}", *(f"{_median(samples, inner, 'engine'):.3f}" for _, samples in kinds)])
    totals = [percentile(sorted(sample["total_s"] for sample in samples), 50) for _, samples in kinds]
    rows.append(["to the first token", *(f"{total:.3f}" for total in totals)])
    return columns(rows)


def _median(samples: list[dict[str, Any]], phase: str, where: str = "phases") -> float:
    return percentile(sorted(sample[where].get(phase, 0.0) for sample in samples), 50)
