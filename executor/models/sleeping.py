"""The place of a model whose weights have been dropped."""

from __future__ import annotations

from typing import Any, NoReturn


class SleepingModel:
    """Keeps nothing, and computes nothing: no step comes before the core has woken the weights."""

    choose = None

    def step(self, *_: Any) -> NoReturn:
        raise RuntimeError("a step came while the weights sleep")
