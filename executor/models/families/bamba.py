"""Bamba: Mamba 2's mixers, and attention in some layers."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    biases,
    dense,
    flag,
    head_dim_of,
    integer,
    llama_like,
    rope,
)
from headrace.executor.models.families._ssd import IGNORED, mamba
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    final_norm="final_layernorm",
    mlp_norm="pre_ff_layernorm",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
)


def build(config: Config) -> ArchSpec:
    count, head_dim, mixer = integer(config, "num_hidden_layers"), head_dim_of(config), mamba(config)
    attending = config.get("attn_layer_indices") or []
    if not isinstance(attending, list) or not all(type(each) is int and 0 <= each < count for each in attending):
        raise ModelError(f"the config's attn_layer_indices must list layers below {count}, got {attending!r:.80}")
    rotated = integer(config, "attn_rotary_emb", head_dim // 2)
    rotary = rope({"partial_rotary_factor": rotated / max(1, head_dim)} | config, head_dim, 10000.0)
    spec = llama_like(
        config,
        positions=[Positions(rotary)] * count,
        head_dim=head_dim,
        attention=biases(config, "attention_bias", False),
        ffn=dense(config, bias=flag(config, "mlp_bias", False)),
        default_context=262144,
        names=NAMES,
        fused=() if mixer.problem() else mixer.fused(),
    )
    layers = enumerate(spec.layers)
    return replace(
        spec, layers=tuple(each if index in attending else replace(each, mixer=mixer) for index, each in layers)
    )


FAMILY = Family(("BambaForCausalLM",), build, ignored=IGNORED)
