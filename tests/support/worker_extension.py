"""Worker extensions for tests of --worker-extension-cls. A separate module, since workers import all of it."""

from __future__ import annotations

import threading
from typing import Any


class Extension:
    """An extension that is constructed with its rank, in the worker."""

    def __init__(self, rank: object) -> None:
        self.rank = rank

    def handle(self, payload: dict[str, object]) -> dict[str, object]:
        return {"echo": payload}

    def add(self, left: int, right: int = 1) -> int:
        return left + right


class Obedient:
    """An extension that is constructed with its executor, in the worker."""

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
