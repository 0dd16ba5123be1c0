"""A rank's place in the world: which part of the model it has, and which ranks it communicates with. Imports no torch.

The world has tp_size x pp_size ranks. A pipeline stage has a run of layers, and the stage's tp_size ranks divide each
matrix among them; rank = pp_rank * tp_size + tp_rank, as in vLLM.

How a parent of several ranks on one host uses this:

    world = World.of(plan, tp_size, pp_size)                     # once the plan is known
    fd = os.memfd_create("headrace"); os.ftruncate(fd, collectives_bytes(world))
    # in each worker, to which fd was passed:
    rank = make_rank(options, RankCoordinates.of(number, tp_size, pp_size))
    rank.describe(...)
    rank.join(Rendezvous(world, number, ..., memory_fd=fd, ...))  # between describe and load
    rank.load(plan, ...); rank.allocate(...); rank.submit(plan); rank.collect()
    # in the parent when a worker died, so that the others stop waiting for it within 100 ms:
    mark_failed(fd, number)

Every rank gets every StepPlan; the step's result is the StepResult of the rank whose `place.replies` is true.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from headrace.core.options.eplb import eplb_of
from headrace.ipc.failure import HeadraceError, ModelError, OptionError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from headrace.core.options.engine_options import Options
    from headrace.core.options.plan import Plan
    from headrace.executor.parallel.expert_exchange import ExpertExchange

DEADLINE_S = 300.0
"""How long a rank waits for another rank within a step."""
FAILED_AT = 8
"""Offset in the shared memory of a uint32: 0, or 1 + the rank that failed."""


class PeerError(HeadraceError):
    """A rank that this one waited for failed, ended or took too long; the cause is that rank's own failure."""


class Collectives(Protocol):
    """Communication between a world's ranks. Methods raise PeerError when a rank they wait for died or took too long.

    All ranks of a stage call all_reduce, all_gather and barrier in the same order with the same shapes.
    """

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the stage's ranks, added in float32 in order of rank: bit-identical on each. May overwrite x."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """The x [rows, columns] of the stage's ranks side by side, in order of rank: [rows, tp_size * columns]."""
        ...

    def barrier(self) -> None:
        """Returns once every rank of the stage has called it."""
        ...

    def send(self, x: Tensor) -> None:
        """Sends x [n, rows, columns] to the rank with the same tp_rank in the next stage."""
        ...

    def receive(self, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        """Receives what the previous stage sent, which must have exactly this shape and type."""
        ...

    def publish(self, step: int, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Sends a step's sampled tokens, [n] int32 each, from the last stage's first rank to all other stages'
        ranks."""
        ...

    def sampled(self, wait: bool) -> tuple[int, np.ndarray, np.ndarray] | None:
        """The next published step: step, rows, token_ids. None if none has arrived and `wait` is false."""
        ...

    def close(self) -> None:
        """Releases the memory or the connections. Safe to call twice."""
        ...


@dataclass(frozen=True)
class World:
    """The number of ranks, and the sizes that bound what they send each other."""

    tp_size: int
    pp_size: int
    max_tokens: int
    """Most tokens of a step."""
    max_seqs: int
    """Most rows of sampled tokens, or of logits, of a step."""
    hidden_size: int
    vocab_size: int

    @classmethod
    def of(cls, plan: Plan, tp_size: int, pp_size: int) -> World:
        return cls(
            tp_size=tp_size,
            pp_size=pp_size,
            max_tokens=plan.max_num_batched_tokens,
            max_seqs=plan.max_logits,
            hidden_size=plan.model.hidden_size,
            vocab_size=plan.model.vocab_size,
        )

    @classmethod
    def of_engines(cls, plan: Plan, size: int, ranks_of_each: int) -> World:
        """The world of `size` engine cores of so many ranks that share experts; sized for all cores' tokens at once.

        The ranks with the same number in their cores form a group, like the ranks of a stage; only members of one group
        communicate.
        """
        return cls(
            tp_size=size,
            pp_size=ranks_of_each,
            max_tokens=size * (plan.max_num_batched_tokens + plan.max_logits),
            max_seqs=1,
            hidden_size=plan.model.hidden_size,
            vocab_size=1,
        )

    @property
    def size(self) -> int:
        return self.tp_size * self.pp_size


@dataclass(frozen=True)
class RankCoordinates:
    """One rank's part of the model. With more than one rank `collectives` is needed, but only to compute."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    collectives: Collectives | None = None
    layer_partition: tuple[int, ...] = ()
    """Number of layers of each stage; empty divides them evenly."""
    expert_parallel: bool = False
    """Each expert belongs to one rank, instead of having its rows divided among all."""
    experts_in_turn: bool = False
    """With expert_parallel: experts go to ranks round-robin, instead of in runs."""
    balances_experts: bool = False
    """With expert_parallel: experts move between ranks by their load, see `executor.parallel.load_balancing`."""
    redundant_experts: int = 0
    """Extra copies of experts, per layer, over all ranks."""
    dp_rank: int = 0
    dp_size: int = 1
    """The number of engine cores that divide the experts among them; see `Options.shares_experts`."""
    exchange: ExpertExchange | None = None
    """Sends tokens to the experts of other cores and back; needed to compute where dp_size is above 1."""

    def __post_init__(self) -> None:
        for rank, size, what in ((self.tp_rank, self.tp_size, "tensor"), (self.pp_rank, self.pp_size, "pipeline")):
            if not 0 <= rank < size:
                raise ValueError(f"{what} parallel rank {rank} of {size}")
        if self.layer_partition and len(self.layer_partition) != self.pp_size:
            given = ",".join(map(str, self.layer_partition))
            raise OptionError(
                f"pipeline_layer_partition {given} names {len(self.layer_partition)} stages, but "
                f"pipeline_parallel_size is {self.pp_size}"
            )

    @classmethod
    def of(cls, rank: int, tp_size: int, pp_size: int, layer_partition: tuple[int, ...] = ()) -> RankCoordinates:
        """The place of a rank of the world."""
        pp_rank, tp_rank = divmod(rank, tp_size)
        return cls(tp_rank, tp_size, pp_rank, pp_size, None, layer_partition)

    @classmethod
    def of_options(cls, rank: int, options: Options) -> RankCoordinates:
        """The place of a rank in the world that the options describe. Raises OptionError for a wrong partition."""
        sizes = options.tensor_parallel_size, options.pipeline_parallel_size
        place = cls.of(rank, *sizes, options.pipeline_layer_partition)
        eplb = eplb_of(options)
        return replace(
            place,
            expert_parallel=options.enable_expert_parallel,
            experts_in_turn=options.expert_placement_strategy == "round_robin",
            balances_experts=eplb is not None,
            redundant_experts=0 if eplb is None else eplb.num_redundant_experts,
        )

    def with_collectives(self, collectives: Collectives) -> RankCoordinates:
        return replace(self, collectives=collectives)

    def sharing_experts(self, exchange: ExpertExchange) -> RankCoordinates:
        return replace(self, exchange=exchange, dp_rank=exchange.dp_rank, dp_size=exchange.dp_size)

    @property
    def rank(self) -> int:
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def replies(self) -> bool:
        """Whether this rank's StepResult is the step's result; the other ranks' contain nothing more."""
        return self.is_last_stage and self.tp_rank == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.tp_size == 1 else self.link.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        return x if self.tp_size == 1 else self.link.all_gather(x)

    @property
    def link(self) -> Collectives:
        assert self.collectives is not None, f"rank {self.rank} of {self.world_size} is not connected"
        return self.collectives

    def share(self, size: int, what: str) -> slice:
        """This rank's part of `size` rows. Raises ModelError when they do not divide evenly."""
        if size % self.tp_size:
            raise ModelError(f"{what} of {size} cannot be divided among {self.tp_size} tensor-parallel ranks")
        part = size // self.tp_size
        return slice(self.tp_rank * part, (self.tp_rank + 1) * part)

    def vocabulary(self, size: int) -> slice:
        """This rank's range of token ids; the last rank has fewer where the vocabulary does not divide evenly.

        Raises ModelError where it would have none.
        """
        part = -(-size // self.tp_size)
        if self.tp_rank * part >= size:
            raise ModelError(f"a vocabulary of {size} cannot be divided among {self.tp_size} tensor-parallel ranks")
        return slice(min(self.tp_rank * part, size), min((self.tp_rank + 1) * part, size))

    @property
    def expert_ranks(self) -> tuple[int, int]:
        """This rank's number among all ranks, of all cores, that may divide experts; and how many ranks those are."""
        return self.dp_rank * self.tp_size + self.tp_rank, self.dp_size * self.tp_size

    def has_whole_experts(self, count: int) -> bool:
        """Whether each of a layer's `count` experts belongs to one rank. With fewer experts than ranks, each is divided
        by rows even with expert_parallel."""
        _, size = self.expert_ranks
        return self.expert_parallel and 1 < size <= count

    def expert_placement(self, count: int) -> tuple[Sequence[int], ...]:
        """For each rank the experts of a layer that it reads, where experts are divided whole. With copies, the
        numbering continues after the last expert with the first."""
        _, size = self.expert_ranks
        if self.redundant_experts:
            each = (count + self.redundant_experts) // size
            return tuple([number % count for number in range(rank * each, (rank + 1) * each)] for rank in range(size))
        if self.experts_in_turn:
            return tuple(range(rank, count, size) for rank in range(size))
        return tuple(range(rank * count // size, (rank + 1) * count // size) for rank in range(size))

    def experts(self, count: int) -> Sequence[int]:
        """The experts of a layer that this rank has: its own with expert parallelism, otherwise parts of all."""
        if not self.has_whole_experts(count):
            return range(count)
        return self.expert_placement(count)[self.expert_ranks[0]]

    def layers(self, num_layers: int) -> range:
        """This stage's layers. A remainder goes to the stages before the last, which has the head, from the back.

        Raises OptionError, with the numbers, for more stages than layers and for a partition that does not add up.
        """
        if self.layer_partition:
            if sum(self.layer_partition) != num_layers or min(self.layer_partition) < 1:
                given = ",".join(map(str, self.layer_partition))
                raise OptionError(
                    f"pipeline_layer_partition {given} gives out {sum(self.layer_partition)} layers; the model has "
                    f"{num_layers}, and every stage needs at least one"
                )
            counts = list(self.layer_partition)
        else:
            if num_layers < self.pp_size:
                raise OptionError(f"{self.pp_size} pipeline stages cannot share a model of {num_layers} layers")
            each, rest = divmod(num_layers, self.pp_size)
            counts = [each] * self.pp_size
            for stage in range(self.pp_size - 2, self.pp_size - 2 - rest, -1):
                counts[stage] += 1
        first = sum(counts[: self.pp_rank])
        return range(first, first + counts[self.pp_rank])


SINGLE = RankCoordinates()


def open_collectives(fd: int, world: World, rank: int, *, deadline_s: float = DEADLINE_S) -> Collectives:
    """Joins the world over the shared memory `fd`: zeroed, of `collectives_bytes(world)`, the same in every rank.

    Does not wait where the CPU kernels can be compiled; otherwise the ranks use gloo over loopback, and this returns
    once all have joined. `fd` may be closed afterwards. Raises ValueError for memory that is too small.
    """
    from headrace.executor.parallel.collectives import open_shared  # imports torch

    return open_shared(fd, world, rank, deadline_s)


def collectives_bytes(world: World) -> int:
    """Size of the shared memory. Most of its pages are never touched and so never allocated."""
    from headrace.executor.parallel.shared_layout import SharedLayout

    return SharedLayout(world).total_bytes


def mark_failed(fd: int, rank: int) -> None:
    """Tells all ranks that wait for others that `rank` has failed; they raise PeerError within 100 ms."""
    if os.fstat(fd).st_size < mmap.PAGESIZE:
        return  # not sized yet, so no rank has joined
    with mmap.mmap(fd, mmap.PAGESIZE) as memory:
        memory[FAILED_AT : FAILED_AT + 4] = struct.pack("=I", rank + 1)
