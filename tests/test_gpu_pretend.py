"""The GPU's path, down to the calls of `torch.cuda`, on tensors that say they are on a GPU: nothing mixes devices, no
step waits for the device while it is submitted, and what is captured holds nothing that a capture refuses.

In a process of its own, as `torch.cuda`'s classes are replaced and Triton's interpreter is chosen there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pretend_cases
import pytest
import tiny_models
import torch
from triton_cases import why_not_interpreted

if reason := why_not_interpreted() or ("" if sys.platform == "linux" else "torch's guards are found on Linux alone"):
    pytest.skip(reason, allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("there is a GPU, and tests/test_gpu_device.py runs on it", allow_module_level=True)

RUNNER = Path(pretend_cases.__file__)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By case; empty where it passed."""
    folder = tmp_path_factory.mktemp("models")
    for name in {*pretend_cases.MODELS, "llama", "llama_biases", "smollm3"}:
        tiny_models.save(name, folder / name)
    tiny_models.save("llama", folder / "llama_other", seed=3)
    tiny_models.save("llama", folder / "llama_short", num_hidden_layers=1)
    result = subprocess.run(
        [sys.executable, str(RUNNER), str(folder)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return {line["name"]: line["failure"] for line in lines}


@pytest.mark.parametrize("name", pretend_cases.names())
def test_on_the_gpu_that_is_not_there(name: str, failures: dict[str, str]) -> None:
    assert not failures[name], failures[name]
