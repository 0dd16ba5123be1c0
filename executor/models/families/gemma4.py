"""Gemma 4: Gemma 3n's normed values, shared caches and per-layer inputs, with larger heads in full attention, whose
values may be its keys, and in one model experts beside each dense FFN. Text only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, LayerSpec, StackedExperts
from headrace.executor.models.blocks import Ffn, Routing
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.blocks.layer_inputs import DenseBesideExperts, LayerInputs
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import (
    Positions,
    activation,
    flag,
    integer,
    layer_configs,
    layer_types,
    llama_like,
    optional_integer,
    optional_number,
    rope,
    text_part,
)
from headrace.executor.models.families.gemma3n import NAMES, ValueNormAttention, kept_elsewhere, sources_of

# Configs leave out fields with these values.
DEFAULTS = {
    "vocab_size": 262_144,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size": 2304,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_kv_shared_layers": 0,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
}
GLOBAL_HEAD_DIM = 512
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
STACKED = StackedExperts("experts.gate_up_proj", "experts.down_proj")


def build(config: Config) -> ArchSpec:
    text = DEFAULTS | text_part(config)
    if text.get("use_bidirectional_attention") not in (None, "vision"):
        raise NotNativeError(
            "the config's use_bidirectional_attention is all; text is computed from left to right here"
        )
    num_layers, hidden = integer(text, "num_hidden_layers"), integer(text, "hidden_size")
    default = ["sliding_attention" if (i + 1) % 6 else "full_attention" for i in range(num_layers)]
    types = layer_types(text, num_layers, default)
    types[-1:] = ["full_attention"]
    kind, bias = activation(text, "hidden_activation", "gelu_pytorch_tanh"), flag(text, "attention_bias", False)
    spec = llama_like(
        text | {"rope_parameters": None},
        positions=[Positions(None)] * num_layers,
        head_dim=integer(text, "head_dim"),
        tied_head=True,
        ffn=(plain := Dense(integer(text, "intermediate_size"), kind)),
        max_positions=integer(text, "max_position_embeddings"),
        norm_placement="sandwich",
        final_soft_cap=optional_number(text, "final_logit_softcapping"),
        embedding_scale=hidden**0.5,
        stacked=STACKED,
        stream=LayerInputs(
            hidden,
            num_layers,
            integer(text, "hidden_size_per_layer_input"),
            integer(text, "vocab_size_per_layer_input"),
            kind,
        ),
    )
    first_shared, doubles = num_layers - integer(text, "num_kv_shared_layers"), flag(text, "use_double_wide_mlp", False)
    sources = sources_of(types, first_shared)
    layers = [
        LayerSpec(
            replace(mixer, bias=bias, output_bias=bias, eps=spec.norm.eps, reads_only=source is not None),
            _ffn(text, plain, wide=doubles and index >= first_shared),
            source,
        )
        for index, (mixer, source) in enumerate(zip(_mixers(text, types), sources, strict=True))
    ]
    names = replace(
        NAMES,
        router="router.proj",
        experts="experts",
        ignorable=(*NAMES.ignorable, *kept_elsewhere(layers)),
    )
    return replace(spec, layers=tuple(layers), names=names)


def _mixers(text: Config, types: Sequence[str]) -> list[ValueNormAttention]:
    """Each layer's attention, as if all had caches of their own."""
    text = {"rope_parameters": ROPES} | text
    same = flag(text, "attention_k_eq_v", False)
    larger: dict[str, int] = {}
    if text.get("per_layer_config") is None:
        larger = {"head_dim": optional_integer(text, "global_head_dim") or GLOBAL_HEAD_DIM}
        heads = optional_integer(text, "num_global_key_value_heads")
        larger |= {"num_key_value_heads": heads} if same and heads is not None else {}
    if "sliding_attention" not in types:
        text.pass_over("sliding_window")
    found = []
    for each, own in zip(types, layer_configs(text, len(types), "head_dim", "num_key_value_heads"), strict=True):
        is_full = each == "full_attention"
        own = own | larger if is_full else own
        head_dim = integer(own, "head_dim")
        plain = Attention(
            num_heads=integer(text, "num_attention_heads"),
            num_kv_heads=integer(own, "num_key_value_heads"),
            head_dim=head_dim,
            scale=1.0,
            rope=rope(own, head_dim, 10_000.0, each),
            sliding_window=None if is_full else integer(text, "sliding_window"),
            qk_norm="head",
        )
        found.append(ValueNormAttention(**vars(plain), keys_are_values=same and is_full))
    return found


def _ffn(text: Config, plain: Dense, *, wide: bool) -> Ffn:
    dense = replace(plain, inner=2 * plain.inner) if wide else plain
    if not flag(text, "enable_moe_block", False):
        return dense
    routing = Routing(integer(text, "top_k_experts"), "softmax", renormalise=True)
    inner = integer(text, "moe_intermediate_size")
    return DenseBesideExperts(integer(text, "num_experts"), routing, inner, dense.activation, dense=dense)


FAMILY = Family(
    ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"),
    build,
    ignored={
        "use_bidirectional_attention": "it is of images",
        "num_global_key_value_heads": "it is of keys that are values too",
        "global_head_dim": "per_layer_config says it",
    },
)
