"""Runs test cases in a separate process, for example one that selects Triton's interpreter before it imports triton.

A runner is a script that passes its cases to `run_cases`. A test module reads the names of the cases from the source
(importing it would import triton), makes each a test, and runs those that pytest selected in one process. A function
`case_NAME` is a case; `long_case_NAME` is one for `make test-system`.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

PROCESSOR_S = 280
"""Limit on the CPU time of a case; elapsed time depends on the load of the machine."""
TIMEOUT_S = 1500
PATIENT = pytest.mark.timeout(TIMEOUT_S + 60)
"""For modules in which the first test waits for the cases of all tests."""
PREFIX = re.compile(r"(long_)?case_")


def cases_of(module: Any) -> dict[str, Callable[..., None]]:
    found = {name: function for name, function in vars(module).items() if PREFIX.match(name)}
    return {PREFIX.sub("", name, count=1): function for name, function in found.items()}


def parameters(paths: Iterable[Path], name_of: Callable[[Path, str], str] = lambda _, name: name) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: the names of the cases in these files, long ones marked `system`."""
    found = []
    for path in paths:
        for is_long, name in re.findall(r"^def (long_)?case_(\w+)\(", path.read_text(), re.MULTILINE):
            found.append(pytest.param(name_of(path, name), marks=[pytest.mark.system] if is_long else []))
    return found


def failures(request: pytest.FixtureRequest, runner: Path, *arguments: str) -> dict[str, str]:
    """Runs the cases that pytest selected from the module of `request`. Returns each one's traceback, "" if it
    passed."""
    names = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]  # type: ignore[attr-defined]
    result = subprocess.run(
        [sys.executable, str(runner), *arguments, *names],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    ended = f"the process of the cases ended with {result.returncode} after {[line['name'] for line in lines]}"
    assert result.returncode == 0, f"{ended}:\n{result.stderr}"
    return {line["name"]: line["failure"] for line in lines}


def run_cases(cases: Mapping[str, Callable[[], None]], chosen: list[str]) -> None:
    """Runs the cases whose name contains one of `chosen`, or all if it is empty. Prints a line of JSON for each: name,
    seconds, failure."""
    import torch

    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    for name, case in cases.items():
        if chosen and not any(part in name for part in chosen):
            continue
        torch.manual_seed(0)
        began_s = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (int(began_s) + PROCESSOR_S, most))
        try:
            case()
            failure = ""
        except Exception:
            failure = traceback.format_exc()
        print(json.dumps({"name": name, "seconds": time.process_time() - began_s, "failure": failure}), flush=True)
