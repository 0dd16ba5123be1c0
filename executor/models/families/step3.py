"""Step 3's language model: queries through a vector of fewer columns, one key/value head, and mixtures with a shared
expert in most layers."""

from __future__ import annotations

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, LayerSpec, StackedExperts, WeightNames
from headrace.executor.models.blocks import Routing
from headrace.executor.models.blocks.attention import FactorisedAttention, as_kind
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    dense,
    flag,
    integer,
    listed_layers,
    llama_like,
    rope,
    text_part,
)
from headrace.executor.models.families.text_halves import OTHER_MEDIA

TEXT, MULTIMODAL = "Step3TextForCausalLM", "Step3VLForConditionalGeneration"
NAMES = WeightNames(
    query_down="self_attn.q_proj",
    query_down_norm="self_attn.inter_norm",
    query_up="self_attn.wq",
    router="moe.gate",
    experts="moe.experts",
    shared_expert="share_expert",
    ignorable=(*WeightNames.ignorable, *OTHER_MEDIA, r"^(model\.)?(vit_downsampler\d*|vit_large_projector)\."),
)
FIRST_SPARSE, LAST_SPARSE = 4, 59
"""Of configs that do not list the layers with experts."""


def build(config: Config) -> ArchSpec:
    config = text_part(config)
    for name in ("max_position_embedding", "max_seq_len"):
        config = config.renamed(max_position_embeddings=name)
    config = {"rms_norm_eps": 1e-5, "head_dim": 256} | config | {"num_key_value_heads": 1}
    count, head_dim = integer(config, "num_hidden_layers"), integer(config, "head_dim")
    ffn, experts = dense(config), _mixture(config)
    sparse = listed_layers(config, "moe_layers_enum", range(FIRST_SPARSE, LAST_SPARSE + 1))
    spec = llama_like(
        config,
        positions=[Positions(rope(config, head_dim, 500_000.0))] * count,
        head_dim=head_dim,
        default_context=65_536,
        ffn=lambda index: experts if index in sparse else ffn,
        stacked=StackedExperts("moe.gate_proj.weight", "moe.down_proj.weight", up="moe.up_proj.weight"),
        names=NAMES,
    )
    rank = integer(config, "share_q_dim", 2048)
    layers = (LayerSpec(as_kind(FactorisedAttention, layer.mixer, query_rank=rank), layer.ffn) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


def _mixture(config: Config) -> Experts:
    routing = Routing(integer(config, "moe_top_k", 3), "softmax", renormalise=flag(config, "norm_expert_weight", False))
    return Experts(
        integer(config, "moe_num_experts", 48),
        routing,
        integer(config, "moe_intermediate_size", 5120),
        "silu",
        shared_inner=integer(config, "share_expert_dim", 5120),
        shared_gate=False,
    )


FAMILY = Family(
    (TEXT, MULTIMODAL),
    build,
    ignored={
        "max_position_embedding": "the longest context, as max_seq_len",
        "projector_bias": "of images",
        "understand_projector_stride": "of images",
    },
    assumes={"hidden_act": ("silu",), "num_attention_groups": (1,), "num_key_value_heads": (1,)},
)
