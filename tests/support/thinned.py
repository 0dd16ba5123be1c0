"""Matrices of cases: `make test` has those that each tell something, `make test-system` all others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import pytest


def thinned(cases: Iterable[Any], is_kept: Callable[[Any], bool]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: the cases, of one argument or a tuple of several each, those that are
    not kept marked `system`."""
    found = []
    for case in cases:
        arguments = case if type(case) is tuple else (case,)
        found.append(pytest.param(*arguments, marks=[] if is_kept(case) else [pytest.mark.system]))
    return found


def every(step: int, cases: Iterable[Any]) -> list[Any]:
    """Of a long row of cases that tell much the same, every `step`-th is kept, from the first on."""
    places = itertools.count()
    return thinned(cases, lambda _: next(places) % step == 0)


def pairs(rows: Sequence[Any], columns: Sequence[Any]) -> list[Any]:
    """Every row with every column, for two arguments. Kept are so few that each row and each column is among them."""
    longest = max(len(rows), len(columns))
    kept = {(at % len(rows), at % len(columns)) for at in range(longest)}
    return [
        pytest.param(row, column, marks=[] if (at, place) in kept else [pytest.mark.system])
        for at, row in enumerate(rows)
        for place, column in enumerate(columns)
    ]


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, None, None]:
    """A hook of conftest.py: no item is made of a case that `-m 'not system'` would deselect, as two fifths of all are.
    The names of cases are those of the whole matrix, in which a number tells apart what looks the same.

    Where no case is to run, one stays and is deselected. Where one is asked for by its name, all are made.
    """
    yield
    config, cases = metafunc.config, metafunc._calls
    if config.getoption("markexpr") != "not system" or any("::" in argument for argument in config.args):
        return
    if metafunc.definition.get_closest_marker("system") is not None:
        metafunc._calls = cases[:1]
    else:
        metafunc._calls = [case for case in cases if all(mark.name != "system" for mark in case.marks)] or cases[:1]
