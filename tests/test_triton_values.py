"""Every Triton kernel gives its reference's values, under the interpreter.

The interpreter is chosen by an environment variable that triton reads when it is imported, so the cases run in one
process of their own (`triton_cases.py`) and each is a test here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton_cases import case_names, why_not_interpreted

RUNNER = Path(__file__).with_name("triton_cases.py")

if reason := why_not_interpreted():
    pytest.skip(reason, allow_module_level=True)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """Case -> what failed in it."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(RUNNER)], capture_output=True, text=True, timeout=280, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return {line["name"]: line["failure"] for line in lines}


@pytest.mark.parametrize("name", case_names())
def test_a_kernel_equals_its_reference(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]
