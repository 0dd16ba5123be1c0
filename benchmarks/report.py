"""The JSON that every benchmark here writes, in the format of `headrace bench`'s results."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from headrace.frontend.bench.results.record import SCHEMA, commit, surroundings, write


class Report:
    """A report that is saved completely after each case, so that no measurement is lost if a later case fails."""

    def __init__(self, path: Path | None, name: str, results: dict[str, Any], *, seed: int = 0) -> None:
        """path: None keeps it only in memory. `results` may be added to; `cases` is created if missing."""
        self.results = results
        self._path = path
        self._head = {} if path is None else head(name, seed)
        results.setdefault("cases", [])

    def add_case(self, case: dict[str, Any]) -> None:
        self.results["cases"].append(case)
        self.save()

    def save(self) -> None:
        if self._path is not None:
            write(self._path, {**self._head, "results": self.results})


def head(name: str, seed: int) -> dict[str, Any]:
    """Metadata needed to judge the results."""
    return {
        "benchmark": name,
        "schema": SCHEMA,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **commit(),
        **surroundings(probe=False),
        "seed": seed,
    }


def write_report(path: Path, name: str, results: Any, *, seed: int = 0) -> None:
    """Writes `results` with the metadata of `head`."""
    write(path, {**head(name, seed), "results": results})
    print(f"wrote {path.name}")
