"""Fixtures: an LLM attached to a fake core in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_core import MemoryCore, memory_core

from headrace import LLM


@pytest.fixture
def core() -> Iterator[MemoryCore]:
    with memory_core() as running:
        yield running


@pytest.fixture
def llm(core: MemoryCore) -> Iterator[LLM]:
    with LLM.attach(core.transport) as attached:
        yield attached
