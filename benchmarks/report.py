"""The JSON that every benchmark writes: what was measured, on what, with which versions."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("headrace", "torch", "numpy", "msgspec", "pyzmq", "transformers", "tokenizers")


def machine() -> dict[str, Any]:
    cpu_info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    pairs = (line.partition(":") for line in cpu_info.splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    return {
        "cpu": fields.get("model name", platform.processor()),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "avx512": sorted(flag for flag in fields.get("flags", "").split() if flag.startswith("avx512")),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return {**found, "commit": commit.stdout.strip()}


def write_report(path: Path, name: str, results: Any, *, seed: int = 0) -> None:
    """Writes `results` with what it takes to judge them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "versions": versions(),
        "seed": seed,
        "results": results,
    }
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {path.name}")
