"""The states of the running requests, for models whose layers keep one per sequence: which pages have them, and how
many tokens they cover."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from headrace.ipc.failure import InconsistentError
from headrace.ipc.step import Drafts, NewRow, StateSnapshots, StepPlan


@dataclass(frozen=True)
class StateArrays:
    """A step's inputs of the layers that keep states; `parts` are the fields of
    `kernels.reference.states.StateBatch`."""

    rows: np.ndarray  # [num_seqs] int32
    pages: np.ndarray  # [num_seqs, pages of a state] int32
    sources: np.ndarray  # [num_seqs, pages of a state] int32
    has_source: np.ndarray  # [num_seqs] int32
    replayed: np.ndarray  # [num_seqs] int32
    committed: np.ndarray  # [num_seqs] int32
    snapshot_sequences: np.ndarray  # [num_snapshots] int32, ascending
    snapshot_ends: np.ndarray  # [num_snapshots] int32
    snapshot_pages: np.ndarray  # [num_snapshots, pages of a state] int32

    @property
    def snapshot_start(self) -> np.ndarray:
        """[num_seqs + 1] int32: the first of each sequence's snapshots, and their number."""
        return np.searchsorted(self.snapshot_sequences, np.arange(len(self.rows) + 1)).astype(np.int32)

    @property
    def parts(self) -> tuple[np.ndarray, ...]:
        """One-dimensional, int32: what `executor/step/inputs.py:states_of` makes a `StateBatch` of."""
        return (
            *(self.rows, self.pages.ravel(), self.sources.ravel(), self.has_source, self.replayed, self.committed),
            *(self.snapshot_start, self.snapshot_ends, self.snapshot_pages.ravel()),
        )

    def continued(self) -> StateArrays:
        """The inputs of a next step, in which each sequence computes one token further."""
        zeros = np.zeros_like(self.rows)
        none = {"snapshot_sequences": _NONE, "snapshot_ends": _NONE, "snapshot_pages": self.snapshot_pages[:0]}
        return replace(self, sources=self.pages, has_source=zeros + 1, replayed=zeros, committed=zeros + 1, **none)

    def with_snapshots(self, snapshots: StateSnapshots, plan: StepPlan) -> StateArrays:
        """The inputs of a step, which is this plan's, that also keeps these snapshots."""
        index_of_row = np.zeros(int(self.rows.max()) + 1, np.int32)
        index_of_row[self.rows] = np.arange(len(self.rows), dtype=np.int32)
        sequences = index_of_row[snapshots.rows]
        covered = plan.num_computed_tokens - self.replayed
        return replace(
            self,
            snapshot_sequences=sequences,
            snapshot_ends=snapshots.positions - covered[sequences],
            snapshot_pages=snapshots.pages.reshape(len(sequences), -1),
        )


class RowStates:
    """Where each row's state is. A row's own pages have the state after its first `covered` tokens; those of a row that
    has just entered have none yet."""

    def __init__(self, num_rows: int, pages: int) -> None:
        self._pages = np.zeros((num_rows, pages), np.int32)
        self._sources = np.zeros((num_rows, pages), np.int32)
        self._has_source = np.zeros(num_rows, np.int32)
        self.covered = np.zeros(num_rows, np.int32)

    def enter(self, new: NewRow) -> None:
        """Raises InconsistentError for a row that skips tokens without a state of them."""
        has_source = len(new.state_source) > 0
        if new.num_computed_tokens and not has_source:
            raise InconsistentError(
                f"row {new.row} begins after {new.num_computed_tokens} computed tokens without a state of them"
            )
        self._pages[new.row] = new.state_pages
        self._sources[new.row] = new.state_source if has_source else new.state_pages
        self._has_source[new.row] = has_source
        self.covered[new.row] = new.num_computed_tokens

    def advance(self, plan: StepPlan) -> StateArrays:
        """The step's inputs, without snapshots; the rows' states then cover what the step computes, without drafts."""
        rows, drafts = plan.rows, plan.get(Drafts)
        committed = plan.num_tokens if drafts is None else plan.num_tokens - drafts.counts
        found = StateArrays(
            rows=rows,
            pages=self._pages[rows],
            sources=self._sources[rows],
            has_source=self._has_source[rows],
            replayed=plan.num_computed_tokens - self.covered[rows],
            committed=committed,
            snapshot_sequences=_NONE,
            snapshot_ends=_NONE,
            snapshot_pages=self._pages[:0],
        )
        self._sources[rows], self._has_source[rows] = found.pages, 1
        self.covered[rows] = plan.num_computed_tokens + committed
        return found


_NONE = np.zeros(0, np.int32)
