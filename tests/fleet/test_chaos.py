"""The chaos of `benchmarks/chaos.py`, for as long as a test may take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.system
def test_no_stream_is_lost_or_changed_while_engines_and_http_processes_are_killed(tmp_path: Path) -> None:
    out = tmp_path / "chaos.json"
    script = [sys.executable, "benchmarks/chaos.py", "--minutes", "0.7", "--streams", "16", "--out", str(out)]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=450, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(out.read_text())["results"]
    assert not results["bad"]
    assert results["counts"]["whole and unchanged"] >= 16
    assert sum(count for kind, count in results["struck"].items() if kind.startswith("engine")) > 0
