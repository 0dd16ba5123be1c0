"""Gemma 3n: a residual stream of several rows (`blocks.altup`), normed values, last layers that read the cache of
earlier ones, and first layers with sparse FFN activations. Text only.

Of a multimodal checkpoint only the language model is read, not the vision and audio towers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

from headrace.executor.models.arch import ArchSpec, LayerSpec, WeightNames
from headrace.executor.models.blocks import Attend, Axis, Declared, Ffn, Held, Linear, Norm, Ops, rounded_up
from headrace.executor.models.blocks.altup import AltUp
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.blocks.gated_norm import SparseGate
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import (
    Positions,
    activation,
    flag,
    integer,
    layer_types,
    llama_like,
    number,
    optional_number,
    rope,
    rope_section,
    text_part,
)
from headrace.ipc.failure import ModelError

LOCAL_THETA, GLOBAL_THETA = 10_000.0, 1_000_000.0
SPARSE_LAYERS, SPARSITY = 10, 0.95
"""Default of activation_sparsity_pattern: the first SPARSE_LAYERS layers of a model with more layers have SPARSITY."""
# Multimodal configs leave out fields with these values.
DEFAULTS = {
    "vocab_size": 262_400,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size": 2048,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 15,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "sliding_window": 512,
    "altup_num_inputs": 4,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "laurel_rank": 64,
    "final_logit_softcapping": 30.0,
}
NAMES = WeightNames(
    prefixes=("model.", "model.language_model.", "language_model.model."),
    lm_heads=("lm_head", "language_model.lm_head"),
    mlp_norm="pre_feedforward_layernorm",
    ignorable=(*WeightNames.ignorable, r"(^|\.)(vision|audio)_tower\.", r"(^|\.)embed_(vision|audio)\."),
)


@dataclass(frozen=True)
class ValueNormAttention(Attention):
    """Attention that norms each head's values, without weights. With reads_only it has queries only, and attends to
    another layer's cache."""

    reads_only: bool = False
    keys_are_values: bool = False
    """Whether the values are the keys, before their norm and rotation."""
    eps: float = 1e-6

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        names, attend = spec.names, (found := dict(super().declare(spec)))["attend"]
        assert isinstance(attend, Attend)
        queries = Axis(self.num_heads * self.head_dim, unit=self.head_dim, groups=self.num_kv_heads)
        keys = Axis(self.num_kv_heads * self.head_dim, unit=self.head_dim)
        if self.reads_only:
            found["attend"] = replace(attend, key_norm=None, reads_only=True)
            return found | {"qkv": Linear(((names.query, queries),), spec.hidden_size, self.bias)}
        norm = Norm("self_attn.v_norm", self.head_dim, "rms", self.eps, 0.0, affine=False)
        found["attend"] = replace(attend, value_norm=norm, keys_are_values=self.keys_are_values)
        if not self.keys_are_values:
            return found
        return found | {"qkv": Linear(((names.query, queries), (names.key, keys)), spec.hidden_size, self.bias)}


@dataclass(frozen=True)
class OutstandingDense(Dense):
    """A gated FFN with sparse activations: the gate becomes relu(gate - (mean + cutoff * standard deviation)), of each
    row over all ranks."""

    cutoff: float = 0.0
    num_counted: int = 0
    """Columns of the gate that are not padding, over which mean and deviation are taken; 0: all."""

    def declare(self, spec: ArchSpec) -> Mapping[str, Declared]:
        names, inner, hidden = spec.names, Axis(self.inner), spec.hidden_size
        return {
            "gate": Linear(((names.gate, inner),), hidden, self.bias),
            "up": Linear(((names.up, inner),), hidden, self.bias),
            "down": Linear(((names.down, hidden),), inner, self.bias),
            "sparse": SparseGate(self.activation, self.cutoff, self.num_counted or self.inner),
        }

    def emit(self, ops: Ops, held: Held, x: Any) -> Sequence[Any]:
        gate = ops.linear(held["gate"], x)
        gated = ops.compute(held["sparse"], gate, ops.gathered(gate), ops.linear(held["up"], x))
        return [ops.product(held["down"], gated)]

    def why_no_program(self, spec: ArchSpec, tp_size: int) -> str:
        return "the program compares no value with the mean of a row that ranks divide." if tp_size > 1 else ""

    def for_ranks(self, tp_size: int, inner_block: int) -> OutstandingDense:
        inner = rounded_up(self.inner, tp_size * inner_block)
        return self if tp_size == 1 else replace(self, inner=inner, num_counted=self.num_counted or self.inner)

    def values_per_token(self, tp_size: int) -> int:
        """As of a dense FFN, and the gathered gate of all ranks, in float32 too."""
        return super().values_per_token(tp_size) + 2 * self.inner


def build(config: Config) -> ArchSpec:
    text = DEFAULTS | text_part(config)
    num_layers, head_dim = integer(text, "num_hidden_layers"), integer(text, "head_dim")
    default = ["sliding_attention" if (i + 1) % 5 else "full_attention" for i in range(num_layers)]
    types = layer_types(text, num_layers, default)
    full = Positions(rope(text, head_dim, GLOBAL_THETA, "full_attention"))
    local = text if "sliding_attention" in rope_section(text) else Config({})
    theta = number(text, "rope_local_base_freq", LOCAL_THETA)
    sliding = Positions(rope(local, head_dim, theta, "sliding_attention"), integer(text, "sliding_window"))
    kind, bias = activation(text, "hidden_activation", "gelu_pytorch_tanh"), flag(text, "attention_bias", False)
    sizes = _of_layers(text, "intermediate_size", num_layers)
    ffns = [Dense(size, kind) for size in map(int, sizes)]
    sparse = _of_layers(text | _default_sparsity(text, num_layers), "activation_sparsity_pattern", num_layers)
    spec = llama_like(
        text | {"intermediate_size": max(map(int, sizes))},
        positions=[sliding if each == "sliding_attention" else full for each in types],
        head_dim=head_dim,
        tied_head=True,
        max_positions=integer(text, "max_position_embeddings"),
        norm_placement="sandwich",
        attention={"scale": 1.0, "bias": bias, "output_bias": bias, "qk_norm": "head"},
        final_soft_cap=optional_number(text, "final_logit_softcapping"),
        embedding_scale=integer(text, "hidden_size") ** 0.5,
        stream=AltUp(
            integer(text, "hidden_size"),
            integer(text, "altup_num_inputs"),
            integer(text, "altup_active_idx"),
            integer(text, "laurel_rank"),
            integer(text, "hidden_size_per_layer_input"),
            num_layers,
            integer(text, "vocab_size_per_layer_input"),
            kind,
            flag(text, "altup_correct_scale", True),
        ),
    )
    sources = sources_of(types, num_layers - integer(text, "num_kv_shared_layers"))
    layers = []
    for layer, ffn, share, source in zip(spec.layers, ffns, sparse, sources, strict=True):
        plain = layer.mixer
        assert isinstance(plain, Attention)
        mixer = ValueNormAttention(**vars(plain), eps=spec.norm.eps, reads_only=source is not None)
        layers.append(LayerSpec(mixer, _sparse(ffn, share), source))
    return replace(spec, layers=tuple(layers), names=_names(spec, layers))


def kept_elsewhere(layers: Sequence[LayerSpec]) -> list[str]:
    """Patterns to ignore unused tensors of published checkpoints: keys and values of layers that read another layer's
    cache, also under GGUF's names."""
    return [
        rf"\.{index}\.(self_attn\.(k_proj|v_proj|k_norm)|attn_(k|v|k_norm))\."
        for index, layer in enumerate(layers)
        if layer.cache_of is not None
    ]


def _names(spec: ArchSpec, layers: Sequence[LayerSpec]) -> WeightNames:
    needless = kept_elsewhere(layers)
    assert isinstance(spec.stream, AltUp)
    if not spec.stream.scales_active:
        needless.append(r"\.altup\.correct_output_scale$")
    return replace(NAMES, ignorable=(*NAMES.ignorable, *needless))


def _of_layers(config: Config, key: str, num_layers: int) -> list[float]:
    """One number per layer, from a config field that is a list or one number for all. Raises ModelError."""
    given = config[key]
    found = given if isinstance(given, list) else [given] * num_layers
    if len(found) != num_layers or not all(isinstance(each, int | float) for each in found):
        raise ModelError(f"the config's {key} must be a number, or one of each of {num_layers} layers, got {given!r}")
    return found


def _default_sparsity(config: Config, num_layers: int) -> dict[str, Any]:
    if config.get("activation_sparsity_pattern") is not None:
        return {}
    first = SPARSE_LAYERS if num_layers > SPARSE_LAYERS else 0
    return {"activation_sparsity_pattern": [SPARSITY] * first + [0.0] * (num_layers - first)}


def _sparse(ffn: Dense, share: float) -> Ffn:
    """share: the fraction of a row's values that the gate sets to 0 if they are normally distributed."""
    if share and ffn.activation not in ("gelu_tanh", "gelu", "silu", "relu"):
        raise NotNativeError(f"sparse activations of {ffn.activation} are not supported")
    if not 0 <= share < 1:
        raise ModelError(f"the config's activation_sparsity_pattern must have shares from 0 to below 1, got {share}")
    return OutstandingDense(**vars(ffn), cutoff=NormalDist().inv_cdf(share)) if share else ffn


def sources_of(types: Sequence[str], first: int) -> list[int | None]:
    """For each layer the one whose cache it reads: for layers from `first` on, the last layer of the same type before
    `first`; None for the others."""
    if not 0 < first <= len(types):
        raise ModelError(f"the config's num_kv_shared_layers leave {first} of {len(types)} layers with a cache")
    own = {kind: index for index, kind in enumerate(types[:first])}
    if lacking := sorted(set(types[first:]) - set(own)):
        raise ModelError(f"the config shares the cache of {', '.join(lacking)}, and no layer before keeps one")
    return [None] * first + [own[kind] for kind in types[first:]]


FAMILY = Family(("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"), build)
