"""Tokens of several engine cores meet the experts that the cores divide among them (Lepikhin et al. 2020, without its
all-to-all: each core sees all tokens, which costs least where all memory is one)."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.core.options.plan import Plan
from headrace.executor.parallel.rank_place import Collectives, World


def exchange_world(plan: Plan, size: int) -> World:
    """How much the ranks say to each other: every rank's tokens, at once."""
    return World(
        tp_size=size,
        pp_size=1,
        max_tokens=size * (plan.max_num_batched_tokens + plan.max_logits),
        max_seqs=1,
        hidden_size=plan.model.hidden_size,
        vocab_size=1,
    )


class ExpertExchange:
    """Of one rank. All ranks call `gather` and `own_sum` in the same order, once for each layer's experts."""

    def __init__(self, link: Collectives, rank: int) -> None:
        self._link, self._rank = link, rank
        self.counts: tuple[int, ...] = ()
        """Tokens of each rank in the step at hand."""

    def gather(self, x: Tensor) -> Tensor:
        """x [own tokens, columns] -> [all ranks' tokens, columns], in order of rank"""
        most, columns = max(self.counts), x.shape[1]
        assert len(x) == self.counts[self._rank], f"{len(x)} tokens, and {self.counts} were announced"
        padded = torch.nn.functional.pad(x, (0, 0, 0, most - len(x)))
        gathered = self._link.all_gather(padded).view(most, len(self.counts), columns)
        return torch.cat([gathered[:count, rank] for rank, count in enumerate(self.counts)])

    def own_sum(self, parts: Tensor) -> Tensor:
        """parts [all ranks' tokens, columns], what this rank's experts make of them -> [own tokens, columns], what all
        ranks' do"""
        total = self._link.all_reduce(parts)
        first = sum(self.counts[: self._rank])
        return total[first : first + self.counts[self._rank]]

    def close(self) -> None:
        self._link.close()
