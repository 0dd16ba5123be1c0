"""GLM 5.3: hyper-connections, Kimi Delta Attention, and latent attention without rotation, in every fourth layer, to
pools of keys that an index chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.executor.models.arch import STACKED, ArchSpec, WeightNames
from headrace.executor.models.blocks import Ffn, Mixer
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.blocks.latent import LatentAttention
from headrace.executor.models.blocks.linear_attention import DeltaRule
from headrace.executor.models.blocks.sparse_latent import SparseLatentAttention
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    corrected_routing,
    flag,
    integer,
    limited_silu,
    number,
    optional_number,
    routed_layers,
)
from headrace.executor.models.families._latent import latent_like
from headrace.executor.models.families._ssd import require_silu
from headrace.executor.models.families.deepseek_v4 import mixed_connections
from headrace.executor.models.families.deepseek_v32 import indexer_types
from headrace.executor.models.families.kimi_linear import DELTA, size_of_linear
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    shared_expert="mlp.shared_experts",
    renamed=(
        (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
        (r"\.self_attn\.forget_gate\.", ".self_attn."),
        (r"\.index_kpool_compress_gate$", ".index_kpool_compress_gate.weight"),
    ),
)
DEFAULTS: dict[str, Any] = {
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1_048_576,
    "qk_rope_head_dim": 0,
}
NOT_ROTATED = {"rope_parameters": None, "rope_scaling": None, "rope_theta": None}


def build(config: Config) -> ArchSpec:
    require_silu(config, "hidden_act")
    config = DEFAULTS | config | NOT_ROTATED
    spec = latent_like(
        config, _ffn(config), names=_names(config), max_positions=integer(config, "max_position_embeddings")
    )
    linear = _linear(config)
    own: dict[str, Any] = {
        "num_chosen": integer(config, "index_topk", 2048),
        "index_heads": integer(config, "index_n_heads", 32),
        "index_dim": integer(config, "index_head_dim", 128),
        "pool_size": integer(config, "index_kpool", 16),
    }
    attends = _attends(config, spec.num_layers)
    layers, kinds = [], indexer_types(config, spec.num_layers)
    for index, layer in enumerate(spec.layers):
        mixer: Mixer = linear
        if attends[index]:
            if kinds[index] == "shared" and not (index and attends[index - 1]):
                raise ModelError(f"the config's indexer_types have shared for layer {index}, before which none attends")
            plain = layer.mixer
            assert isinstance(plain, LatentAttention)
            plain = replace(plain, latent_eps=spec.norm.eps)
            mixer = SparseLatentAttention(**vars(plain), index="halves" if kinds[index] == "full" else "none", **own)
        layers.append(replace(layer, mixer=mixer))
    stream = mixed_connections(config, spec.hidden_size, spec.norm.eps, weighted_end=False)
    return replace(spec, layers=tuple(layers), fused=(linear.fused(),), stream=stream, stacked=STACKED)


def _names(config: Config) -> WeightNames:
    """Ignores the layers for multi-token prediction, which come after the others."""
    further = rf"\.layers\.{integer(config, 'num_hidden_layers')}\."
    return replace(NAMES, ignorable=(*NAMES.ignorable, further, r"\.layers\.\d+\.shared_head\."))


def _attends(config: Config, count: int) -> list[bool]:
    """Whether each layer attends to keys, instead of being recurrent. Raises ModelError."""
    given = config.get("layer_types")
    if given is None:
        return [index % 4 == 3 for index in range(count)]
    known = {"linear_attention", "indexed_attention", "full_attention"}
    if not isinstance(given, list) or len(given) < count or set(map(str, given)) - known:
        raise ModelError(
            f"the config's layer_types must be linear_attention or indexed_attention for each of {count} layers, "
            f"got {given!r:.80}"
        )
    return [each != "linear_attention" for each in given[:count]]


def _linear(config: Config) -> DeltaRule:
    given = config.section("linear_attn_config")
    heads = size_of_linear(config, given, "num_heads", "linear_num_heads", 64)
    size = size_of_linear(config, given, "head_dim", "linear_head_dim", 128)
    floor = optional_number(config, "linear_lower_bound") if config.stores("linear_lower_bound") else -5.0
    if given:
        floor = optional_number(given, "gate_lower_bound") if given.stores("gate_lower_bound") else floor
        floor = -5.0 if flag(given, "safe_gate", True) and floor is None else floor
    return DeltaRule(
        heads=heads,
        key_heads=heads,
        key_dim=size,
        value_dim=size,
        conv_width=size_of_linear(config, given, "short_conv_kernel_size", "linear_conv_kernel_dim", 4),
        norm_eps=number(config, "rms_norm_eps"),
        decay_floor=floor or 0.0,
        decay_per_channel=True,
        rank=size,
        gate="sigmoid",
        at="self_attn",
        names=DELTA,
    )


def _ffn(config: Config) -> Any:
    """The FFN of each layer by its index."""
    kind, inner = limited_silu(config, "swiglu_limit"), integer(config, "moe_intermediate_size", 2048)
    dense = Dense(integer(config, "intermediate_size", 12_288), kind)
    mixture = Experts(
        integer(config, "n_routed_experts", 288),
        corrected_routing(config),
        inner,
        kind,
        shared_inner=inner * integer(config, "n_shared_experts"),
        shared_gate=False,
        correction="vector",
    )
    routes = routed_layers(config, 3)

    def ffn(index: int) -> Ffn:
        return mixture if routes[index] else dense

    return ffn


FAMILY = Family(
    ("Glm5NextForCausalLM",),
    build,
    ignored={
        "head_dim": "qk_rope_head_dim says it",
        "qk_head_dim": "the parts' sizes say it",
        "num_key_value_heads": "latent attention has one",
        "rope_theta": "nothing is rotated",
        "rope_parameters": "nothing is rotated",
        "rope_scaling": "nothing is rotated",
    },
    assumes={"index_kpool_always_select_tail": (True,), "qk_rope_head_dim": (0,)},
)
