"""Group-limited routing: the groups of experts that a token's experts may come from. Imports no torch."""

from __future__ import annotations

from typing import NamedTuple


class ExpertGroups(NamedTuple):
    """A token's experts come from the best `chosen` of `number` groups of consecutive experts (DeepSeek-V2, section
    2.2.2)."""

    number: int = 1
    chosen: int = 1
    best: int = 1
    """A group's score is the sum of the highest `best` scores of its experts."""

    def why_not(self, num_experts: int, top_k: int) -> str:
        """Why these groups do not fit a mixture, to end a sentence with; "" if they do."""
        if self.number < 1 or num_experts % self.number:
            return f"{num_experts} experts cannot stand in {self.number} groups"
        size = num_experts // self.number
        if not 1 <= self.chosen <= self.number or not 1 <= self.best <= size:
            return f"{self.chosen} of {self.number} groups cannot be chosen by the {self.best} best of {size} experts"
        if self.chosen * size < top_k:
            return f"{self.chosen} groups of {size} experts have no {top_k} to choose"
        return ""


ALL_EXPERTS = ExpertGroups()
