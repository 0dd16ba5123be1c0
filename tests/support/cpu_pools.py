"""Thread pools for tests of the CPU ops, some with more threads than the machine has cores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from headrace.kernels.cpu import build
from headrace.kernels.cpu.linear.linear import Runtime
from headrace.kernels.cpu.ops import CpuOps
from headrace.kernels.cpu.runtime.threads import ThreadPool


class ManyThreads(ThreadPool):
    """A pool with any number of threads, also more than this machine has cores, to divide the work differently."""

    def __init__(self, library: build.Library, count: int) -> None:
        super().__init__(library, 1)
        library.dll.hr_pool_destroy(self.handle)
        self.plan = replace(self.plan, num_threads=count)
        self.handle = library.dll.hr_pool_create(count, None, 0)
        self._end.detach()


@pytest.fixture(scope="module", name="ops")
def two_threads_ops() -> CpuOps:
    library = build.build()
    return CpuOps(Runtime(library, ThreadPool(library, 2)))


@pytest.fixture(scope="module", name="other_ops")
def many_threads_ops() -> Iterator[list[CpuOps]]:
    """The same ops on one, three and five threads."""
    library = build.build()
    pools = [ManyThreads(library, count) for count in (1, 3, 5)]
    yield [CpuOps(Runtime(library, pool)) for pool in pools]
    for pool in pools:
        library.dll.hr_pool_destroy(pool.handle)
