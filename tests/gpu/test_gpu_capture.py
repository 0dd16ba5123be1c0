"""CudaCapturer beside torch's rules for pools of graphs, which its allocator asserts and no CPU has (a stand-in for
`PrivatePool` and `captures_underway` of c10/cuda/CUDACachingAllocator.cpp)."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch

from headrace.executor.gpu.hardware.cuda import CudaCapturer


class Allocator:
    """How many graphs each pool has, and which are being captured."""

    def __init__(self) -> None:
        self.graphs: dict[tuple[int, int], int] = {}
        self.underway: set[tuple[int, int]] = set()

    def begin(self, pool: tuple[int, int]) -> None:
        if self.graphs.get(pool, 1) < 1:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        if pool in self.underway:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.graphs[pool] = self.graphs.get(pool, 0) + 1
        self.underway.add(pool)

    def end(self, device: int, pool: tuple[int, int]) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    found = Allocator()

    class Graph:
        is_broken = False

        def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
            self._pool = pool
            found.begin(pool)

        def capture_end(self) -> None:
            if Graph.is_broken:
                raise RuntimeError("operation failed due to a previous error during capture")
            found.end(0, self._pool)
            self.is_whole = True

        def replay(self) -> None: ...

        def __del__(self) -> None:
            if getattr(self, "is_whole", False):
                found.graphs[self._pool] -= 1

    class Stream:
        def wait_stream(self, other: Any) -> None: ...
        def synchronize(self) -> None: ...

    handles = iter(range(1, 100))
    for name, value in {
        "graph_pool_handle": lambda: (0, next(handles)),
        "Stream": lambda device: Stream(),
        "current_stream": lambda device: Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "mem_get_info": lambda device: (1 << 30, 1 << 31),
        "CUDAGraph": Graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", found.end, raising=False)
    found.graph = Graph  # type: ignore[attr-defined]
    return found


def test_graphs_that_nobody_keeps_leave_their_pool_usable_for_the_next(allocator: Allocator) -> None:
    """As when their memory is measured."""
    capturer = CudaCapturer(torch.device("cuda", 0))
    for _ in range(3):
        capturer.capture(lambda: None)
    assert allocator.graphs == {(0, 1): 3}
    capturer.forget()
    capturer.capture(lambda: None)
    assert allocator.graphs == {(0, 1): 0, (0, 2): 1}


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_capture_that_fails_is_over_for_the_allocator_too(allocator: Allocator, is_broken: bool) -> None:
    capturer, runs = CudaCapturer(torch.device("cuda", 0)), []

    def run() -> None:
        runs.append(gc.isenabled())
        if len(runs) == 2:
            allocator.graph.is_broken = is_broken  # type: ignore[attr-defined]
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        capturer.capture(run)
    assert not allocator.underway
    assert runs == [True, False], "nothing is collected during a capture"
    assert gc.isenabled()
