"""Ling 1 and 2, Sarvam's and Param2's mixtures in Ling's shape: with shared experts; of all but Ling 1, DeepSeek V3's,
beside attention with normed queries and keys, of which half is rotated in Ling 2."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

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
    optional_integer,
    with_rotary_dim,
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
PARAM2 = "Param2MoEForCausalLM"
CORRECTED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "BailingMoeV2ForCausalLM": {
            **{"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5},
            **{"use_qk_norm": True, "rope_theta": 600_000.0},
        },
        "SarvamMoEForCausalLM": {
            **{"routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "n_shared_experts": 1},
            **{"use_qk_norm": True, "rope_theta": 8_000_000.0},
        },
        PARAM2: {"first_k_dense_replace": 1, "n_shared_experts": 1},
    }
)
"""Architectures whose experts are chosen by corrected scores, with what their configs leave out."""


def build(config: Config) -> ArchSpec:
    name = config["architectures"][0]
    is_corrected = name in CORRECTED
    config = config.renamed(
        n_routed_experts="num_experts", n_shared_experts="num_shared_experts", attention_bias="use_qkv_bias"
    )
    if is_corrected:
        config = CORRECTED[name] | config
        routing = corrected_routing(config)
    else:
        routing = Routing(integer(config, "num_experts_per_tok"), "softmax", flag(config, "norm_topk_prob", True))
    head_dim, heads = head_dim_of(config), integer(config, "num_attention_heads")
    config = with_rotary_dim(config, head_dim)
    kv_heads = integer(config, "num_key_value_heads", heads)
    rows = {NAMES.query: heads, NAMES.key: kv_heads, NAMES.value: kv_heads}
    return llama_like(
        config,
        attention={
            "bias": flag(config, "attention_bias", False),
            "output_bias": flag(config, "use_bias", False),
            "qk_norm": "head" if is_corrected and flag(config, "use_qk_norm", False) else "no",
        },
        ffn=mixture_after_dense(config, routing, correction=is_corrected, shared_inner=shared_inner(config, name)),
        fused=(Fused(f"{AT}.query_key_value", tuple((name, each * head_dim) for name, each in rows.items())),),
        names=replace(NAMES, ignorable=(*NAMES.ignorable, *ignorable_layers(config))),
    )


def ignorable_layers(config: Config) -> tuple[str, ...]:
    """Patterns of the weights of further layers, for multi-token prediction."""
    count, further = integer(config, "num_hidden_layers"), integer(config, "num_nextn_predict_layers", 0)
    return tuple(rf"^model\.layers\.{count + index}\." for index in range(further))


def shared_inner(config: Config, name: str) -> int | None:
    """The size of all shared experts together. Param2's configs have it; the others' have that of one."""
    given = optional_integer(config, "moe_shared_expert_intermediate_size")
    count = integer(config, "n_shared_experts", 0)
    return given if given is None or (name == PARAM2 and count) else given * count


IGNORED: Mapping[str, str] = MappingProxyType(
    {
        "mtp_loss_scaling_factor": "training alone",
        "output_dropout": "training alone",
        "router_dtype": "precision of the original code",
    }
)
ASSUMES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "moe_router_enable_expert_bias": (True,),
        "score_function": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "norm_head": (False,),
        "norm_softmax": (False,),
        "multi_gate": (False,),
        "use_rmsnorm": (True,),
        "use_sliding_window": (False,),
    }
)

FAMILY = Family(("BailingMoeForCausalLM", *CORRECTED), build, ignored=IGNORED, assumes=ASSUMES)
