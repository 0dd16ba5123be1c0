"""What --worker-extension-cls names in tests: here, as workers import the whole module that has the class."""

from __future__ import annotations

import threading
from typing import Any


class Extension:
    """Lives in the worker."""

    def __init__(self, rank: object) -> None:
        self.rank = rank

    def handle(self, payload: dict[str, object]) -> dict[str, object]:
        return {"echo": payload}

    def add(self, left: int, right: int = 1) -> int:
        return left + right


class Obedient:
    """Lives in the worker, and knows its executor."""

    def __init__(self, executor: Any) -> None:
        self._executor, self._calls = executor, 0

    def handle(self, payload: dict[str, Any]) -> dict[str, Any]:
        if payload.get("fail"):
            raise ValueError("told to fail")
        if payload.get("hang"):
            threading.Event().wait()
        self._calls += 1
        return {"calls": self._calls, "executor": type(self._executor).__name__, **payload}


class Insomniac:
    """A worker extension whose rank hangs on its way to sleep."""

    def __init__(self, rank: Any) -> None:
        rank.sleep = lambda level: threading.Event().wait(60)
