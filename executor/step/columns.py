"""The table of what requests bring by row: one entry per concern, such as how a row is sampled or pooled.

`BatchState.columns` holds them by name. It enters a request's row in each entry and forgets released rows in each, so a
new concern is a class with these two methods and a name in that table.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from headrace.ipc.step import NewRow


class RowColumns(Protocol):
    """One concern's values by row."""

    def enter(self, new: NewRow) -> None:
        """Enters a request. One that this concern has nothing to do with leaves the row as it is: nothing is kept of
        rows that have left."""

    def leave(self, rows: np.ndarray) -> None:
        """Forgets the requests of these rows, [num_released] int32."""
