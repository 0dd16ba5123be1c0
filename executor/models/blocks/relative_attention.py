"""Attention with biases that each token computes for the distances of keys, whose keys and values are convolved before
they are cached; and a residual stream to which the results of both blocks are added after a convolution (Inkling:
Thinking Machines 2026).

A layer has three convolutions, whose last inputs the mixer keeps for the sequence:

    draft element   0 .. hidden      .. 2 * hidden   ..
    input of        the attention's  the FFN's       keys and values
                    result           result          of this rank
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from headrace.executor.models.arch import ArchSpec, Kept, LayerSpec
from headrace.executor.models.blocks import (
    Attend,
    Axis,
    Declared,
    Held,
    LayerHeld,
    LayerOps,
    Linear,
    Ops,
    Stream,
    Value,
    Weight,
)
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.blocks.gated_norm import JoinedColumns
from headrace.executor.models.blocks.short_convolution import Convolve
from headrace.executor.models.blocks.tensor_ops import added, copied

OF_BLOCK: Mapping[str, str] = {"mixer": "history_mixer", "ffn": "history_ffn"}
"""Names of the kept inputs of the convolutions behind a layer's blocks, in the order of draft elements."""


@dataclass(frozen=True, kw_only=True)
class AttendRelative(Attend):
    """mix(qkv, mixes): `Attend` whose scores have the bias of `kernels.reference.relative`. mixes [num_tokens,
    num_heads * num_profiles]."""

    eager_reader = "headrace.executor.models.eager_relative:EagerRelative"
    program_reader = ""

    profiles: str
    """A complete name, [num_profiles, reach]."""
    num_profiles: int
    reach: int
    growth: tuple[int, float] | None
    """floor and share of `executor.models.chunks.log_growth`, by which whole scores grow; None: they do not."""

    def weights(self) -> Iterator[Weight]:
        yield from super().weights()
        yield Weight(self.profiles, (self.num_profiles, self.reach), "bias")


@dataclass(frozen=True, kw_only=True)
class RelativeAttention(Attention):
    cpu_alone = "biases that each token computes for distances"

    num_profiles: int
    """Profiles over distances, which a token mixes for each head."""
    reach: int
    """Keys at least so far away have no bias."""
    growth: tuple[int, float] | None = None
    """As of `AttendRelative`."""
    width: int
    """A token's convolutions read its own input and the width - 1 inputs before it."""
    hidden: int
    """Columns that the convolutions behind both blocks have."""

    def state(self, tp_size: int) -> tuple[Kept, ...]:
        past = self.width - 1
        behind = (Kept(name, (past, self.hidden)) for name in OF_BLOCK.values())
        return (Kept("history", (past, self._own_columns(tp_size))), *behind)

    def draft_elements(self, tp_size: int) -> int:
        return len(OF_BLOCK) * self.hidden + self._own_columns(tp_size)

    def _own_columns(self, tp_size: int) -> int:
        """Of keys and values on one rank."""
        return 2 * max(1, self.num_kv_heads // tp_size) * self.head_dim

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        found, hidden = dict(super().declare(spec)), spec.hidden_size
        qkv, plain = found.pop("qkv"), found["attend"]
        assert isinstance(qkv, Linear), "as attention declares it"
        assert isinstance(plain, Attend), "as attention declares it"
        keys = Axis(self.num_kv_heads * self.head_dim, unit=self.head_dim)
        mixes = Axis(self.num_heads * self.num_profiles, unit=self.num_profiles, groups=self.num_kv_heads)
        return found | {
            "query": replace(qkv, matrices=qkv.matrices[:1]),
            "keys_and_values": replace(qkv, matrices=qkv.matrices[1:]),
            "convolve": Convolve(
                (("self_attn.k_sconv", keys), ("self_attn.v_sconv", keys)),
                self.width,
                residual=True,
                first_draft_element=len(OF_BLOCK) * self.hidden,
            ),
            "joined": JoinedColumns(),
            "mixes": Linear((("self_attn.r_proj", mixes),), hidden),
            "attend": AttendRelative(
                **vars(plain),
                profiles="self_attn.rel_logits_proj.proj",
                num_profiles=self.num_profiles,
                reach=self.reach,
                growth=self.growth,
            ),
        }

    def emit(self, ops: LayerOps, held: Held, x: Any) -> Sequence[Any]:
        convolved = ops.mix(held["convolve"], ops.linear(held["keys_and_values"], x))
        qkv = ops.compute(held["joined"], ops.linear(held["query"], x), convolved)
        return [ops.product(held["output"], ops.mix(held["attend"], qkv, ops.linear(held["mixes"], x)))]

    def for_context(self, longest: int) -> Self:
        found = super().for_context(longest)
        return replace(found, growth=None) if self.growth is not None and longest <= self.growth[0] else found

    def values_per_token(self, tp_size: int) -> int:
        """Convolved keys and values, and mixes before and after they grow. Biases are of few tokens at once."""
        mixes = 2 * self.num_heads // tp_size * self.num_profiles
        return super().values_per_token(tp_size) + self._own_columns(tp_size) + mixes

    def problem(self) -> str:
        for name in ("num_profiles", "reach"):
            if getattr(self, name) < 1:
                return f"relative attention's {name} must be at least 1, got {getattr(self, name)}"
        if self.growth is not None and self.growth[0] < 1:
            return f"scores that grow beyond {self.growth[0]} tokens; it must be at least 1"
        if self.width < 2:
            return f"a convolution's width must be at least 2, got {self.width}"
        return super().problem()

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        return "the program has no biases that each token computes for distances."


@dataclass(frozen=True)
class ConvolvedResults(Stream):
    """The results of both blocks are convolved, each rank's whole ones, before they are added to the stream. The
    layers' mixers keep the inputs."""

    placement = "pre"

    hidden: int
    taps: int
    """`RelativeAttention.width`."""

    @property
    def why_no_program(self) -> str:
        return "the program convolves no results of whole blocks."

    def declare_layer(self, spec: ArchSpec) -> Mapping[str, Declared]:
        names = ("attn_sconv", "mlp_sconv")
        return {
            block: Convolve(
                ((name, self.hidden),),
                self.taps,
                residual=True,
                history=history,
                first_draft_element=index * self.hidden,
            )
            for index, ((block, history), name) in enumerate(zip(OF_BLOCK.items(), names, strict=True))
        }

    def width(self, num_layers: int) -> int:
        return self.hidden

    def begin(self, ops: Ops, held: Held, embedded: Value, inputs: Value | None) -> Value:
        return embedded

    def end(self, ops: Ops, held: Held, x: Value) -> Value:
        return x

    def emit_layer(self, layer: LayerSpec, held: LayerHeld, ops: LayerOps, x: Value) -> Value:
        for key, block, held_block in (("mixer", layer.mixer, held.mixer), ("ffn", layer.ffn, held.ffn)):
            read = ops.norm(held.norms[key], ops.call(copied, x))
            result = ops.total(block.emit(ops, held_block, read))
            x = ops.call(added, x, ops.mix(held.stream[key], result))
        return x

    def values_per_token(self) -> int:
        """The stream before and after a block, what the block reads, and its result before and after the
        convolution."""
        return 5 * self.hidden
