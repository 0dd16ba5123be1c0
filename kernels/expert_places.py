"""Where the experts that a router chooses are among those of one rank, of which some ranks may have copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ID_FACTOR, _POSITION_FACTOR, _WORD = 2654435761, 2246822519, (1 << 32) - 1


@dataclass(frozen=True, eq=False)
class ExpertPlaces:
    """Read in every step; `write` changes them between two."""

    rank: int
    numbers: Tensor
    """[num_experts, most_replicas] int32: of each copy of an expert its number among the rank's own, -1 where another
    rank has it. Of each expert the first `replicas` count."""
    replicas: Tensor
    """[num_experts] int32: how many copies there are on all ranks, at least 1."""

    @classmethod
    def of(cls, placement: Sequence[Sequence[int]], num_experts: int, rank: int) -> ExpertPlaces:
        """placement: of each rank the experts that it has, by their numbers there; each at least once on some rank."""
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
        """The same for another placement of as many experts."""
        self.numbers.fill_(-1)
        self.replicas.zero_()
        for rank, experts in enumerate(placement):
            for number, expert in enumerate(experts):
                if rank == self.rank:
                    self.numbers[expert, self.replicas[expert]] = number
                self.replicas[expert] += 1

    def own(self, expert_ids: Tensor, keys: Tensor | None) -> Tensor:
        """The numbers of experts that were chosen, [num_tokens, top_k]. keys: as `replica_keys` gives them; needed
        where there are copies."""
        ids = expert_ids.long()
        if self.numbers.shape[1] == 1:
            return self.numbers[:, 0][ids]
        assert keys is not None, "copies are chosen by the keys of tokens"
        return self.numbers[ids, (keys[:, None] + ids) % self.replicas[ids]]


def replica_keys(token_ids: Tensor, positions: Tensor) -> Tensor:
    """By what tokens choose among the copies of their experts: of expert e, copy (key + e) % copies. All three are
    [num_tokens] int64.

    Every rank finds the same, and a token finds the same whatever is computed beside it. Neighbours, and the tokens
    that several sequences have at one position, choose differently (multiplicative hashing: Knuth, volume 3, section
    6.4); and a token does not go to the same rank with all of its experts.
    """
    return ((token_ids * _ID_FACTOR + positions * _POSITION_FACTOR) & _WORD) >> 16
