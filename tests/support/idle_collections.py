"""When the garbage collector walks through all objects: `python FILE [NAME ...]`. In a process of its own, since a
thread that another test has left may hold or freeze the collector, or be within a collection."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref

from case_process import cases_of, run_cases

from headrace.ipc.process.gc_pauses import IdleCollector

NUM_ALIVE = 400_000
"""As of thousands of requests."""


class Circle:
    def __init__(self) -> None:
        self.own = self


def started() -> IdleCollector:
    IdleCollector.IDLE_S = 0.01
    collector = IdleCollector()
    collector.start()
    return collector


def walks() -> int:
    """Of all objects."""
    return int(gc.get_stats()[2]["collections"])


def case_all_objects_are_walked_through_once_nothing_runs() -> None:
    async def serve() -> None:
        collector = started()
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


def case_a_request_that_came_meanwhile_does_not_wait_for_the_walk() -> None:
    async def serve() -> None:
        collector = started()
        began = walks()
        collector.busy(1)
        alive = [[each] for each in range(NUM_ALIVE)]
        collector.busy(-1)
        collector.busy(1)
        await asyncio.sleep(0.05)
        assert walks() == began
        assert len(alive) == NUM_ALIVE

    asyncio.run(serve())


if __name__ == "__main__":
    run_cases(cases_of(sys.modules[__name__]), sys.argv[1:])
