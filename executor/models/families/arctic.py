"""Snowflake Arctic: in every other layer experts of the layer's input, beside attention and a dense FFN of the hidden
size behind it; in the others one larger dense FFN."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, LayerSpec, WeightNames
from headrace.executor.models.blocks import Ffn, Routing
from headrace.executor.models.blocks.attention import as_kind
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.blocks.early_experts import AttentionBesideExperts, EarlyExperts
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import activation, flag, integer, llama_like
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
    gate="residual_mlp.w1",
    up="residual_mlp.w3",
    down="residual_mlp.w2",
    mlp_norm="ffn_layernorm",
)
EXPERTS_NORM = "post_attention_layernorm"
"""Of experts beside a dense FFN, whose norm has another name; of other FFNs it is the norm."""


def build(config: Config) -> ArchSpec:
    config = {"rms_norm_eps": 1e-5, "rope_theta": 1e6} | config.renamed(parallel_attn_mlp_res="use_residual")
    count, step = integer(config, "num_hidden_layers"), integer(config, "moe_layer_frequency", 2)
    if step < 1:
        raise ModelError(f"the config's moe_layer_frequency must be at least 1, got {step}")
    parallel = flag(config, "parallel_attn_mlp_res", False)
    ffns = [_ffn(config, routed=(index + 1) % step == 0, parallel=parallel) for index in range(count)]
    others = "|".join(str(index) for index, ffn in enumerate(ffns) if not isinstance(ffn, EarlyExperts))
    renamed = (
        (r"\.block_sparse_moe\.mlp\.", ".residual_mlp."),
        (r"\.residual_layernorm\.", f".{NAMES.mlp_norm}."),
        *(((rf"(^|\.)layers\.({others})\.{EXPERTS_NORM}\.", rf"\1layers.\2.{NAMES.mlp_norm}."),) if others else ()),
    )
    spec = llama_like(
        config, ffn=lambda index: ffns[index], default_context=4096, names=replace(NAMES, renamed=renamed)
    )
    return replace(spec, layers=tuple(map(_layer, spec.layers)))


def _ffn(config: Config, *, routed: bool, parallel: bool) -> Ffn:
    inner, kind = integer(config, "intermediate_size"), activation(config, "hidden_act", "silu")
    if not routed:
        return Dense(inner, kind)
    chosen = integer(config, "num_experts_per_tok", 1)
    routing = Routing(chosen, "softmax", renormalise=chosen > 1)
    experts = Experts(integer(config, "num_local_experts", 8), routing, inner, kind)
    return EarlyExperts(Dense(integer(config, "hidden_size"), kind), experts) if parallel else experts


def _layer(layer: LayerSpec) -> LayerSpec:
    if not isinstance(layer.ffn, EarlyExperts):
        return layer
    return replace(layer, mixer=as_kind(AttentionBesideExperts, layer.mixer, experts_norm=EXPERTS_NORM))


CAPACITY = ("moe_train_capacity_factor", "moe_eval_capacity_factor", "moe_min_capacity", "moe_token_dropping")
FAMILY = Family(
    ("ArcticForCausalLM",),
    build,
    ignored={
        **dict.fromkeys(CAPACITY, "every token is computed by all its experts"),
        "enable_expert_tensor_parallelism": "layout of training over devices",
    },
    assumes={"sliding_window": ()},
)
