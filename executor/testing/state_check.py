"""The part of the plan checker that knows recurrent layers: what a state is of, and which pages hold it.

A page of a state is filled with a number that follows from the tokens that the state is of and from the page's place in
the bundle. So a wrong or stale source, a snapshot of another position, and a page that something else has overwritten
are detected when the state is read. The numbers lie in the same memory as those of keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.ipc.failure import InconsistentError
from headrace.ipc.step import NewRow, StateSnapshots, StepPlan


@dataclass
class _State:
    pages: list[int]
    source: list[int]
    """What the row's first step reads; empty if it starts from nothing."""
    of_tokens: int | None = None
    """How many tokens it is of. None before the row's first step."""
    num_drafts: int = 0
    """Drafts of the last step, some of which the next one may apply."""


@dataclass
class RowWork:
    """What a step computes of a row."""

    row: int
    begin: int
    end: int
    """Without drafts."""
    num_drafts: int
    chain: np.ndarray
    """[at least end]: hashes of the first 1, 2 ... tokens."""


class StateCheck:
    """The states of all rows. Every error is an InconsistentError."""

    def __init__(self, num_pages: int, content: np.ndarray) -> None:
        """content: [num_blocks, block_size] uint64, of all blocks."""
        self._num_pages, self._content = num_pages, content
        self._states: dict[int, _State] = {}

    def enter(self, where: str, new: NewRow) -> None:
        pages, source = new.state_pages.tolist(), new.state_source.tolist()
        if len(pages) != self._num_pages or len(source) not in (0, self._num_pages):
            raise InconsistentError(f"{where}: state in pages {pages} from {source}, not in {self._num_pages} pages")
        used = {page for state in self._states.values() for page in state.pages}
        if len({*pages}) != len(pages) or not used.isdisjoint(pages) or not set(pages).isdisjoint(source):
            raise InconsistentError(f"{where}: its pages {pages} are not its own; it starts from {source}")
        self._check_pages(where, pages + source)
        if bool(source) != bool(new.num_computed_tokens):
            raise InconsistentError(f"{where}: {new.num_computed_tokens} tokens are computed, it starts from {source}")
        self._states[new.row] = _State(pages, source)

    def leave(self, row: int) -> None:
        del self._states[row]

    def compute(self, plan: StepPlan, work: list[RowWork], writers: set[int]) -> None:
        """Reads and writes the states of a step whose keys and values are written, to these blocks."""
        snapshots = self._snapshots(plan)
        before = {each.row: self._read(plan.step, each) for each in work}
        written: list[tuple[str, list[int], np.ndarray]] = []
        for each in work:
            state, where, last = self._states[each.row], f"step {plan.step}, row {each.row}", before[each.row]
            for position, pages in snapshots.pop(each.row, []):
                if not last < position <= each.end or position % self._content.shape[1]:
                    raise InconsistentError(f"{where}: a snapshot at {position}, between {last} and {each.end}")
                last = position
                written.append((f"{where}: its snapshot", pages, self._of(each.chain, position)))
            written.append((f"{where}: its state", state.pages, self._of(each.chain, each.end)))
        if snapshots:
            raise InconsistentError(f"step {plan.step}: snapshots of rows {list(snapshots)}, which it does not compute")
        others = {page for row, state in self._states.items() if row not in before for page in state.pages}
        for where, pages, values in written:
            if not (others | writers).isdisjoint(pages):
                raise InconsistentError(f"{where}: pages {pages} are written or owned by another row")
            writers |= set(pages)
            self._content[pages] = values[:, None]
        for each in work:
            state = self._states[each.row]
            if state.of_tokens is None and state.source:
                self._expect(f"step {plan.step}, row {each.row}: its source", state.source, each.chain, each.begin)
            state.of_tokens, state.num_drafts = each.end, each.num_drafts

    def _read(self, step: int, work: RowWork) -> int:
        """The number of tokens that the row's state is of before the step."""
        state, where = self._states[work.row], f"step {step}, row {work.row}"
        if state.of_tokens is None:
            if state.source:
                self._expect(f"{where}: its source", state.source, work.chain, work.begin)
            return work.begin
        if not state.of_tokens <= work.begin <= state.of_tokens + state.num_drafts:
            raise InconsistentError(f"{where}: its state is of {state.of_tokens} tokens, it goes on at {work.begin}")
        self._expect(f"{where}: its state", state.pages, work.chain, state.of_tokens)
        return state.of_tokens

    def _snapshots(self, plan: StepPlan) -> dict[int, list[tuple[int, list[int]]]]:
        """Positions and pages by row."""
        kept = plan.get(StateSnapshots)
        if kept is None:
            return {}
        if not len(kept.rows) == len(kept.positions) == len(kept.pages) // self._num_pages > 0:
            raise InconsistentError(f"step {plan.step}: {kept} has columns of different lengths")
        by_row: dict[int, list[tuple[int, list[int]]]] = {}
        pages = kept.pages.reshape(-1, self._num_pages).tolist()
        for row, position, each in zip(kept.rows.tolist(), kept.positions.tolist(), pages, strict=True):
            self._check_pages(f"step {plan.step}, row {row}", each)
            by_row.setdefault(row, []).append((position, each))
        order = plan.rows.tolist()
        if list(by_row) != [row for row in order if row in by_row]:
            raise InconsistentError(f"step {plan.step}: snapshots of rows {list(by_row)} are not in the plan's order")
        return by_row

    def _expect(self, where: str, pages: list[int], chain: np.ndarray, num_tokens: int) -> None:
        wrong = (self._content[pages] != self._of(chain, num_tokens)[:, None]).any(1)
        if wrong.any():
            raise InconsistentError(
                f"{where} in pages {pages} is not that of its {num_tokens} tokens; wrong are {np.flatnonzero(wrong)}"
            )

    def _of(self, chain: np.ndarray, num_tokens: int) -> np.ndarray:
        """[num_pages] uint64: what the pages of the state after num_tokens tokens hold."""
        of_tokens = chain[num_tokens - 1] if num_tokens else np.uint64(1)
        with np.errstate(over="ignore"):
            values: np.ndarray = of_tokens * np.uint64(0x9E3779B97F4A7C15) + np.arange(self._num_pages, dtype=np.uint64)
        return values

    def _check_pages(self, where: str, pages: list[int]) -> None:
        if not all(0 < page < len(self._content) for page in pages):
            raise InconsistentError(f"{where}: no such page in {pages}")
