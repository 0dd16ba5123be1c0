"""Gemma 4's residual stream: token embeddings for each layer (per-layer inputs), a factor of each layer's result, and
experts beside a dense FFN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from headrace.executor.models.arch import ArchSpec, LayerSpec, LayerTable
from headrace.executor.models.blocks import (
    Declared,
    ExpertStack,
    Held,
    LayerHeld,
    LayerOps,
    Linear,
    Norm,
    Ops,
    Stream,
    Value,
    Vector,
)
from headrace.executor.models.blocks.dense import Activation, Dense
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.blocks.tensor_ops import added, beside, columns, copied


@dataclass(frozen=True)
class LayerInputs(Stream):
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
    activation: Activation

    @property
    def why_no_program(self) -> str:
        reason = super().why_no_program
        return reason if self.input_size else "the program multiplies no layer's result by a factor of its own."

    @property
    def table(self) -> LayerTable | None:
        if not self.input_size:
            return None
        width = self.num_layers * self.input_size
        return LayerTable("embed_tokens_per_layer", self.layer_vocab_size, width, self.input_size**0.5)

    def declare_beginning(self, spec: ArchSpec) -> Mapping[str, Declared]:
        return declared_inputs(spec, self.num_layers, self.input_size) if self.input_size else {}

    def declare_end(self, spec: ArchSpec) -> Mapping[str, Declared]:
        return {}

    def width(self, num_layers: int) -> int:
        return self.hidden + (self.num_layers - num_layers) * self.input_size

    def declare_layer(self, spec: ArchSpec) -> Mapping[str, Declared]:
        found: dict[str, Declared] = {"scale": Vector("layer_scalar", 1)}
        if self.input_size:
            found |= declared_input(spec, self.input_size, self.activation)
        return found

    def begin(self, ops: Ops, held: Held, embedded: Value, inputs: Value | None) -> Value:
        if inputs is None:
            return embedded
        return ops.call(beside, embedded, projected_inputs(ops, held, embedded, inputs, self.input_size))

    def end(self, ops: Ops, held: Held, x: Value) -> Value:
        return x

    def emit_layer(self, layer: LayerSpec, held: LayerHeld, ops: LayerOps, x: Value) -> Value:
        own, norms = held.stream, held.norms
        stream = ops.call(columns, x, 0, self.hidden)
        mixed = ops.total(layer.mixer.emit(ops, held.mixer, ops.norm(norms["mixer"], ops.call(copied, stream))))
        stream = ops.call(added, stream, ops.norm(norms["mixer_post"], mixed))
        normed = ops.norm(norms["ffn"], ops.call(copied, stream))
        if isinstance(layer.ffn, DenseBesideExperts):
            computed = layer.ffn.results(ops, held.ffn, normed, stream)
        else:
            computed = ops.total(layer.ffn.emit(ops, held.ffn, normed))
        stream = ops.call(added, stream, ops.norm(norms["ffn_post"], computed))
        if not self.input_size:
            return ops.call(_scaled, stream, own["scale"])
        given = ops.call(columns, x, self.hidden, self.hidden + self.input_size)
        gated = ops.call(_product, ops.linear(own["gate"], stream), given)
        of_input = ops.norm(own["input_norm"], ops.linear(own["input"], gated))
        result = ops.call(_scaled, ops.call(added, stream, of_input), own["scale"])
        return ops.call(beside, result, ops.call(columns, x, self.hidden + self.input_size, None))

    def values_per_token(self) -> int:
        """The stream before and after a layer with its per-layer inputs, and the rows that its norms copy."""
        return 6 * self.hidden + 4 * self.num_layers * self.input_size

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
        found["experts"] = replace(stack, scales=Vector("router.per_expert_scale", self.num_experts))
        found["router_norm"] = replace(Norm.of(spec, "router.norm", spec.hidden_size), affine=False)
        found["router_scale"] = Vector("router.scale", spec.hidden_size)
        for key, name in (("norm", "pre_feedforward_layernorm_2"), ("post_norm", "post_feedforward_layernorm_2")):
            found[key] = Norm.of(spec, name, spec.hidden_size)
        found["dense_post_norm"] = Norm.of(spec, "post_feedforward_layernorm_1", spec.hidden_size)
        return found | {f"dense_{key}": each for key, each in self.dense.declare(spec).items()}

    def emit(self, ops: Ops, held: Held, x: Any) -> Sequence[Any]:
        return [self.results(ops, held, x, x)]

    def results(self, ops: Ops, held: Held, normed: Any, stream: Any) -> Any:
        """normed: the stream after the norm of the dense FFN -> the sum over the ranks, [num_tokens, hidden]"""
        plain = {key: held[f"dense_{key}"] for key in ("up", "down")}
        dense = ops.norm(held["dense_post_norm"], ops.total(self.dense.emit(ops, plain, normed)))
        scored = ops.norm(held["router_norm"], ops.call(copied, stream))
        scored = ops.call(_scaled, scored, held["router_scale"] * stream.shape[-1] ** -0.5)
        read = ops.norm(held["norm"], ops.call(copied, stream))
        logits = ops.linear(held["router"], scored)
        routed = ops.total([ops.experts(held["experts"], read, logits, self.routing)])
        return ops.call(added, dense, ops.norm(held["post_norm"], routed))

    def for_ranks(self, tp_size: int, inner_block: int) -> Self:
        return replace(super().for_ranks(tp_size, inner_block), dense=self.dense.for_ranks(tp_size, inner_block))

    def values_per_token(self, tp_size: int) -> int:
        return super().values_per_token(tp_size) + self.dense.values_per_token(tp_size)

    def problem(self) -> str:
        return super().problem() or self.dense.problem()

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        return "the program has no experts beside a dense FFN."


def declared_inputs(spec: ArchSpec, num_layers: int, input_size: int) -> dict[str, Declared]:
    """What `projected_inputs` reads."""
    return {
        "inputs": Linear((("per_layer_model_projection", num_layers * input_size),), spec.hidden_size),
        "inputs_norm": Norm.of(spec, "per_layer_projection_norm", input_size),
    }


def projected_inputs(ops: Ops, held: Held, embedded: Value, inputs: Value, input_size: int) -> Value:
    """All layers' inputs, [num_tokens, num_layers * input_size]: each token's own, `inputs`, and a projection of its
    embedding, normed by layer."""
    projected = ops.linear(held["inputs"], embedded)
    projected = ops.call(lambda x: (x * embedded.shape[-1] ** -0.5).reshape(-1, input_size), projected)
    normed = ops.norm(held["inputs_norm"], projected)
    return ops.call(lambda x: (x.view(inputs.shape) + inputs) * 2**-0.5, normed)


def declared_input(spec: ArchSpec, input_size: int, activation: Activation) -> dict[str, Declared]:
    """What a layer reads to add its input to the stream."""
    return {
        "gate": Linear((("per_layer_input_gate", input_size),), spec.hidden_size, activation=activation),
        "input": Linear((("per_layer_projection", spec.hidden_size),), input_size),
        "input_norm": Norm.of(spec, "post_per_layer_input_norm", spec.hidden_size),
    }


def _product(x: Value, y: Value) -> Value:
    return x * y


def _scaled(x: Value, scale: Value) -> Value:
    return (x * scale).to(x.dtype)
