"""MiniMax M2: experts in all layers, with sigmoid scores and chosen by corrected scores."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.blocks import Routing
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import activation, head_dim_of, integer, llama_like, with_rotary_dim
from headrace.executor.models.families.mixtral import NAMES
from headrace.ipc.failure import ModelError

FULL_ATTENTION = 1
"""Of `attn_type_list`, which its predecessor has for its linear layers."""


def build(config: Config) -> ArchSpec:
    if any(kind != FULL_ATTENTION for kind in config.get("attn_type_list") or ()):
        raise ModelError("the config's attn_type_list has layers of linear attention, which are not supported")
    config = with_rotary_dim(config, head_dim_of(config))
    mixture = Experts(
        integer(config, "num_local_experts"),
        Routing(integer(config, "num_experts_per_tok"), "sigmoid", renormalise=True),
        integer(config, "intermediate_size"),
        activation(config, "hidden_act", "silu"),
        correction="vector",
    )
    return llama_like(
        config,
        attention={"qk_norm": "whole"},
        ffn=mixture,
        names=replace(
            NAMES,
            router_correction="block_sparse_moe.e_score_correction_bias",
            ignorable=(*NAMES.ignorable, r"^model\.mtp_modules\."),
        ),
    )


FAMILY = Family(
    ("MiniMaxM2ForCausalLM",),
    build,
    ignored={
        "layernorm_full_attention_alpha": "of its predecessor",
        "layernorm_full_attention_beta": "of its predecessor",
        "layernorm_linear_attention_alpha": "of its predecessor",
        "layernorm_linear_attention_beta": "of its predecessor",
        "layernorm_mlp_alpha": "of its predecessor",
        "layernorm_mlp_beta": "of its predecessor",
        "shared_moe_mode": "it has no shared expert",
    },
    assumes={
        "norm_topk_prob": (True,),
        "scoring_func": ("sigmoid",),
        "use_qk_norm": (True,),
        "use_routing_bias": (True,),
        "qk_norm_type": ("per_layer",),
    },
)
