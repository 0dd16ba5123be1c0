"""Expert parallelism: maps the experts that a router chooses to one rank's own experts, replicas included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ID_FACTOR, _POSITION_FACTOR, _WORD = 2654435761, 2246822519, (1 << 32) - 1


@dataclass(frozen=True, eq=False)
class ExpertPlaces:
    """One layer's map from experts to this rank's. Every step reads it; `write` changes it in place between steps."""

    rank: int
    numbers: Tensor
    """[num_experts, num_ranks] int32, or [num_experts, 1] where no expert is replicated: for each replica of an expert,
    its local index on this rank, or -1 where another rank holds that replica. Only the first `replicas` of an expert's
    entries are meaningful."""
    replicas: Tensor
    """[num_experts] int32: replicas of each expert over all ranks, at least 1."""

    @classmethod
    def of(cls, placement: Sequence[Sequence[int]], num_experts: int, rank: int) -> ExpertPlaces:
        """placement: for each rank, its experts in the order of their local indices; every expert is on some rank."""
        copies = sum(map(len, placement)) > num_experts
        places = cls(
            rank,
            torch.empty(num_experts, len(placement) if copies else 1, dtype=torch.int32),
            torch.empty(num_experts, dtype=torch.int32),
        )
        places.write(placement)
        return places

    def to(self, device: torch.device) -> ExpertPlaces:
        return ExpertPlaces(self.rank, self.numbers.to(device), self.replicas.to(device))

    def write(self, placement: Sequence[Sequence[int]]) -> None:
        """Replaces the map by that of another placement with as many experts and slots."""
        self.numbers.fill_(-1)
        self.replicas.zero_()
        for rank, experts in enumerate(placement):
            for number, expert in enumerate(experts):
                if rank == self.rank:
                    self.numbers[expert, self.replicas[expert]] = number
                self.replicas[expert] += 1

    def own(self, expert_ids: Tensor, keys: Tensor | None) -> Tensor:
        """The local indices of chosen experts, -1 for those that other ranks compute: [num_tokens, top_k].

        expert_ids [num_tokens, top_k]; keys [num_tokens] int64 of `replica_keys`, required where there are replicas."""
        ids = expert_ids.long()
        if self.numbers.shape[1] == 1:
            return self.numbers[:, 0][ids]
        assert keys is not None, "copies are chosen by the keys of tokens"
        return self.numbers[ids, (keys[:, None] + ids) % self.replicas[ids]]


def replica_keys(token_ids: Tensor, positions: Tensor) -> Tensor:
    """Each token's key for choosing replicas: of expert e, a token uses replica (key + e) % replicas. All three are
    [num_tokens] int64.

    Every rank computes the same key, and a token's key does not depend on its batch. Neighbouring tokens, and tokens of
    several sequences at one position, get different keys (multiplicative hashing: Knuth, volume 3, section 6.4). Adding
    e spreads one token's experts over the ranks.
    """
    return ((token_ids * _ID_FACTOR + positions * _POSITION_FACTOR) & _WORD) >> 16
