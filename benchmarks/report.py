"""The JSON that every benchmark here writes, in the form of `headrace bench`'s results."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from headrace.frontend.bench.record import SCHEMA, commit, surroundings, write


def write_report(path: Path, name: str, results: Any, *, seed: int = 0) -> None:
    """Writes `results` with what it takes to judge them."""
    report = {
        "benchmark": name,
        "schema": SCHEMA,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **commit(),
        **surroundings(probe=False),
        "seed": seed,
        "results": results,
    }
    write(path, report)
    print(f"wrote {path.name}")
