"""The bar that shows how much of the weights is read, on the terminal of whoever started the engine."""

from __future__ import annotations

import sys
from typing import Any

DELAY_S = 0.5
"""What is read sooner needs no bar."""


class LoadBar:
    """`wanted`: None is where stderr is a terminal, and reading takes a while."""

    def __init__(self, wanted: bool | None) -> None:
        self._wanted = wanted
        self._bar: Any = None

    def read(self, done_bytes: int, total_bytes: int) -> None:
        if self._bar is None:
            shows = self._wanted
            if shows is None:
                shows = sys.stderr is not None and sys.stderr.isatty()
            if not shows:
                return
            from tqdm import tqdm

            self._bar = tqdm(
                total=total_bytes,
                desc="Loading weights",
                unit="B",
                unit_scale=True,
                dynamic_ncols=True,
                leave=bool(self._wanted),
                delay=0.0 if self._wanted else DELAY_S,
                file=sys.stderr,
            )
        self._bar.update(done_bytes - self._bar.n)

    def close(self, *, is_done: bool) -> None:
        """is_done: all that was needed has been read, which may be less than there is."""
        if self._bar is not None:
            if is_done:
                self._bar.update(self._bar.total - self._bar.n)
            self._bar.close()
            self._bar = None
