"""Gemma 4's residual stream: token embeddings for each layer (per-layer inputs), a factor of each layer's result, and
experts beside a dense FFN."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from headrace.executor.models.arch import ArchSpec, LayerSpec, LayerTable
from headrace.executor.models.blocks import (
    Axis,
    Declared,
    ExpertStack,
    Held,
    LayerHeld,
    LayerOps,
    Linear,
    Norm,
    Ops,
    Value,
    Vector,
)
from headrace.executor.models.blocks.beside import Beside
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.blocks.gated_norm import Added, GateActivation, GatedNorm, OutputGate


@dataclass(frozen=True)
class LayerInputs(Beside):
    """The stream between layers, per token:

        hidden values | the next layer's input | the input of the layer after it | ...

    Each layer removes its input. Without inputs there are hidden values alone.
    """

    hidden: int
    num_layers: int
    input_size: int
    """Size of each layer's input; 0: there are none."""
    layer_vocab_size: int
    """Number of token ids with per-layer embeddings; larger ids use those of token 0."""
    activation: GateActivation

    @property
    def table(self) -> LayerTable | None:
        if not self.input_size:
            return None
        return inputs_table(self.layer_vocab_size, self.num_layers, self.input_size)

    def declare_beginning(self, spec: ArchSpec) -> Mapping[str, Declared]:
        return declared_inputs(spec, self.num_layers, self.input_size) if self.input_size else {}

    def width(self, num_layers: int) -> int:
        return self.hidden + (self.num_layers - num_layers) * self.input_size

    def declare_layer(self, spec: ArchSpec) -> Mapping[str, Declared]:
        found: dict[str, Declared] = {"factor": Vector("layer_scalar", 1)}
        if self.input_size:
            found |= declared_input(spec, self.input_size, self.activation)
        return found

    def first_beside(self, ops: Ops, held: Held, embedded: Value, inputs: Value | None) -> Value | None:
        return None if inputs is None else projected_inputs(ops, held, embedded, inputs)

    def emit(self, layer: LayerSpec, held: LayerHeld, ops: LayerOps) -> None:
        own, norms = held.stream, held.norms
        ops.add(layer.mixer.emit(ops, held.mixer, ops.normed(norms["mixer"])), norms["mixer_post"])
        normed, factor = ops.normed(norms["ffn"]), None if self.input_size else own["factor"]
        if isinstance(layer.ffn, DenseBesideExperts):
            ops.add_whole(layer.ffn.results(ops, held.ffn, normed), norms["ffn_post"], factor)
        else:
            ops.add(layer.ffn.emit(ops, held.ffn, normed), norms["ffn_post"], factor)
        if self.input_size:
            gated = ops.compute(own["gating"], ops.beside(), ops.linear(own["gate"], ops.stream()))
            ops.add_whole(ops.linear(own["input"], gated), own["input_norm"], own["factor"])

    def values_per_token(self) -> int:
        """The stream before and after a layer, the rows that its norms copy, and what the inputs are computed from."""
        return 6 * self.hidden + 6 * self.num_layers * self.input_size

    def problem(self) -> str:
        if self.input_size < 0 or (self.input_size and self.layer_vocab_size < 1):
            return f"per-layer inputs of size {self.input_size} for {self.layer_vocab_size} token ids"
        return ""


@dataclass(frozen=True, kw_only=True)
class DenseBesideExperts(Experts):
    """A dense FFN and experts with norms of their own, whose results are added. The router reads the stream."""

    dense: Dense

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        found = dict(super().declare(spec))
        stack = found["experts"]
        assert isinstance(stack, ExpertStack)
        found["experts"] = replace(stack, factors=Vector("router.per_expert_scale", self.num_experts))
        router_norm = Norm.of(spec, "router", spec.hidden_size)
        found["router_norm"] = replace(router_norm, weight_name="scale", scale=spec.hidden_size**-0.5)
        for key, name in (("norm", "pre_feedforward_layernorm_2"), ("post_norm", "post_feedforward_layernorm_2")):
            found[key] = Norm.of(spec, name, spec.hidden_size)
        found["dense_post_norm"] = Norm.of(spec, "post_feedforward_layernorm_1", spec.hidden_size)
        found["sum"] = Added()
        return found | {f"dense_{key}": each for key, each in self.dense.declare(spec).items()}

    def results(self, ops: LayerOps, held: Held, normed: Value) -> Value:
        """normed: the stream after the norm of the dense FFN -> the sum over the ranks, [num_tokens, hidden]"""
        plain = {key: held[f"dense_{key}"] for key in ("up", "down")}
        dense = ops.norm(held["dense_post_norm"], ops.total(self.dense.emit(ops, plain, normed)))
        logits = ops.linear(held["router"], ops.normed(held["router_norm"]))
        routed = ops.total([self.routed(ops, held, ops.normed(held["norm"]), logits)])
        return ops.compute(held["sum"], dense, ops.norm(held["post_norm"], routed))

    def for_ranks(self, tp_size: int, inner_block: int) -> Self:
        return replace(super().for_ranks(tp_size, inner_block), dense=self.dense.for_ranks(tp_size, inner_block))

    def values_per_token(self, tp_size: int) -> int:
        return super().values_per_token(tp_size) + self.dense.values_per_token(tp_size)

    def problem(self) -> str:
        return super().problem() or self.dense.problem()


def inputs_table(vocab_size: int, num_layers: int, input_size: int) -> LayerTable:
    """Of each token's own inputs of all layers."""
    return LayerTable("embed_tokens_per_layer", vocab_size, num_layers * input_size, input_size**0.5, 2**-0.5)


def declared_inputs(spec: ArchSpec, num_layers: int, input_size: int) -> dict[str, Declared]:
    """What `projected_inputs` reads."""
    width, eps = num_layers * input_size, Norm.of(spec, "per_layer_projection_norm", input_size).eps
    return {
        "inputs": Linear((("per_layer_model_projection", width),), spec.hidden_size),
        # Of a projection that is divided by the root of its columns first.
        "inputs_norm": GatedNorm(
            "per_layer_projection_norm",
            Axis(width),
            input_size,
            eps * spec.hidden_size,
            shared=True,
            scale=2**-0.5,
        ),
        "inputs_sum": Added(),
    }


def projected_inputs(ops: Ops, held: Held, embedded: Value, inputs: Value) -> Value:
    """All layers' inputs, [num_tokens, num_layers * input_size]: each token's own, `inputs`, plus a projection of its
    embedding, normed by layer. Each is multiplied by 1/sqrt(2), to keep the sum's magnitude."""
    return ops.compute(
        held["inputs_sum"], inputs, ops.compute(held["inputs_norm"], ops.linear(held["inputs"], embedded))
    )


def declared_input(spec: ArchSpec, input_size: int, activation: GateActivation) -> dict[str, Declared]:
    """What a layer reads to add its input to the stream."""
    return {
        "gate": Linear((("per_layer_input_gate", input_size),), spec.hidden_size),
        "gating": OutputGate(activation),
        "input": Linear((("per_layer_projection", spec.hidden_size),), input_size),
        "input_norm": Norm.of(spec, "post_per_layer_input_norm", spec.hidden_size),
    }
