"""Experts that the token's id chooses (hash layers: Roller et al. 2021), as in DeepSeek V4's first layers: a router's
scores are the weights of their results alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.blocks import Declared, ExpertStack, Held, Routing, Weight
from headrace.executor.models.blocks.experts import Experts


@dataclass(frozen=True)
class HashTable(Declared):
    """mix(): the experts of each token of the step, [num_tokens, num_chosen] int32."""

    eager_reader = "headrace.executor.models.eager_compressed:EagerHashTable"

    name: str
    vocab_size: int
    num_chosen: int
    num_experts: int

    def weights(self) -> Iterator[Weight]:
        yield Weight(self.name, (self.vocab_size, self.num_chosen), "table")


@dataclass(frozen=True, kw_only=True)
class HashedExperts(ExpertStack):
    """mix(x, logits, expert_ids): as `Ops.experts`, of these experts."""

    eager_reader = "headrace.executor.models.eager_compressed:EagerHashedExperts"
    program_reader = ""

    routing: Routing


@dataclass(frozen=True)
class ExpertsByToken(Experts):
    reads_token_ids = True

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        found = dict(super().declare(spec))
        stack = found["experts"]
        assert isinstance(stack, ExpertStack)
        found["experts"] = HashedExperts(**vars(stack), routing=self.routing)
        found["table"] = HashTable(
            f"{spec.names.router}.tid2eid", spec.vocab_size, self.routing.num_chosen, self.num_experts
        )
        return found

    def routed(self, ops: Any, held: Held, x: Any, logits: Any) -> Any:
        return ops.mix(held["experts"], x, logits, ops.mix(held["table"]))

    def problem(self) -> str:
        if self.shared_gate or not self.routing.renormalise:
            return "experts that token ids choose have weights that add up to one, and no gate of a shared expert"
        return super().problem()

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        return "the program chooses no experts by token ids."
