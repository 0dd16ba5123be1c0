"""Output of a start on a terminal: the children's output, a progress bar of reading weights, a table of times.

A child's output is copied to our stderr, above the bars, and its last lines are kept for the report of a failure.
"""

from __future__ import annotations

import codecs
import collections
import contextlib
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from headrace.ipc.messages import Progress
from headrace.ipc.process.log import Unfailing, write_beside_bars
from headrace.ipc.wait import Deadline

LOG_TAIL_LINES = 30
LAST_FRAME = "in _run_module_as_main"
"""The outermost frame of the main thread in a program started by `python -m`. faulthandler's output ends with it."""


class ChildLog:
    """A child's output. One thread calls `take`; any thread may use the rest."""

    def __init__(self) -> None:
        self.num_stacks = 0
        """How many complete dumps of its threads' stacks it has written."""
        self._last: collections.deque[str] = collections.deque(maxlen=LOG_TAIL_LINES)
        self._unfinished_line = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._changed = threading.Condition()

    def take(self, data: bytes) -> None:
        """Takes bytes of the child's output. They may end in the middle of a line or a character."""
        text = self._decoder.decode(data)
        with self._changed:
            *lines, rest = (self._unfinished_line + text).split("\n")  # a line may come in several parts
            self._last.extend(line.rstrip("\r") for line in lines if line.strip())
            self._unfinished_line = rest
            self.num_stacks += sum(LAST_FRAME in line for line in lines)
            self._changed.notify_all()
        write_beside_bars(text)

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines, oldest first."""
        with self._changed:
            return (*self._last, *filter(str.strip, [self._unfinished_line]))[-LOG_TAIL_LINES:]

    def wait(self, num_stacks: int, deadline: Deadline) -> None:
        """Waits until it has written more than `num_stacks` dumps of its threads' stacks, or until the deadline."""
        with self._changed:
            self._changed.wait_for(lambda: self.num_stacks > num_stacks, deadline.remaining_s)


DELAY_S = 0.5
"""Weights that are read within this time get no bar."""


class LoadBar:
    """The progress bar of reading weights."""

    def __init__(self, wanted: bool | None) -> None:
        """wanted: None shows a bar if stderr is a terminal and reading takes longer than DELAY_S."""
        self._wanted = wanted
        self._bar: Any = None

    def read(self, done_bytes: int, total_bytes: int) -> None:
        """Never raises: nobody may read what this process writes."""
        try:
            self._read(done_bytes, total_bytes)
        except Exception:
            self._wanted, self._bar = False, None

    def _read(self, done_bytes: int, total_bytes: int) -> None:
        if self._bar is None:
            shows = self._wanted
            if shows is None:
                shows = is_watched()
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
                file=Unfailing(sys.stderr),
            )
        self._bar.update(done_bytes - self._bar.n)

    def close(self, *, is_done: bool) -> None:
        """is_done: all needed weights are read, which may be fewer than the total; the bar is filled."""
        bar, self._bar = self._bar, None
        if bar is None:
            return
        with contextlib.suppress(Exception):
            if is_done:
                bar.update(bar.total - bar.n)
            bar.close()


class StartLine:
    """One line on a terminal, or in a notebook, that names what a starting engine does; it goes when the start ends."""

    def __init__(self, wanted: bool | None) -> None:
        """wanted: the option use_tqdm_on_load; False shows nothing."""
        self._shows = wanted is not False and is_watched()
        self._bar: Any = None

    def __enter__(self) -> StartLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            with contextlib.suppress(Exception):
                self._bar.close()

    def show(self, progress: Progress) -> None:
        """Takes what the engine reports when a phase begins."""
        if not self._shows:
            return
        with contextlib.suppress(Exception):  # the terminal may be gone; the engine starts all the same
            if self._bar is None:
                from tqdm import tqdm

                self._bar = tqdm(
                    bar_format="{desc} [{elapsed}]", leave=False, dynamic_ncols=True, file=Unfailing(sys.stderr)
                )
            self._bar.set_description_str(f"Starting the engine: {progress.phase}")


def is_watched() -> bool:
    """Whether somebody sees what is written to stderr: a terminal, or a notebook's cell."""
    try:
        return bool(sys.stderr.isatty()) or "ipykernel" in sys.modules
    except Exception:  # there is none, it is closed, or it is an object of the user's that has no such method
        return False


MOST_RANKS = 8
"""With more ranks, the table has columns for the least and the most of all ranks."""
REST = "(before and after)"


def startup_table(core: Mapping[str, float], ranks: Sequence[Mapping[str, float]]) -> str:
    """A table of start-up times: rows are phases, columns the engine core and its workers. Each column sums to the
    time of the whole start.

    core, ranks: seconds by phase. The row REST has the time before a worker was started and after it was ready.
    """
    total_s = sum(core.values())
    columns = [dict(core), *({**rank, REST: total_s - sum(rank.values())} for rank in ranks)]
    names = ["core", *(f"rank {number}" for number in range(len(ranks)))]
    phases = _in_order(columns)
    if len(ranks) > MOST_RANKS:
        least, most = ({phase: pick(rank.get(phase, 0.0) for rank in ranks) for phase in phases} for pick in (min, max))
        columns, names = [dict(core), least, most], ["core", "least", "most"]
        rows = [_row(phase, [column.get(phase) for column in columns]) for phase in phases]
    else:
        rows = [_row(phase, [column.get(phase) for column in columns]) for phase in (*phases, REST)]
        rows.append(_row("sum", [sum(column.values()) for column in columns]))
    return "\n".join([f"{'seconds':<24}" + "".join(f"{name:>9}" for name in names), *rows])


def _in_order(columns: Sequence[Mapping[str, float]]) -> list[str]:
    """The phases of all columns, in an order that keeps each column's own order."""
    phases: list[str] = []
    for column in columns:
        at = 0
        for phase in column:
            if phase not in phases and phase != REST:
                phases.insert(at, phase)
            at = max(at, phases.index(phase) + 1) if phase in phases else at
    return phases


def _row(name: str, values: Sequence[float | None]) -> str:
    return f"{name:<24}" + "".join(f"{'' if value is None else f'{value:.2f}':>9}" for value in values).rstrip()
