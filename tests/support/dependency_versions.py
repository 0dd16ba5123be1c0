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
FOR_TESTS = (
    "pytest",
    "pytest-timeout",
    "hypothesis",
    "httpx",
    "jsonschema",
    "openai",
    "anthropic",
    "ollama",
    "aiohttp",
)
TESTS = ("tests/ipc", "tests/frontend", "tests/http", "tests/cli", "tests/core", "tests/checkpoints")


def requirements(which: str) -> list[str]:
    """What pip is asked for: `name==LOWEST`, or the name alone, whose newest version pip takes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [
        *project["dependencies"],
        *(each for extra in EXTRAS for each in project["optional-dependencies"][extra]),
    ]
    asked = []
    for each in map(Requirement, declared):
        if each.name in LARGE:
            continue
        (lowest,) = [spec.version for spec in each.specifier if spec.operator == ">="]
        is_pinned = which == "lowest" and each.name not in FOLLOWING
        asked.append(f"{each.name}=={lowest}" if is_pinned else f"{each.name}{each.specifier}")
    return asked


def test(which: str) -> int:
    folder = ROOT / ".venv" / "versions" / which
    venv.create(folder, with_pip=True, clear=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet"]
    pins = ROOT / "constraints.txt"
    large = [line for line in pins.read_text().splitlines() if line.partition("==")[0] in LARGE]
    subprocess.run([*pip, *large, *requirements(which), *FOR_TESTS], check=True)
    subprocess.run([*pip, "--no-deps", "--editable", str(ROOT)], check=True)
    return subprocess.run([python, "-m", "pytest", *TESTS], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(max(map(test, sys.argv[1:])))
