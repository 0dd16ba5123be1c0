"""Serving launches nothing that the start has not compiled: a compiler at work stops everybody for a second or more."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton has no build for this platform", allow_module_level=True)

ROOT = Path(__file__).parents[2]
MODELS = ("Llama-3.1-8B int4", "Llama-3.1-8B invariant", "Gemma-2-9B")


def test_what_serving_launches_was_compiled_at_the_start() -> None:
    """In a process of its own, which triton has not been told to interpret in."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT / 'tests' / 'support'}:{ROOT / 'benchmarks'}"
    command = [sys.executable, str(ROOT / "tests" / "support" / "gpu_launches.py"), *MODELS]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    assert [report["name"] for report in reports] == list(MODELS)
    for report in reports:
        launched = report["forms"]["start"]
        assert {"attend_kernel", "rotary_cache_kernel", "norm_kernel", "chunk_kernel"} <= set(launched)
        assert list(report["forms"]) == ["start"], report
