"""Which cases of matrices are made into tests, by what `-m` asks for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import thinned

CONFTEST = "import thinned\n\npytest_generate_tests = thinned.pytest_generate_tests\n"
CASES = """
import pytest
from thinned import every, pairs

@pytest.mark.parametrize("value", every(2, ["a", "a", "a", "b"]))
def test_row(value): pass

@pytest.mark.parametrize(("row", "column"), pairs("ab", "xy"))
@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.system)])
def test_matrix(row, column, times): pass

@pytest.mark.system
@pytest.mark.parametrize("value", [1, 2, 3])
def test_whole(value): pass

@pytest.mark.parametrize("value", [pytest.param(each, marks=pytest.mark.system) for each in (1, 2)])
def test_each(value): pass

def test_plain(): pass
"""
KEPT = {"test_row[a0]", "test_row[a2]", "test_matrix[1-a-x]", "test_matrix[1-b-y]", "test_plain"}
OTHERS = {
    *("test_row[a1]", "test_row[b]", "test_matrix[1-a-y]", "test_matrix[1-b-x]"),
    *(f"test_matrix[2-{row}-{column}]" for row in "ab" for column in "xy"),
    *("test_whole[1]", "test_whole[2]", "test_whole[3]", "test_each[1]", "test_each[2]"),
}


@pytest.mark.parametrize(
    ("arguments", "expected", "end"),
    [
        (["-m", "not system"], KEPT, "5/7 tests collected (2 deselected)"),
        (["-m", "system"], OTHERS, "13/18 tests collected (5 deselected)"),
        (["-m", ""], KEPT | OTHERS, "18 tests collected"),
        (["-m", "not system", "test_cases.py::test_row[a1]"], set(), "no tests collected (1 deselected)"),
        (["-m", "not system", "test_cases.py::test_row[a2]"], {"test_row[a2]"}, "1 test collected"),
    ],
    ids=["default", "system", "all", "a name of system", "a name"],
)
def test_cases_that_would_be_deselected_are_not_made(
    arguments: list[str], expected: set[str], end: str, tmp_path: Path
) -> None:
    """They have the same names as in the whole matrix."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {Path(thinned.__file__).parent}\nmarkers = system\naddopts = -p no:cacheprovider\n"
    )
    without = ("-p", "no:xdist", "-p", "no:schemathesis", "-p", "no:hypothesispytest", "-p", "no:anyio")
    command = [sys.executable, "-m", "pytest", *without, "--collect-only", "-q", *arguments]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    lines = said.splitlines()
    assert {line.partition("::")[2] for line in lines if "::" in line} == expected, said
    assert lines[-1].startswith(f"{end} in "), said
