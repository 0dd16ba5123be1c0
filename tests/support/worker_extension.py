"""What --worker-extension-cls names in the tests of this folder."""

from __future__ import annotations


class Extension:
    """Lives in the worker."""

    def __init__(self, rank: object) -> None:
        self.rank = rank

    def handle(self, payload: dict[str, object]) -> dict[str, object]:
        return {"echo": payload}

    def add(self, left: int, right: int = 1) -> int:
        return left + right
