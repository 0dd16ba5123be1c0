"""Where a start's time went, by phase and process, as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MOST_RANKS = 8
"""With more ranks than that, there are columns for the least and the most of all."""
REST = "(before and after)"


def startup_table(core: Mapping[str, float], ranks: Sequence[Mapping[str, float]]) -> str:
    """Rows are phases, columns the engine core and its workers; each column sums to the time that the start took.

    `core` and each of `ranks`: seconds by phase. A worker is started later than the core and may be ready before it.
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
    """The phases of all columns, each after those that come before it in its own."""
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
