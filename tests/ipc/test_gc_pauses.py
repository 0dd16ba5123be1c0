"""When the garbage collector walks through all objects."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from headrace.ipc.process.gc_pauses import IdleCollector

NUM_ALIVE = 400_000
"""As of thousands of requests."""


class Circle:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[IdleCollector]:
    monkeypatch.setattr(IdleCollector, "IDLE_S", 0.01)
    before = gc.get_threshold()
    collector = IdleCollector()
    collector.start()
    yield collector
    gc.set_threshold(*before)
    gc.unfreeze()


def walks() -> int:
    """Of all objects."""
    return int(gc.get_stats()[2]["collections"])


def test_all_objects_are_walked_through_once_nothing_runs(collector: IdleCollector) -> None:
    async def serve() -> None:
        collector.busy(2)
        began, old = walks(), Circle()
        circle = weakref.ref(old)
        alive = [[each] for each in range(NUM_ALIVE)]
        del old
        collector.busy(-1)
        await asyncio.sleep(0.05)
        assert walks() == began, "all streams would have waited for it"
        alive.clear()
        collector.busy(-1)
        await asyncio.sleep(0.05)
        assert walks() == began + 1
        assert circle() is None
        for _ in range(100):
            collector.busy(1)
            collector.busy(-1)
        await asyncio.sleep(0.05)
        assert walks() == began + 1, "nothing was made since"

    asyncio.run(serve())


def test_a_request_that_came_meanwhile_does_not_wait_for_the_walk(collector: IdleCollector) -> None:
    async def serve() -> None:
        began = walks()
        collector.busy(1)
        alive = [[each] for each in range(NUM_ALIVE)]
        collector.busy(-1)
        collector.busy(1)
        await asyncio.sleep(0.05)
        assert walks() == began
        assert len(alive) == NUM_ALIVE

    asyncio.run(serve())
