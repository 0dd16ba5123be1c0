"""Zamba 2's layers (Glorioso et al. 2024): a few transformer blocks serve many layers, each of which adapts them by
low-rank matrices of its own. They read the hidden values beside the token's embedding, and add to a Mamba 2's input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.executor.models.arch import ArchSpec, Fused, LayerSpec
from headrace.executor.models.blocks import (
    Attend,
    Axis,
    Declared,
    Held,
    LayerHeld,
    LayerOps,
    Linear,
    Norm,
    Ops,
    Value,
    Weight,
    WithoutWeights,
    rounded_up,
)
from headrace.executor.models.blocks.beside import Beside
from headrace.executor.models.blocks.dense import Activation
from headrace.executor.models.blocks.parallel import AttentionAndState

AT = "shared_transformer"


@dataclass(frozen=True)
class Tied(Declared):
    """What a layer shares with an earlier one, under whose names the checkpoint has it. Layers of a rank that share it
    hold it once; adapters of each are its own."""

    eager_reader = program_reader = "headrace.executor.models.blocks.shared_transformer:read_tied"

    declared: Declared
    layer: str
    """The end of the prefix of this layer's names, `layers.7.`."""
    source: str
    """The same of the layer that has it."""

    def weights(self) -> Iterator[Weight]:
        return self.declared.weights() if self.layer == self.source else iter(())

    def source_of(self, prefix: str) -> str:
        """prefix: of this layer's names -> of those under which the checkpoint has what is shared"""
        return prefix.removesuffix(self.layer) + self.source


@dataclass(frozen=True)
class Sum(WithoutWeights, Declared):
    """compute(x, *parts): x's first columns plus the parts side by side, as a new value; without parts a copy of x."""

    eager_reader = "headrace.executor.models.eager_states:EagerSum"
    program_reader = "headrace.executor.cpu.recurrent:CpuSum.read"


@dataclass(frozen=True)
class Halves(WithoutWeights, Declared):
    """compute(both): activation(first half of the columns) * second half."""

    eager_reader = "headrace.executor.models.eager_states:EagerHalves.read"
    program_reader = "headrace.executor.cpu.recurrent:CpuHalves.read"

    activation: Activation


def read_tied(weights: Any, declared: Tied, prefix: str) -> Any:
    source, shared = declared.source_of(prefix), declared.declared
    if (source, shared) not in weights.tied:
        weights.tied[source, shared] = weights.read(shared, source)
    held = weights.tied[source, shared]
    if isinstance(shared, Linear) and source != prefix:
        return weights.with_own_deltas(held, shared, source, prefix)
    return held


@dataclass(frozen=True)
class SharedTransformer(AttentionAndState):
    """output = mamba(norm(hidden + back(ffn(norm(attention(norm(hidden | embedding)))))))"""

    cpu_alone = "a transformer that layers share"

    inner: int
    activation: Activation
    rank: int
    """Inner size of the adapters."""
    adapts_attention: bool
    adapter: int = 0
    """Index of this layer among those that have a transformer."""
    layer: int = 0
    source: int = 0
    """The first layer with the same transformer."""

    @staticmethod
    def fused(inner: int, count: int) -> tuple[Fused, ...]:
        """How checkpoints store the FFN's matrices and those of `count` adapters."""
        names = ("feed_forward.gate_up_proj", *(f"{_of_ffn(index)}.1" for index in range(count)))
        return tuple(
            Fused(f"{AT}.{name}", ((f"{AT}.{name}.gate", inner), (f"{AT}.{name}.up", inner))) for name in names
        )

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        hidden, both, inner = spec.hidden_size, 2 * spec.hidden_size, Axis(self.inner)
        heads, rank = self.attention, self.rank
        queries = Axis(heads.num_heads * heads.head_dim, unit=heads.head_dim, groups=heads.num_kv_heads)
        keys = Axis(heads.num_kv_heads * heads.head_dim, unit=heads.head_dim)
        rows = {"q": queries, "k": keys, "v": keys}

        def halves(name: str) -> tuple[tuple[str, Axis], ...]:
            return tuple((f"{AT}.{name}.{half}", inner) for half in ("gate", "up"))

        found: dict[str, Declared] = {
            "norm": Norm.of(spec, f"{AT}.input_layernorm", both),
            "qkv": Linear(tuple((f"{AT}.self_attn.{name}_proj", axis) for name, axis in rows.items()), both),
            "attended": Linear(((f"{AT}.self_attn.o_proj", hidden),), queries),
            "ffn_norm": Norm.of(spec, f"{AT}.pre_ff_layernorm", hidden),
            "up": Linear(halves("feed_forward.gate_up_proj"), hidden, heads.bias),
            "low_ffn": Linear(((f"{AT}.{_of_ffn(self.adapter)}.0", rank),), hidden),
            "adapt_ffn": Linear(halves(f"{_of_ffn(self.adapter)}.1"), rank),
            "down": Linear(((f"{AT}.feed_forward.down_proj", hidden),), inner, heads.bias),
        }
        if self.adapts_attention:
            for name, axis in rows.items():
                at = f"{AT}.self_attn.linear_{name}_adapter_list.{self.adapter}"
                found[f"low_{name}"] = Linear(((f"{at}.0", rank),), both)
                found[f"adapt_{name}"] = Linear(((f"{at}.1", axis),), rank)
        places = f"layers.{self.layer}.", f"layers.{self.source}."
        tied: dict[str, Declared] = {key: Tied(each, *places) for key, each in found.items()}
        tied["attend"] = Attend(
            heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.scale, heads.rope, whole=True
        )
        tied["sum"], tied["halves"] = Sum(), Halves(self.activation)
        tied["back"] = Linear((("linear", hidden),), hidden)
        tied["recurrent_norm"] = Norm.of(spec, "mamba_decoder.input_layernorm", hidden)
        return tied | {f"recurrent.{key}": each for key, each in self.recurrent.declare(spec).items()}

    def emit(self, ops: LayerOps, held: Held, x: Any) -> Sequence[Any]:
        """x [num_tokens, 2 * hidden]: hidden values, then the token's embedding."""
        add = held["sum"]
        normed = ops.norm(held["norm"], ops.compute(add, x))  # of a copy: a norm overwrites what it reads
        qkv = ops.linear(held["qkv"], normed)
        if self.adapts_attention:
            adapted = [ops.linear(held[f"adapt_{each}"], ops.linear(held[f"low_{each}"], normed)) for each in "qkv"]
            qkv = ops.compute(add, qkv, *adapted)
        attended = ops.total([ops.linear(held["attended"], ops.mix(held["attend"], qkv))])
        normed = ops.norm(held["ffn_norm"], attended)
        adapted_ffn = ops.linear(held["adapt_ffn"], ops.linear(held["low_ffn"], normed))
        both = ops.compute(add, ops.linear(held["up"], normed), adapted_ffn)
        computed = ops.total([ops.linear(held["down"], ops.compute(held["halves"], both))])
        added = ops.compute(add, x, ops.linear(held["back"], computed))
        recurrent = {key.removeprefix("recurrent."): each for key, each in held.items() if key.startswith("recurrent.")}
        return self.recurrent.emit(ops, recurrent, ops.norm(held["recurrent_norm"], added))

    def for_ranks(self, tp_size: int, inner_block: int) -> SharedTransformer:
        if tp_size == 1:
            return self
        return replace(
            self,
            attention=self.attention.for_ranks(tp_size, inner_block),
            recurrent=self.recurrent.for_ranks(tp_size, inner_block),
            inner=rounded_up(self.inner, tp_size * inner_block),
        )

    def values_per_token(self, tp_size: int) -> int:
        own = self.attention.values_per_token(tp_size) + self.recurrent.values_per_token(tp_size)
        return own + 3 * self.inner // tp_size

    def problem(self) -> str:
        for name in ("inner", "rank"):
            if getattr(self, name) < 1:
                return f"a shared transformer's {name} must be at least 1, got {getattr(self, name)}"
        return self.attention.problem() or self.recurrent.problem()

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        return self.attention.why_no_program(spec, tp_size) or self.recurrent.why_no_program(spec, tp_size)


@dataclass(frozen=True)
class BesideEmbedding(Beside):
    """Hidden values, and beside them the token's embedding. A layer without a norm reads both."""

    placement = "pre"

    hidden: int

    def width(self, num_layers: int) -> int:
        return 2 * self.hidden

    def declare_layer(self, spec: ArchSpec) -> Mapping[str, Declared]:
        return {}

    def first_beside(self, ops: Ops, held: Held, embedded: Value, inputs: Value | None) -> Value:
        return embedded

    def emit(self, layer: LayerSpec, held: LayerHeld, ops: LayerOps) -> None:
        read = ops.normed(held.norms["mixer"]) if "mixer" in held.norms else ops.wide()
        ops.add(layer.mixer.emit(ops, held.mixer, read))

    def values_per_token(self) -> int:
        return 8 * self.hidden


def _of_ffn(index: int) -> str:
    return f"feed_forward.gate_up_proj_adapter_list.{index}"
