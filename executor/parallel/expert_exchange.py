"""Tokens of several engine cores meet the experts that the cores divide among them (Lepikhin et al. 2020, without its
all-to-all: each core sees all tokens, which costs least where all memory is one)."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.executor.parallel.rank_place import Collectives, World, open_collectives


class ExpertExchange:
    """Of one rank: with the ranks of its number in the other cores. All call `gather` and `own_sum` in the same order,
    once for each layer's experts."""

    def __init__(self, link: Collectives, dp_rank: int, dp_size: int) -> None:
        self._link, self.dp_rank, self.dp_size = link, dp_rank, dp_size
        self.counts: tuple[int, ...] = ()
        """Tokens of each core in the step at hand."""

    @classmethod
    def open(cls, fd: int, world: World, rank: int, dp_rank: int, deadline_s: float) -> ExpertExchange:
        """Through the memory of all cores. rank: of the core's own ranks."""
        link = open_collectives(fd, world, rank * world.tp_size + dp_rank, deadline_s=deadline_s)
        return cls(link, dp_rank, world.tp_size)

    @property
    def is_idle(self) -> bool:
        """The step at hand is of other cores' tokens alone."""
        return not self.counts[self.dp_rank]

    def gather(self, x: Tensor) -> Tensor:
        """x [own tokens, columns] -> [all cores' tokens, columns], in order of rank"""
        most, columns = max(self.counts), x.shape[1]
        assert len(x) == self.counts[self.dp_rank], f"{len(x)} tokens, and {self.counts} were announced"
        padded = torch.nn.functional.pad(x, (0, 0, 0, most - len(x)))
        gathered = self._link.all_gather(padded).view(most, len(self.counts), columns)
        return torch.cat([gathered[:count, rank] for rank, count in enumerate(self.counts)])

    def own_sum(self, parts: Tensor) -> Tensor:
        """parts [all cores' tokens, columns], what this rank's experts make of them -> [own tokens, columns], what the
        group's do"""
        total = self._link.all_reduce(parts)
        first = sum(self.counts[: self.dp_rank])
        return total[first : first + self.counts[self.dp_rank]]

    def close(self) -> None:
        self._link.close()
