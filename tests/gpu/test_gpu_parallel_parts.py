"""The parts of several GPUs one by one: what ranks say to each other, small sums, agreed captures, a GPU for each."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pynvml
import pytest
import torch
from gloo_for_nccl import open_gloo_for_nccl
from graph_recorder import RecordingCapturer
from torch import Tensor

from headrace.core.engine.engine import load_executor
from headrace.core.options.engine_options import Options
from headrace.core.options.memory import fit_cache
from headrace.core.options.plan import MemoryReading, ModelDescription
from headrace.core.options.resolve import resolve
from headrace.executor.gpu.collectives import (
    LARGEST_BYTES,
    ONE_SHOT_BYTES,
    AgreedCapturer,
    GpuCollectives,
    SymmetricSums,
    open_small_sums,
)
from headrace.executor.gpu.hardware.device import CudaFacts, rank_device
from headrace.executor.gpu.hardware.visible_gpus import left_visible, visible_gpus
from headrace.executor.parallel.rank_place import PeerError, World, collectives_bytes
from headrace.executor.parallel.rendezvous import Rendezvous
from headrace.executor.placement import multiproc
from headrace.ipc.failure import HeadraceError, OptionError

Body = Callable[[GpuCollectives], Any]
Run = Callable[..., list[Any]]


@pytest.fixture
def run() -> Iterator[Run]:
    """Runs a function on every rank of a world, each in a thread, and gives what they returned."""
    fd = os.memfd_create("test")

    def on_all(world: World, body: Body, *, deadline_s: float = 30.0, **options: Any) -> list[Any]:
        os.ftruncate(fd, collectives_bytes(world))

        def one(rank: int) -> Any:
            link = open_gloo_for_nccl(Rendezvous(world, rank, range(world.size), fd, deadline_s), **options)
            return body(link)

        with ThreadPoolExecutor(world.size) as pool:
            return list(pool.map(one, range(world.size)))

    yield on_all
    os.close(fd)


def world_of(tp_size: int, pp_size: int = 1) -> World:
    return World(tp_size, pp_size, max_tokens=8, max_seqs=4, hidden_size=48, vocab_size=96)


def part(rank: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


# --- what ranks say to each other --------------------------------------------------------------------------------


def test_sums_and_gathers_are_of_all_ranks_of_a_stage_and_of_no_other(run: Run) -> None:
    def body(link: GpuCollectives) -> tuple[Tensor, Tensor, int]:
        rank = link._rank
        return link.all_reduce(part(rank, 5, 3)), link.all_gather(part(rank, 5, 3)), len(link.all_gather(part(0, 0, 3)))

    for rank, (total, whole, empty) in enumerate(run(world_of(2, 2), body)):
        first = rank // 2 * 2
        assert torch.allclose(total, part(first, 5, 3) + part(first + 1, 5, 3))
        assert torch.equal(whole, torch.cat((part(first, 5, 3), part(first + 1, 5, 3)), dim=1))
        assert empty == 0


def test_sums_in_order_do_not_depend_on_what_else_is_summed(run: Run) -> None:
    def body(link: GpuCollectives) -> tuple[Tensor, Tensor]:
        whole = part(link._rank, 64, 33).bfloat16()
        return link.all_reduce(whole.clone()), link.all_reduce(whole[3:4].clone())

    parts = [part(rank, 64, 33).bfloat16().float() for rank in range(4)]
    expected = (((parts[0] + parts[1]) + parts[2]) + parts[3]).bfloat16()
    for whole, row in run(world_of(4), body, in_order=True):
        assert torch.equal(whole, expected)
        assert torch.equal(row, expected[3:4])


def test_hidden_states_go_to_the_next_stage_and_tokens_back(run: Run) -> None:
    def body(link: GpuCollectives) -> Any:
        stage, tp_rank = divmod(link._rank, 2)
        if stage == 0:
            link.send(part(tp_rank, 2, 3, 4))
            return link.sampled(wait=True)
        got = link.receive((2, 3, 4), torch.float32)
        if tp_rank == 0:
            link.publish(7, np.array([1, 3], np.int32), np.array([42, 43], np.int32))
        link.close()
        return got

    found = run(world_of(2, 2), body)
    for step, rows, token_ids in found[:2]:
        assert (step, rows.tolist(), token_ids.tolist()) == (7, [1, 3], [42, 43])
    assert [torch.equal(got, part(rank, 2, 3, 4)) for rank, got in enumerate(found[2:])] == [True, True]


def test_a_rank_that_does_not_come_is_another_ones_failure(run: Run) -> None:
    def body(link: GpuCollectives) -> str:
        if link._rank == 1:
            return ""
        with pytest.raises(PeerError, match="rank 0 cannot go on: ") as error:
            link.all_reduce(torch.ones(4))
        return str(error.value)

    assert run(world_of(2), body, deadline_s=0.5)[0]


def test_an_error_of_its_own_is_not_blamed_on_another(run: Run) -> None:
    def body(link: GpuCollectives) -> None:
        link._finish(lambda: (_ for _ in ()).throw(RuntimeError("CUDA error: out of memory")))

    with pytest.raises(RuntimeError, match="out of memory") as error:
        run(world_of(1), body)
    assert not isinstance(error.value, HeadraceError)


# --- graphs ------------------------------------------------------------------------------------------------------


def test_a_graph_that_one_rank_cannot_capture_nobody_uses(run: Run) -> None:
    def body(link: GpuCollectives) -> str:
        fail_at = 1 if link._rank == 1 else 0
        capturer = AgreedCapturer(RecordingCapturer(fail_at), link.agree)
        x = torch.ones(2)
        with pytest.raises(RuntimeError) as error:
            capturer.capture(lambda: link.all_reduce(x))
        return str(error.value)

    assert run(world_of(2), body) == [
        "another rank could not capture it",
        "CUDA out of memory. Tried to allocate 2.00 GiB\nand more that nobody wants to read",
    ]


def test_a_captured_sum_is_made_again_at_each_replay(run: Run) -> None:
    def body(link: GpuCollectives) -> list[list[float]]:
        x = torch.zeros(2)
        replay, total = AgreedCapturer(RecordingCapturer(), link.agree).capture(lambda: link.all_reduce(x * 1))
        found = []
        for value in (1.0, 5.0):
            x.fill_(value + link._rank)
            replay()
            found.append(total.tolist())
        return found

    assert run(world_of(2), body) == [[[3.0, 3.0], [11.0, 11.0]]] * 2


def test_a_step_that_cannot_even_be_run_is_the_end_and_nobody_is_asked() -> None:
    def run_it() -> None:
        raise RuntimeError("CUDA out of memory\nand more")

    capturer = AgreedCapturer(RecordingCapturer(), lambda well: pytest.fail("the others wait in that step"))
    with pytest.raises(HeadraceError, match=r"captured as a CUDA graph cannot be run: CUDA out of memory$"):
        capturer.capture(run_it)


# --- small sums --------------------------------------------------------------------------------------------------


class TwoEqualRanks:
    """In the place of torch.ops.symm_mem: the other rank has the same numbers."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def one_shot_all_reduce_copy_out(self, shared: Tensor, x: Tensor, op: str, group: str, out: Tensor) -> Tensor:
        assert (op, group, shared.shape) == ("sum", "stage", x.shape)
        self.calls.append("one-shot")
        shared.copy_(x)
        return out.copy_(shared * 2)

    def two_shot_all_reduce_out(self, shared: Tensor, op: str, group: str, out: Tensor) -> Tensor:
        assert (op, group, shared.shape) == ("sum", "stage", out.shape)
        self.calls.append("two-shot")
        return out.copy_(shared * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_sums_take_the_way_of_their_size_in_their_own_place(dtype: torch.dtype) -> None:
    ops = TwoEqualRanks()
    sums = SymmetricSums(torch.zeros(LARGEST_BYTES, dtype=torch.uint8), 2, "stage", ops)
    for num_bytes, way in ((64, "one-shot"), (ONE_SHOT_BYTES[2], "one-shot"), (ONE_SHOT_BYTES[2] + 64, "two-shot")):
        x = part(0, 4, num_bytes // dtype.itemsize // 4).to(dtype)
        expected = x * 2
        assert sums.takes(x)
        assert sums.add(x) is x
        assert torch.equal(x, expected)
        assert ops.calls.pop() == way


def test_what_the_kernels_do_not_take_goes_to_the_process_group() -> None:
    sums = SymmetricSums(torch.zeros(4096, dtype=torch.uint8), 2, "stage", TwoEqualRanks())
    assert sums.takes(torch.zeros(1024))
    assert not sums.takes(torch.zeros(1028)), "larger than the memory"
    assert not sums.takes(torch.zeros(64, dtype=torch.float16))
    assert not sums.takes(torch.zeros(63)), "no whole number of 16 bytes"
    assert not sums.takes(torch.zeros(80)[3:67]), "begins within 16 bytes"


@pytest.mark.parametrize(
    ("ranks", "reasons", "fails", "said"),
    [
        (range(2), ("", "cuda:1 has no access"), False, "another rank cannot"),
        (range(1), ("", ""), False, "the ranks of a stage are on several hosts, or were placed one by one"),
        (range(2), ("", ""), True, "this build has none"),
    ],
)
def test_small_sums_are_for_all_ranks_or_for_none_and_one_line_says_why(
    run: Run,
    ranks: range,
    reasons: tuple[str, str],
    fails: bool,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def join() -> SymmetricSums:
        if fails:
            raise RuntimeError("this build has none\nat all")
        return SymmetricSums(torch.zeros(64, dtype=torch.uint8), 2, "stage", None)

    def body(link: GpuCollectives) -> Any:
        rendezvous = Rendezvous(world_of(2), link._rank, ranks, -1, 30.0)
        return open_small_sums(link, rendezvous, why_not=reasons[link._rank], join=join)

    with caplog.at_level(logging.WARNING):
        assert run(world_of(2), body) == [None, None]
    (line,) = [record.message for record in caplog.records]
    assert line.endswith(f"go through NCCL alone, whatever their size: {said}")


def test_small_sums_are_used_where_all_ranks_can(run: Run) -> None:
    def body(link: GpuCollectives) -> tuple[str, list[str], list[float]]:
        ops = TwoEqualRanks()
        sums = SymmetricSums(torch.zeros(64, dtype=torch.uint8), 2, "stage", ops)
        rendezvous = Rendezvous(world_of(2), link._rank, range(2), -1, 30.0)
        link.small_sums = open_small_sums(link, rendezvous, why_not="", join=lambda: sums)
        found = link.all_reduce(torch.full((8,), 3.0)).tolist()
        return link.sums, ops.calls, found

    for said, calls, found in run(world_of(2), body):
        assert said == "symmetric memory up to 64 bytes, else process group"
        assert (calls, found) == (["one-shot"], [6.0] * 8)


# --- a GPU for each rank -----------------------------------------------------------------------------------------

FOUR_GPUS = CudaFacts("2.13.0+cu128", "12.8", "12.9", 4)


def test_ranks_of_a_host_take_its_gpus_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        for asked in ("auto", "cuda"):
            assert rank_device(asked, lambda: FOUR_GPUS) == torch.device("cuda", rank)
    assert rank_device("cpu", lambda: pytest.fail("nobody asked for a GPU")) == torch.device("cpu")
    no_driver = CudaFacts("2.13.0+cu128", "12.8", None, 0)
    assert rank_device("auto", lambda: no_driver) == torch.device("cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(OptionError, match=r"device=auto: 8 ranks on this host .* need a GPU each, and there are 4"):
        rank_device("auto", lambda: FOUR_GPUS)


def test_too_few_gpus_are_told_before_any_worker_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiproc, "visible_gpus", lambda: 1)
    monkeypatch.setattr(multiproc, "WorkerGroup", lambda *_: pytest.fail("a worker was started"))
    two = {"device": "cuda", "tensor_parallel_size": 2}
    with pytest.raises(OptionError, match=r"device=cuda: 2 ranks on this host .* need a GPU each, and there is 1 "):
        load_executor(Options(model="m", **two))
    with pytest.raises(OptionError, match="device=cuda:1 is one GPU, and 2 ranks compute on this host"):
        load_executor(Options(model="m", **(two | {"device": "cuda:1"})))


@pytest.mark.parametrize(
    ("variable", "count"),
    [(None, 4), ("", 0), ("2", 1), ("0,3", 2), ("0, 1,2,3", 4), ("0,4,1", 1), ("-1", 0), ("1,-1,2", 1),
     ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,MIG-1", 2)],
)  # fmt: skip
def test_gpus_that_the_environment_hides_do_not_count(variable: str | None, count: int) -> None:
    assert left_visible(variable, 4) == count


def test_without_a_driver_their_number_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found() -> None:
        raise pynvml.NVMLError_LibraryNotFound()

    monkeypatch.setattr(pynvml, "nvmlInit", not_found)
    assert visible_gpus() is None


def test_blocks_are_as_many_as_fit_the_rank_with_the_least_room() -> None:
    model = ModelDescription(
        name="m", architecture="LlamaForCausalLM", checkpoint_dtype="float32", max_model_len=1 << 14, vocab_size=100,
        num_layers=2, hidden_size=64, intermediate_size=64, kv_elements_per_token=64, kv_rows_per_token=4,
        eos_token_ids=(), generation_defaults={},
    )  # fmt: skip
    plan = resolve(Options(model="m", max_num_seqs=64), model)
    whole = MemoryReading(
        total_bytes=64 << 20, available_bytes=60 << 20, weights_bytes=4 << 20, activation_bytes=1 << 20, device="GPU"
    )
    heavier = MemoryReading(
        total_bytes=64 << 20, available_bytes=60 << 20, weights_bytes=20 << 20, activation_bytes=1 << 20, device="GPU"
    )
    crowded = MemoryReading(
        total_bytes=64 << 20, available_bytes=9 << 20, weights_bytes=4 << 20, activation_bytes=1 << 20, device="GPU"
    )
    assert MemoryReading.tightest([whole, heavier], 0.9) is heavier
    assert MemoryReading.tightest([whole, crowded, heavier], 0.9) is crowded
    assert fit_cache(plan, crowded).num_blocks < fit_cache(plan, heavier).num_blocks < fit_cache(plan, whole).num_blocks
