"""What ranks say to each other arrives, whole and in order, on every backend; and no wait outlives its reason."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.executor.parallel import collectives as collectives_module
from headrace.executor.parallel.rank_place import (
    Collectives,
    PeerError,
    RankCoordinates,
    World,
    collectives_bytes,
    mark_failed,
    open_collectives,
)
from headrace.executor.parallel.shared_layout import TOKEN_SLOTS, SharedLayout
from headrace.ipc.failure import ModelError, OptionError
from headrace.kernels.cpu import build
from headrace.kernels.cpu.runtime import collectives as kernels

BACKENDS = ["shared", "gloo"]
Run = Callable[[World, Callable[[Collectives, int], Any]], list[Any]]


@pytest.fixture(params=BACKENDS)
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a function on every rank of a world, each in a thread, and gives what they returned."""
    if request.param == "gloo":
        monkeypatch.setattr(collectives_module.build, "load", lambda: None)
    elif build.why_not():
        pytest.skip(str(build.why_not()))
    return run_ranks


def run_ranks(world: World, body: Callable[[Collectives, int], Any]) -> list[Any]:
    fd = os.memfd_create("test")
    try:
        os.ftruncate(fd, collectives_bytes(world))

        def one(rank: int) -> Any:
            link = open_collectives(fd, world, rank, deadline_s=30)
            try:
                return body(link, rank)
            except BaseException:
                mark_failed(fd, rank)
                raise
            finally:
                link.close()

        with ThreadPoolExecutor(world.size) as pool:
            return [future.result(60) for future in [pool.submit(one, rank) for rank in range(world.size)]]
    finally:
        os.close(fd)


def world_of(tp_size: int, pp_size: int = 1, **sizes: int) -> World:
    return World(tp_size, pp_size, **({"max_tokens": 8, "max_seqs": 4, "hidden_size": 48, "vocab_size": 96} | sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_those_of_float32_in_order_of_rank_on_every_rank(run: Run, dtype: torch.dtype) -> None:
    parts = torch.randn(3, 20, 50, generator=torch.Generator().manual_seed(1)).to(dtype)  # more than a slot holds
    expected = ((parts[0].float() + parts[1].float()) + parts[2].float()).to(dtype)
    for total in run(world_of(3), lambda link, rank: link.all_reduce(parts[rank].clone())):
        assert torch.equal(total, expected)


@pytest.mark.parametrize(("rows", "columns"), [(5, 7), (1, 3000), (0, 4)])
def test_gathered_columns_lie_in_order_of_rank(run: Run, rows: int, columns: int) -> None:
    parts = [torch.randn(rows, columns) for _ in range(2)]
    for whole in run(world_of(2), lambda link, rank: link.all_gather(parts[rank])):
        assert torch.equal(whole, torch.cat(parts, dim=1))


def test_many_sums_in_a_row_do_not_overtake_each_other(run: Run) -> None:
    def body(link: Collectives, rank: int) -> list[float]:
        return [float(link.all_reduce(torch.full((3,), float(i * (rank + 1))))[0]) for i in range(300)]

    for sums in run(world_of(2), body):
        assert sums == [3.0 * i for i in range(300)]


def test_hidden_states_go_from_stage_to_stage_and_tokens_back(run: Run) -> None:
    count = 2 * TOKEN_SLOTS

    def body(link: Collectives, rank: int) -> list[tuple[int, list[int], list[int]]]:
        stage, tp_rank = divmod(rank, 2)
        got = []
        for step in range(count):
            num_tokens = step % 8 + 1
            x = torch.full((2, num_tokens, 48), float(step + 1000 * tp_rank), dtype=torch.bfloat16)
            if stage > 0:
                assert torch.equal(link.receive((2, num_tokens, 48), torch.bfloat16), x)
            if stage < 2:
                link.send(x)
                taken = link.sampled(wait=True)
                assert taken is not None
                got.append((taken[0], taken[1].tolist(), taken[2].tolist()))
            elif tp_rank == 0:
                link.publish(step, np.arange(step % 5, dtype=np.int32), np.full(step % 5, step, np.int32))
        return got

    expected = [(step, list(range(step % 5)), [step] * (step % 5)) for step in range(count)]
    assert run(world_of(2, 3), body) == [expected] * 4 + [[]] * 2


def test_a_stage_that_looks_without_waiting_finds_nothing_or_the_next(run: Run) -> None:
    told = threading.Event()

    def body(link: Collectives, rank: int) -> Any:
        if rank == 1:
            assert told.wait(30)
            link.publish(7, np.array([1], np.int32), np.array([5], np.int32))
            return None
        assert link.sampled(wait=False) is None
        told.set()
        return link.sampled(wait=True)

    taken = run(world_of(1, 2), body)[0]
    assert (taken[0], taken[1].tolist(), taken[2].tolist()) == (7, [1], [5])


@pytest.fixture
def shared() -> None:
    if build.why_not():
        pytest.skip(str(build.why_not()))


@pytest.fixture
def memory() -> Iterator[int]:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


def test_a_failed_rank_ends_the_waiting_of_the_others(shared: None, memory: int) -> None:
    world = world_of(2)
    os.ftruncate(memory, collectives_bytes(world))
    link = open_collectives(memory, world, 0)
    timer = threading.Timer(0.05, mark_failed, (memory, 1))
    timer.start()
    with pytest.raises(PeerError, match="rank 0 cannot go on: rank 1 of 2 failed"):  # and not that it waited too long
        link.all_reduce(torch.ones(4))
    timer.join()
    with pytest.raises(PeerError, match="rank 1 of 2 failed"):  # and nothing waits after it
        link.barrier()


def test_a_rank_that_does_not_come_is_late(shared: None, memory: int) -> None:
    world = world_of(2)
    os.ftruncate(memory, collectives_bytes(world))
    with pytest.raises(PeerError, match=r"did not come within 0\.2 s"):
        open_collectives(memory, world, 1, deadline_s=0.2).barrier()


def test_a_process_that_ended_is_missed(shared: None, memory: int) -> None:
    world = world_of(2)
    os.ftruncate(memory, collectives_bytes(world))
    program = (
        "import sys; from headrace.executor.parallel.rank_place import World, open_collectives; "
        "open_collectives(int(sys.argv[1]), World(2, 1, 8, 4, 48, 96), 1).barrier()"
    )
    link = open_collectives(memory, world, 0, deadline_s=60)
    child = subprocess.Popen([sys.executable, "-c", program, str(memory)], pass_fds=(memory,))
    link.barrier()
    assert child.wait(60) == 0
    with pytest.raises(PeerError, match=f"the process {child.pid} of another rank is gone"):
        link.barrier()


def test_memory_that_is_too_small_is_refused(shared: None, memory: int) -> None:
    os.ftruncate(memory, 4096)
    with pytest.raises(ValueError, match=f"has 4096 bytes; {collectives_bytes(world_of(2))} are needed"):
        open_collectives(memory, world_of(2), 0)


def test_areas_of_the_shared_memory_do_not_overlap() -> None:
    for tp_size, pp_size in ((1, 2), (2, 1), (2, 3), (4, 2)):
        layout = SharedLayout(world_of(tp_size, pp_size))
        starts = [layout.lines_at]
        if tp_size > 1:
            starts += [layout.stage_parts_at(stage) for stage in range(pp_size)] + [layout.logits_at]
        starts += [layout.pipe_at(stage, rank) for stage in range(pp_size - 1) for rank in range(tp_size)]
        starts += [layout.tokens_at, layout.token_slots_at] if pp_size > 1 else []
        starts.append(layout.total_bytes)
        assert starts == sorted(set(starts))
        assert all(start % 4096 == 0 for start in starts)


def test_the_mirrors_have_the_structures_sizes(shared: None) -> None:
    import ctypes

    library = build.load()
    assert library is not None
    for name, mirror in (
        ("group", kernels.GroupC),
        ("peer", kernels.PeerC),
        ("sum_args", kernels.RankSumArgs),
        ("gather_args", kernels.RankGatherArgs),
    ):
        assert getattr(library.dll, f"hr_sizeof_rank_{name}")() == ctypes.sizeof(mirror)


def test_layers_are_divided_with_the_rest_before_the_last_stage() -> None:
    def counts(layers: int, stages: int, partition: tuple[int, ...] = ()) -> list[int]:
        ranges = [RankCoordinates.of(rank, 1, stages, partition).layers(layers) for rank in range(stages)]
        assert [i for part in ranges for i in part] == list(range(layers))
        return [len(part) for part in ranges]

    assert counts(30, 4) == [7, 8, 8, 7]
    assert counts(4, 4) == [1, 1, 1, 1]
    assert counts(5, 2) == [3, 2]
    assert counts(5, 2, (1, 4)) == [1, 4]


def test_what_cannot_be_divided_is_refused_with_the_numbers() -> None:
    with pytest.raises(OptionError, match="4 pipeline stages cannot share a model of 3 layers"):
        RankCoordinates.of(0, 1, 4).layers(3)
    with pytest.raises(OptionError, match="2,2 gives out 4 layers; the model has 5"):
        RankCoordinates.of(0, 1, 2, (2, 2)).layers(5)
    with pytest.raises(OptionError, match="1,2,3 names 3 stages, but pipeline_parallel_size is 2"):
        RankCoordinates.of(0, 1, 2, (1, 2, 3))
    with pytest.raises(ModelError, match="an MLP of 10 cannot be divided among 4 tensor-parallel ranks"):
        RankCoordinates.of(1, 4, 1).share(10, "an MLP")


def test_the_place_is_known_without_torch() -> None:
    program = (
        "import sys, headrace.executor.parallel.rank_place as p; p.collectives_bytes(p.World(2, 2, 8, 4, 48, 96)); "
    )
    program += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path("/"), timeout=60)
