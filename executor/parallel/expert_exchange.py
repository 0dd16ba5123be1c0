"""Exchanges tokens between engine cores that divide a model's experts among them (expert parallelism, Lepikhin et al.
2020, but without all-to-all: each core receives all tokens, which is cheapest in shared memory)."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.executor.parallel.rank_place import Collectives, World, open_collectives
from headrace.ipc.failure import InconsistentError


class ExpertExchange:
    """One rank's exchange with the ranks of the same number in the other cores. All of them call `gather` and `own_sum`
    in the same order, once per layer with experts."""

    def __init__(self, link: Collectives, dp_rank: int, dp_size: int) -> None:
        self._link, self.dp_rank, self.dp_size = link, dp_rank, dp_size
        self.counts: tuple[int, ...] = ()
        """The number of each core's tokens in the current step."""

    @classmethod
    def open(cls, fd: int, world: World, rank: int, dp_rank: int, deadline_s: float) -> ExpertExchange:
        """Opens the exchange in the memory that all cores share. rank: this rank's number within its core."""
        link = open_collectives(fd, world, rank * world.tp_size + dp_rank, deadline_s=deadline_s)
        return cls(link, dp_rank, world.tp_size)

    @property
    def is_idle(self) -> bool:
        """Whether the current step has only other cores' tokens."""
        return not self.counts[self.dp_rank]

    def gather(self, x: Tensor) -> Tensor:
        """x [own tokens, columns] -> [all cores' tokens, columns], in order of rank"""
        most, columns = max(self.counts), x.shape[1]
        if len(x) != self.counts[self.dp_rank]:
            raise InconsistentError(f"{len(x)} tokens, and {self.counts} were announced")
        padded = torch.nn.functional.pad(x, (0, 0, 0, most - len(x)))
        gathered = self._link.all_gather(padded).view(most, len(self.counts), columns)
        return torch.cat([gathered[:count, rank] for rank, count in enumerate(self.counts)])

    def own_sum(self, parts: Tensor) -> Tensor:
        """parts [all cores' tokens, columns], outputs of this rank's experts -> [own tokens, columns], the group's
        sum"""
        total = self._link.all_reduce(parts)
        first = sum(self.counts[: self.dp_rank])
        return total[first : first + self.counts[self.dp_rank]]

    def close(self) -> None:
        self._link.close()
