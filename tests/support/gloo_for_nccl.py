"""gloo in place of NCCL, for GPU ranks that run on the CPU: each collective is a torch op that a graph can record."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.executor.gpu.collectives import DeviceGroups, GpuCollectives
from headrace.executor.parallel.rendezvous import Rendezvous

_calls: dict[int, Callable[[list[Tensor]], None]] = {}
_numbers = count()


_library = torch.library.Library("headrace_tests", "DEF")
_library.define("collective(int number, Tensor(a!)[] tensors) -> ()")
_library.impl("collective", lambda number, tensors: _calls[number](tensors), "CompositeExplicitAutograd")
"""Runs call `number` of this process on the tensors; the call is complete when the op returns."""


class RecordableGroup:
    """The part of a process group that `GpuCollectives` uses. Like NCCL with asyncOp off, it returns no work to wait
    for."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout, options._devices = timeout, [gloo.create_device(hostname="127.0.0.1")]
        self._group = gloo(store, rank, size, options)
        self.num_calls = 0

    def allreduce(self, tensors: list[Tensor], options: Any) -> None:
        self._carry_out(tensors, lambda group, each: group.allreduce(each, options))

    def _allgather_base(self, out: Tensor, x: Tensor, options: Any) -> None:
        self._carry_out([out, x], lambda group, each: group._allgather_base(*each, options))

    def send(self, tensors: list[Tensor], to: int, tag: int) -> None:
        self._carry_out(tensors, lambda group, each: group.send(each, to, tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> None:
        self._carry_out(tensors, lambda group, each: group.recv(each, source, tag))

    def _carry_out(self, tensors: list[Tensor], start: Callable[[Any, list[Tensor]], dist.Work]) -> None:
        def run(each: list[Tensor]) -> None:
            self.num_calls += 1
            start(self._group, each).wait()

        number = next(_numbers)
        _calls[number] = run
        torch.ops.headrace_tests.collective(number, tensors)


def open_gloo_for_nccl(rendezvous: Rendezvous, *, in_order: bool = False) -> GpuCollectives:
    """As `gpu_collectives_nccl.open_nccl`."""
    world, store, timeout = rendezvous.world, rendezvous.store(), timedelta(seconds=rendezvous.deadline_s)
    stage, rank_in_stage = divmod(rendezvous.rank, world.tp_size)
    groups = DeviceGroups(
        world=RecordableGroup(dist.PrefixStore("devices", store), rendezvous.rank, world.size, timeout),
        stage=RecordableGroup(dist.PrefixStore(f"stage {stage}", store), rank_in_stage, world.tp_size, timeout),
    )
    return GpuCollectives(rendezvous, dist.PrefixStore("hosts", store), torch.device("cpu"), groups, in_order=in_order)
