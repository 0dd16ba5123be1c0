"""CudaCapturer beside torch's rules for captures, which no CPU has: its allocator's for pools of graphs (a stand-in for
`PrivatePool` and `captures_underway` of c10/cuda/CUDACachingAllocator.cpp), and its random generator's (one for
`register_graph`, `capture_prologue` and `capture_epilogue` of aten/src/ATen/cuda/CUDAGeneratorImpl.cpp up to 2.12)."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import pytest
import torch

from headrace.executor.gpu.hardware.cuda import CudaCapturer


class RandomGenerator:
    def __init__(self) -> None:
        self.is_capturing = False
        self._num_graphs = 0
        self._seed = torch.empty(0)

    def begin(self) -> None:
        if not self._num_graphs:
            self._seed = torch.empty(1)
        self._num_graphs += 1
        self.is_capturing = True
        self._seed.fill_(0)

    def forget(self) -> None:
        self._num_graphs -= 1


class Allocator:
    """How many graphs each pool has, and which are being captured."""

    def __init__(self) -> None:
        self.graphs: dict[tuple[int, int], int] = {}
        self.underway: set[tuple[int, int]] = set()
        self.generator = RandomGenerator()

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
            found.generator.begin()
            found.begin(pool)

        def capture_end(self) -> None:
            if Graph.is_broken:
                Graph.is_broken = False  # the stream captures nothing any more
                raise RuntimeError("operation failed due to a previous error during capture")
            found.end(0, self._pool)
            found.generator.is_capturing = False
            self.is_whole = True

        def replay(self) -> None:
            if found.generator.is_capturing:
                raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")

        def __del__(self) -> None:
            found.generator.forget()
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
    replay, _ = capturer.capture(lambda: None)

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
    replay()  # the generator lets graphs that were captured before go on


def test_graphs_are_captured_in_inference_mode_and_outside_of_it_in_any_order(allocator: Allocator) -> None:
    """As while a step is submitted, and while nothing runs."""
    capturer = CudaCapturer(torch.device("cuda", 0))
    for is_inference in (True, False, True):
        with torch.inference_mode(is_inference):
            capturer.capture(lambda: None)
    assert sum(allocator.graphs.values()) == 3
