"""When the garbage collector walks through all objects: the cases of `idle_collections`."""

from __future__ import annotations

from pathlib import Path

import pytest
from case_process import failures, parameters

RUNNER = Path(__file__).parents[1] / "support" / "idle_collections.py"


@pytest.fixture(scope="module")
def failed(request: pytest.FixtureRequest) -> dict[str, str]:
    return failures(request, RUNNER)


@pytest.mark.parametrize("name", parameters([RUNNER]))
def test_collections_wait_until_nothing_runs(name: str, failed: dict[str, str]) -> None:
    assert not failed[name], failed[name]
