"""How ranks on GPUs talk: tensors from device to device, and what the hosts have to say to each other by gloo.

    sums, gathers of a stage   its process group, on the current stream; small sums through symmetric memory
    hidden states              the world's process group, from a stage to the next
    sampled tokens, agreement  gloo, between the hosts' processes: the core has read a row's token before it plans the
                               row's next step, so a way from device to device would not bring it any sooner

Nothing on the device's way waits on the host, so all of it can be captured in a graph. A rank that is gone leaves the
others' devices waiting: their hosts notice that a step takes too long, or are ended by the supervisor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions

from headrace.executor.gpu.graphs import Capturer, Replay
from headrace.executor.parallel.gloo import GlooCollectives
from headrace.executor.parallel.rank_place import PeerError
from headrace.executor.parallel.rendezvous import Rendezvous
from headrace.ipc.failure import HeadraceError

logger = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
HIDDEN_TAG = 3
PEERS_FAULT = ("remote", "by peer", "timed out", "connection")
"""In the words of NCCL and gloo, when it is another rank that is gone."""


class SmallSums(Protocol):
    """A faster way for sums that are small."""

    description: str

    def takes(self, x: Tensor) -> bool: ...
    def add(self, x: Tensor) -> Tensor:
        """The sum over the stage's ranks, in x's place."""
        ...


@dataclass(frozen=True, eq=False)
class DeviceGroups:
    """torch.distributed process groups whose tensors are on the ranks' devices: NCCL's on GPUs."""

    world: Any
    stage: Any
    """Of this rank's stage; unused where it is alone there."""


class GpuCollectives(GlooCollectives):
    """`Collectives` of one rank. Sums are equal on each rank, as one of them makes each part of them.

    in_order: sums are made as the contract of `Collectives` says, in float32 in order of rank, whatever their size: a
    token's result then does not depend on its batch.
    """

    small_sums: SmallSums | None = None

    def __init__(
        self,
        meeting: Rendezvous,
        store: dist.Store,
        device: torch.device,
        groups: DeviceGroups,
        *,
        in_order: bool = False,
    ) -> None:
        super().__init__(meeting.world, meeting.rank, store, meeting.host or LOOPBACK, meeting.deadline_s)
        self.device, self._groups, self._in_order = device, groups, in_order
        self._sum, self._gather = dist.AllreduceOptions(), AllgatherOptions()
        # NCCL's own stream is left out: the work is part of the current one, and of a graph that is captured there.
        self._sum.asyncOp = self._gather.asyncOp = False

    @property
    def sums(self) -> str:
        """How sums go, for DescribeEngine."""
        if self._in_order:
            return "in order of rank"
        return "process group" if self.small_sums is None else f"{self.small_sums.description}, else process group"

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if not x.numel():
            return x
        if self._in_order:
            return _summed_in_order(self._each(x))
        if self.small_sums is not None and self.small_sums.takes(x):
            return self.small_sums.add(x)
        self._finish(lambda: self._groups.stage.allreduce([x], self._sum))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return self._each(x.contiguous()).transpose(0, 1).reshape(len(x), self._world.tp_size * x.shape[1])

    def send(self, x: Tensor) -> None:
        x, to = x.contiguous(), self._rank + self._world.tp_size
        if x.numel():
            self._finish(lambda: self._groups.world.send([x], to, HIDDEN_TAG))

    def receive(self, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        x, source = torch.empty(shape, dtype=dtype, device=self.device), self._rank - self._world.tp_size
        if x.numel():
            self._finish(lambda: self._groups.world.recv([x], source, HIDDEN_TAG))
        return x

    def agree(self, is_well: bool) -> bool:
        """Whether all ranks of the world are well. Each of them must ask."""
        vote, least = torch.tensor([int(is_well)]), dist.AllreduceOptions()
        least.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._wait(self._all.allreduce([vote], least))
        return bool(vote)

    def _each(self, x: Tensor) -> Tensor:
        """[tp_size, *x.shape]"""
        out = torch.empty((self._world.tp_size, *x.shape), dtype=x.dtype, device=x.device)
        if x.numel():
            self._finish(lambda: self._groups.stage._allgather_base(out.flatten(0, 1), x, self._gather))
        return out

    def _finish(self, start: Callable[[], dist.Work | None]) -> None:
        """Makes the current stream wait for it; on a CPU, the caller."""
        try:
            work = start()
            if work is not None:
                work.wait()
        except RuntimeError as error:
            text = str(error).strip().partition("\n")[0]
            if any(word in text.lower() for word in PEERS_FAULT):
                raise PeerError(f"rank {self._rank} cannot go on: {text}") from error
            raise


def _summed_in_order(parts: Tensor) -> Tensor:
    """[tp_size, ...] -> [...]: one addition after the other, whatever the shape."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


class AgreedCapturer:
    """A `Capturer` whose graphs all ranks have, or none: a step runs in the same sizes on each of them."""

    def __init__(self, capturer: Capturer, agree: Callable[[bool], bool]) -> None:
        self._capturer, self._agree = capturer, agree

    @property
    def pool_bytes(self) -> int:
        return self._capturer.pool_bytes

    def forget(self) -> None:
        self._capturer.forget()

    def capture(self, run: Callable[[], Any]) -> tuple[Replay, Any]:
        """Raises RuntimeError where any rank could not capture it, and HeadraceError where this one could not run it.

        The others wait for a rank that cannot run it, so that is the end of the engine.
        """
        runs = 0

        def counted() -> Any:
            nonlocal runs
            runs += 1
            return run()

        try:
            captured = self._capturer.capture(counted)
        except (RuntimeError, AssertionError, ValueError, TypeError) as error:
            if runs < 2:  # the first run is no capture: its collectives are carried out
                why = str(error).strip().partition("\n")[0]
                raise HeadraceError(f"a step that was to be captured as a CUDA graph cannot be run: {why}") from error
            self._agree(False)
            raise
        if not self._agree(True):
            raise RuntimeError("another rank could not capture it")
        return captured
