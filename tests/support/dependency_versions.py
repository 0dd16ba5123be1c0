"""Tests the client and the server with the lowest and the highest versions that pyproject.toml allows.

    python tests/support/dependency_versions.py lowest highest

Each set gets a virtual environment of its own, in `.venv/versions/`. torch, transformers and triton are the installed
ones: each of them is hundreds of megabytes, and constraints.txt has the versions that all else is tested with.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LARGE = {"torch", "transformers", "triton"}
FOLLOWING = {"huggingface-hub", "safetensors", "tokenizers"}
"""The installed transformers allows few versions of these."""
EXTRAS = ("engine",)
NOT_FOR_TESTS = {"ray", "modelscope", "mypy", "ruff", "types-psutil", "types-pyyaml", "xgrammar"}
"""Of the extra dev, what the tests here do not need, or find to be missing."""
NEEDS_NEWER = {"opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"}
"""What does not go with the lowest versions, protobuf's among them."""
WITHOUT = "tests/http/test_http_traces.py"
"""The tests that need it."""
TESTS = ("tests/ipc", "tests/frontend", "tests/http", "tests/cli", "tests/core", "tests/checkpoints")


def requirements(which: str) -> list[str]:
    """What pip is asked for: `name==LOWEST`, or the name alone, whose newest version pip takes; and what tests need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    declared = [*project["dependencies"], *(each for extra in EXTRAS for each in optional[extra])]
    asked = []
    for each in map(Requirement, declared):
        if each.name in LARGE:
            continue
        (lowest,) = [spec.version for spec in each.specifier if spec.operator == ">="]
        is_pinned = which == "lowest" and each.name not in FOLLOWING
        asked.append(f"{each.name}=={lowest}" if is_pinned else f"{each.name}{each.specifier}")
    left_out = NOT_FOR_TESTS | (NEEDS_NEWER if which == "lowest" else set())
    for_tests = [each for each in map(Requirement, optional["dev"]) if each.name.lower() not in left_out]
    return [*asked, *map(str, for_tests)]


def test(which: str) -> int:
    folder = ROOT / ".venv" / "versions" / which
    venv.create(folder, with_pip=True, clear=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet"]
    pins = ROOT / "constraints.txt"
    large = [line for line in pins.read_text().splitlines() if line.partition("==")[0] in LARGE]
    subprocess.run([*pip, *large, *requirements(which)], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
    command = [python, "-m", "pytest", "--numprocesses", "auto", "--maxprocesses", "4", "--dist", "loadfile"]
    command += [f"--ignore={WITHOUT}"] if which == "lowest" else []
    return subprocess.run([*command, *TESTS], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(max(map(test, sys.argv[1:])))
