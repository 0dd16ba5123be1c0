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
MODELS = (
    *("Llama-3.1-8B int4", "Llama-3.1-8B invariant", "Llama-3.1-8B adapters", "Qwen3-30B-A3B", "Gemma-2-9B"),
    *("LFM2-1.2B", "Mamba2-370M", "Qwen3-Next"),
)
OF_STATES = {
    "LFM2-1.2B": {"convolve_kernel"},
    "Mamba2-370M": {"convolve_kernel", "scan_kernel", "keep_drafts_kernel"},
    "Qwen3-Next": {"convolve_kernel", "linear_attention_kernel", "keep_drafts_kernel"},
}
"""Kernels of models that keep states."""


@pytest.mark.parametrize("models", [MODELS[::3], pytest.param(MODELS, marks=pytest.mark.system)], ids=["some", "all"])
def test_what_serving_launches_was_compiled_at_the_start(models: tuple[str, ...]) -> None:
    """In a process of its own, which triton has not been told to interpret in."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = f"{ROOT / 'tests' / 'support'}:{ROOT / 'benchmarks'}"
    command = [sys.executable, str(ROOT / "tests" / "support" / "gpu_launches.py"), *models]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    assert [report["name"] for report in reports] == list(models)
    for report in reports:
        launched = report["forms"]["start"]
        assert {"norm_kernel", "chunk_kernel"} <= set(launched)
        if report["name"] != "Mamba2-370M":
            assert {"attend_kernel", "rotary_cache_kernel"} <= set(launched)
        assert OF_STATES.get(report["name"], set()) <= set(launched)
        assert list(report["forms"]) == ["start"], report


COMPILE = """
import gpu_compile
notes = gpu_compile.CASES["llama-8b"]()
notes.run()
chosen = [launch for _, launch in notes.launches.values() if launch.function.__name__ == "embed_kernel"]
assert gpu_compile.compile_launches(chosen, 2) == len(chosen) == 1
"""
LAUNCH = """
import torch, triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction
import gpu_compile
from headrace.kernels.triton import embedding
found, run = [], JITFunction.run
triton.knobs.compilation.listener = lambda **facts: found.append(facts["cache_hit"])
JITFunction.run = lambda self, *args, grid, warmup, **options: run(self, *args, grid=grid, warmup=True, **options)
driver.set_active(gpu_compile.NoDriver())
for rows, width in ((512, 4096), (512, 4095)):
    embedding.embed(torch.zeros(3, dtype=torch.int64), torch.zeros(rows, width, dtype=torch.bfloat16))
assert found == [True, False], found
"""


@pytest.mark.system
def test_what_is_compiled_ahead_is_what_a_launch_looks_for(tmp_path: Path) -> None:
    """In another process, on tensors that have values; a width that Triton compiles anew for is not there."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT / "benchmarks"), "TRITON_CACHE_DIR": str(tmp_path)}
    for program in (COMPILE, LAUNCH):
        command = [sys.executable, "-c", program]
        result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
        assert result.returncode == 0, result.stderr
