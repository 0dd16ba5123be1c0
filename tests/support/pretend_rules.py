"""Tests of the simulated GPU's checks: each case runs code that breaks one rule."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_cuda import DEVICE, GPU


def refused(run: Callable[[], Any], words: str) -> None:
    with pytest.raises((RuntimeError, ValueError, AssertionError), match=re.escape(words)):
        run()


def captured(run: Callable[[], Any]) -> Any:
    """Captures the operations of `run` in a graph."""
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool="shared")  # type: ignore[arg-type]
        try:
            run()
        finally:
            graph.capture_end()
    return graph


def pinned(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int32, pin_memory=True).fill_(7)


def case_tensors_of_two_devices_do_not_meet(_: Path) -> None:
    with torch.cuda.device(DEVICE), torch.inference_mode():
        here = torch.ones(3, device=DEVICE)
        refused(lambda: here + torch.ones(3), "same device")
        refused(lambda: torch.cat([here, torch.ones(3)]), "same device")
        refused(lambda: here.index_copy_(0, torch.arange(3), here), "same device")
        assert (here + torch.tensor(1.0)).tolist() == [2.0, 2.0, 2.0], "a number may be the host's"
        here[1:] = 5
        here[torch.tensor([0], device=DEVICE)] = 4.0
        assert here.tolist() == [4.0, 5.0, 5.0]
        refused(here.numpy, "not supported")
    with pytest.raises(RuntimeError):  # raised by torch itself, which has no such device
        torch.empty(3, device=DEVICE)


def case_views_share_memory(_: Path) -> None:
    with torch.cuda.device(DEVICE):
        words = torch.zeros(8, dtype=torch.int32, device=DEVICE)
        with torch.inference_mode():
            words[2:4].view(torch.float64).fill_(1.0)
            left, right = words.split([4, 4])
            right.view(torch.float32)[0] = 1.0
            words.as_strided((2,), (4,), 3).add_(1)
            left[:1].index_copy_(0, torch.zeros(1, dtype=torch.int64, device=DEVICE), right[3:])
        assert words.tolist() == [1, 0, 0, 0x3FF00001, 0x3F800000, 0, 0, 1]


def case_every_wait_is_noticed(_: Path) -> None:
    waits: dict[str, Callable[[torch.Tensor], Any]] = {
        "_local_scalar_dense": lambda x: x[0].item(),
        "_local_scalar_dense ": lambda x: bool(x[0] > 0),
        "a copy to the host": lambda x: x.cpu(),
        "a copy to the host ": lambda x: x.tolist(),
        "nonzero": lambda x: x.nonzero(),
        "masked_select": lambda x: x.masked_select(x > 1),
        "index by a mask": lambda x: x[x > 1],
        "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
        "_unique2": lambda x: x.unique(),
        "memory that is not pinned": lambda x: torch.zeros(3).to(DEVICE, non_blocking=True),
        "memory that is not pinned ": lambda x: torch.tensor([1.0], device=DEVICE),
        "memory that is  not pinned": lambda x: x[[0, 1]],
        "indices of the host": lambda x: x[torch.tensor([0, 1])],
        "by memory that is not pinned": lambda x: torch.empty(3).copy_(x, non_blocking=True),
        "by memory that is not  pinned": lambda x: pinned(3).to(DEVICE, torch.int64, non_blocking=True),
        "a copy to the device": lambda x: pinned(3).to(DEVICE),
    }
    with torch.cuda.device(DEVICE), torch.inference_mode():
        for words, wait in waits.items():
            here, there = torch.ones(3, device=DEVICE), pinned(3)
            GPU.syncs.clear()
            wait(here)
            assert any(" ".join(words.split()) in sync for sync in GPU.syncs), (words, GPU.syncs)
            refused(lambda wait=wait, here=here: captured(lambda: wait(here)), "not permitted")  # type: ignore[misc]
        GPU.syncs.clear()
        there.to(DEVICE, non_blocking=True).long().repeat_interleave(here.long(), output_size=3)
        assert not GPU.syncs
        for forbidden in (lambda: pinned(3), torch.cuda.Event().query, torch.cuda.synchronize):
            refused(lambda run=forbidden: captured(run), "not permitted")  # type: ignore[misc]
        with torch.cuda.stream(torch.cuda.default_stream()):
            refused(lambda: torch.cuda.CUDAGraph().capture_begin(), "non-default stream")


def case_copies_arrive_late_and_from_memory_that_stays(_: Path) -> None:
    with torch.cuda.device(DEVICE), torch.inference_mode():
        source, done = pinned(2), torch.cuda.Event()
        here = source.to(DEVICE, non_blocking=True)
        back = torch.empty(2, dtype=torch.int32, pin_memory=True)
        back.copy_(here, non_blocking=True)
        done.record()
        assert back.tolist() == [-1, -1]
        assert not done.query()
        done.synchronize()
        assert back.tolist() == [7, 7]
        here.copy_(source, non_blocking=True)
        source.fill_(8)
        done.record()
        refused(done.synchronize, "may still have read it")


def case_a_second_streams_copies_are_waited_for(_: Path) -> None:
    with torch.cuda.device(DEVICE), torch.inference_mode():
        side, here, source = torch.cuda.Stream(DEVICE), torch.zeros(2, dtype=torch.int32, device=DEVICE), pinned(2)

        def copy(joins: bool) -> None:
            side.wait_stream(torch.cuda.current_stream(DEVICE))
            with torch.cuda.stream(side):
                here.copy_(source, non_blocking=True)
            if joins:
                torch.cuda.current_stream(DEVICE).wait_stream(side)

        copy(joins=False)
        assert here.tolist() == [-1, -1]
        copy(joins=True)
        assert here.tolist() == [7, 7]
        here.zero_()
        graph = captured(lambda: copy(joins=True))
        assert here.tolist() == [0, 0], "nothing is computed in a capture"
        source.fill_(9)
        graph.replay()
        assert here.tolist() == [9, 9]
        refused(lambda: captured(lambda: copy(joins=False)), "unjoined")


def case_graphs_share_a_pool_and_fixed_addresses(_: Path) -> None:
    with torch.cuda.device(DEVICE), torch.inference_mode():
        here, made = torch.ones(2, device=DEVICE), []
        first = captured(lambda: made.append(here * 2))
        second = captured(lambda: made.append(here * 3))
        first.replay()
        assert made[0].tolist() == [2.0, 2.0]
        second.replay()
        assert made[1].tolist() == [3.0, 3.0]
        assert not made[0].isfinite().any().item(), "another graph has run in its memory"
        storage = here.untyped_storage()
        storage.resize_(0)
        storage.resize_(8)
        refused(first.replay, "has moved")


def case_kernels_take_no_memory_of_the_host(_: Path) -> None:
    from headrace.kernels.triton.activation import activate

    with torch.cuda.device(DEVICE):
        here = torch.ones(2, 4, device=DEVICE)
        refused(lambda: activate(here, "silu", out=torch.ones(2, 4)), "cannot be accessed from Triton")
    refused(lambda: activate(here, "silu", out=here), "outside of the device's context")
