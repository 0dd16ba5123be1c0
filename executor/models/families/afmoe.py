"""AFMoE (Trinity): Gemma's norms around both blocks, gated attention with windows and rotation in three layers of four,
and DeepSeek V3's mixtures."""

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    corrected_routing,
    every_nth_full,
    flag,
    head_dim_of,
    integer,
    layer_types,
    llama_like,
    mixture_after_dense,
    rope,
)

NAMES = WeightNames(
    query_gate="self_attn.gate_proj",
    mlp_norm="pre_mlp_layernorm",
    mlp_post_norm="post_mlp_layernorm",
    router="mlp.router.gate",
    router_correction="mlp.expert_bias",
    shared_expert="mlp.shared_experts",
)
DEFAULTS = {
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
    "head_dim": 128,
    "max_position_embeddings": 16384,
}


def build(config: Config) -> ArchSpec:
    config = DEFAULTS | config.renamed(
        n_routed_experts="num_experts",
        n_shared_experts="num_shared_experts",
        first_k_dense_replace="num_dense_layers",
        routed_scaling_factor="route_scale",
    )
    return llama_like(
        config,
        positions=_positions(config),
        norm_placement="sandwich",
        attention={"qk_norm": "head", "gated": True},
        ffn=mixture_after_dense(config, corrected_routing(config)),
        embedding_scale=integer(config, "hidden_size") ** 0.5 if flag(config, "mup_enabled", False) else 1.0,
        names=NAMES,
    )


def _positions(config: Config) -> list[Positions]:
    """Of each layer. Raises ModelError."""
    count, step = integer(config, "num_hidden_layers"), integer(config, "global_attn_every_n_layers", 4)
    default = every_nth_full(count, step, "global_attn_every_n_layers")
    sliding = Positions(rope(config, head_dim_of(config), 10_000.0), integer(config, "sliding_window", 1024))
    types = layer_types(config, count, default)
    return [sliding if kind == "sliding_attention" else Positions(None) for kind in types]


FAMILY = Family(
    ("AfmoeForCausalLM",),
    build,
    ignored={"load_balance_coeff": "training alone", "use_grouped_mm": "a kernel of the original code"},
    assumes={
        "attention_bias": (False,),
        "num_expert_groups": (1,),
        "num_limited_groups": (1,),
        "route_norm": (True,),
        "score_func": ("sigmoid",),
    },
)
