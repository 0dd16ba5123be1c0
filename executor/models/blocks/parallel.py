"""Attention and a recurrent mixer side by side: both read the layer's input, and the sum of their results is added to
the stream (Falcon-H1: Zuo et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.executor.models.arch import ArchSpec, Kept, RopeSpec, TokenCache
from headrace.executor.models.blocks import Declared, Held, LayerOps, Mixer
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.blocks.recurrent import Ssd


@dataclass(frozen=True)
class AttentionAndState(Mixer):
    """A mixer of both: it caches tokens for its attention, and keeps a state per sequence for the recurrent mixer."""

    attention: Attention
    recurrent: Ssd

    @property
    def num_heads(self) -> int:  # type: ignore[override]
        return self.attention.num_heads

    @property
    def rope(self) -> RopeSpec | None:  # type: ignore[override]
        return self.attention.rope

    @property
    def sliding_window(self) -> int | None:  # type: ignore[override]
        return self.attention.sliding_window

    @property
    def cpu_alone(self) -> str:  # type: ignore[override]
        return self.attention.cpu_alone or self.recurrent.cpu_alone

    @property
    def cache(self) -> TokenCache:
        return self.attention.cache

    def state(self, tp_size: int) -> tuple[Kept, ...]:
        return self.recurrent.state(tp_size)

    def draft_elements(self, tp_size: int) -> int:
        return self.recurrent.draft_elements(tp_size)


@dataclass(frozen=True)
class Parallel(AttentionAndState):
    """Both read the layer's input, and their results are added."""

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        parts = {"attention": self.attention, "recurrent": self.recurrent}
        return {f"{name}.{key}": each for name, part in parts.items() for key, each in part.declare(spec).items()}

    def emit(self, ops: LayerOps, held: Held, x: Any) -> Sequence[Any]:
        """The recurrence first, for all tokens: what follows attention may be needed for few."""
        recurrent, attention = _of_part(held, "recurrent"), _of_part(held, "attention")
        results = self.recurrent.results(ops, recurrent, x)
        attended = self.attention.emit(ops, attention, x)
        return [*attended, ops.product(recurrent["output"], results)]

    def for_ranks(self, tp_size: int, inner_block: int) -> Parallel:
        attention = self.attention.for_ranks(tp_size, inner_block)
        return replace(self, attention=attention, recurrent=self.recurrent.for_ranks(tp_size, inner_block))

    def values_per_token(self, tp_size: int) -> int:
        return self.attention.values_per_token(tp_size) + self.recurrent.values_per_token(tp_size)

    def problem(self) -> str:
        return self.attention.problem() or self.recurrent.problem()

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        return self.attention.why_no_program(spec, tp_size) or self.recurrent.why_no_program(spec, tp_size)


def _of_part(held: Held, name: str) -> Held:
    start = f"{name}."
    return {key.removeprefix(start): each for key, each in held.items() if key.startswith(start)}
