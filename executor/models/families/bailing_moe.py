"""Ling 1 and 2: mixtures with shared experts; of Ling 2, DeepSeek V3's, beside attention with normed queries and keys
of which half is rotated."""

from headrace.executor.models.arch import ArchSpec, Fused, WeightNames
from headrace.executor.models.blocks import Routing
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    corrected_routing,
    flag,
    head_dim_of,
    integer,
    llama_like,
    mixture_after_dense,
)

AT = "attention"
NAMES = WeightNames(
    embedding="word_embeddings",
    query=f"{AT}.q_proj",
    key=f"{AT}.k_proj",
    value=f"{AT}.v_proj",
    output=f"{AT}.dense",
    query_norm=f"{AT}.query_layernorm",
    key_norm=f"{AT}.key_layernorm",
    router_correction="mlp.gate.expert_bias",
    shared_expert="mlp.shared_experts",
)
SECOND = "BailingMoeV2ForCausalLM"


def build(config: Config) -> ArchSpec:
    config = config.renamed(n_routed_experts="num_experts", n_shared_experts="num_shared_experts")
    is_second = config["architectures"][0] == SECOND
    if is_second:
        config = {
            **{"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5},
            **{"use_qk_norm": True, "rope_theta": 600_000.0},
        } | config
        routing = corrected_routing(config)
    else:
        routing = Routing(integer(config, "num_experts_per_tok"), "softmax", flag(config, "norm_topk_prob", True))
    head_dim, heads = head_dim_of(config), integer(config, "num_attention_heads")
    kv_heads = integer(config, "num_key_value_heads", heads)
    rows = {NAMES.query: heads, NAMES.key: kv_heads, NAMES.value: kv_heads}
    count, further = integer(config, "num_hidden_layers"), integer(config, "num_nextn_predict_layers", 0)
    ignorable = tuple(rf"^model\.layers\.{count + index}\." for index in range(further))
    return llama_like(
        config,
        attention={
            "bias": flag(config, "use_qkv_bias", False),
            "output_bias": flag(config, "use_bias", False),
            "qk_norm": "head" if is_second and flag(config, "use_qk_norm", True) else "no",
        },
        ffn=mixture_after_dense(config, routing, correction=is_second),
        fused=(Fused(f"{AT}.query_key_value", tuple((name, each * head_dim) for name, each in rows.items())),),
        names=WeightNames(**vars(NAMES) | {"ignorable": (*NAMES.ignorable, *ignorable)}),
    )


FAMILY = Family(
    ("BailingMoeForCausalLM", SECOND),
    build,
    ignored={
        "mtp_loss_scaling_factor": "training alone",
        "output_dropout": "training alone",
        "router_dtype": "precision of the original code",
        "rotary_dim": "partial_rotary_factor says it",
        "moe_shared_expert_intermediate_size": "the shared experts' sizes are those of the others",
    },
    assumes={
        "moe_router_enable_expert_bias": (True,),
        "score_function": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "norm_head": (False,),
        "norm_softmax": (False,),
        "multi_gate": (False,),
        "use_rmsnorm": (True,),
        "use_sliding_window": (False,),
    },
)
