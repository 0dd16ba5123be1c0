"""Grok 1 and 2: norms before and after both blocks, capped scores of attention and of the router, scaled embeddings and
logits; in Grok 2 a dense FFN beside the experts, and scores that grow at later positions."""

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.blocks import Routing
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    activation,
    flag,
    head_dim_of,
    integer,
    llama_like,
    number,
    optional_number,
    results_times,
)

NAMES = WeightNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    shared_expert="mlp",
    attention_norm="pre_attn_norm",
    attention_post_norm="post_attn_norm",
    mlp_norm="pre_moe_norm",
    mlp_post_norm="post_moe_norm",
    renamed=(
        (r"\.attn\.", ".self_attn."),  # Grok 1's names
        (r"\.moe_block\.", ".block_sparse_moe."),
        (r"norm\.scale$", "norm.weight"),
        (r"(\.experts\.\d+)\.(linear|w1)\.", r"\1.gate_proj."),
        (r"(\.experts\.\d+)\.(linear_v|w3)\.", r"\1.up_proj."),
        (r"(\.experts\.\d+)\.(linear_1|w2)\.", r"\1.down_proj."),
    ),
)
CAP = 30.0
PARALLEL = 0.5**0.5
"""Multiplies the sum of the experts and the dense FFN beside them."""


def build(config: Config) -> ArchSpec:
    head_dim, dense = head_dim_of(config), flag(config, "residual_moe", False)
    own = config.renamed(attn_logit_softcapping="max_attn_value", moe_router_renormalize="moe_renormalize")
    grows_after = integer(own, "attn_temperature_len", -1)
    return llama_like(
        own,
        head_dim=head_dim,
        attention={
            "scale": number(own, "attn_output_multiplier", head_dim**-0.5),
            "soft_cap": _cap(own, "attn_logit_softcapping"),
            "grow_after": grows_after if grows_after > 0 else None,
        },
        ffn=_experts(own, dense),
        default_context=8192,
        tied_head=not dense,
        norm_placement="sandwich",
        embedding_scale=number(own, "embedding_multiplier_scale", 78.38367176906169),
        logit_scale=number(own, "output_multiplier_scale", 0.5773502691896257),
        final_soft_cap=optional_number(own, "final_logit_softcapping"),
        scaled=results_times(PARALLEL, f"{NAMES.shared_expert}.{NAMES.expert_down}") if dense else (),
        names=NAMES,
    )


def _experts(config: Config, dense: bool) -> Experts:
    inner = integer(config, "intermediate_size")
    routing = Routing(
        integer(config, "num_experts_per_tok", 2),
        "softmax",
        renormalise=flag(config, "moe_router_renormalize", not dense),
        scale=PARALLEL if dense else 1.0,
    )
    return Experts(
        integer(config, "num_local_experts" if config.get("num_experts") is None else "num_experts", 8),
        routing,
        integer(config, "moe_intermediate_size", inner),
        activation(config, "hidden_act", "gelu"),
        shared_inner=inner if dense else 0,
        shared_gate=False,
        logit_cap=_cap(config, "router_logit_softcapping"),
    )


def _cap(config: Config, key: str) -> float | None:
    cap = number(config, key, CAP)
    return cap if cap > 0 else None


SCALING = ("scaling_factor", "extrapolation_factor", "attn_factor", "beta_fast", "beta_slow")
FAMILY = Family(
    ("Grok1ForCausalLM", "Grok1ModelForCausalLM"),
    build,
    ignored=dict.fromkeys(SCALING, "of scaled rotations; rope_type says that there are none"),
    assumes={
        "rope_type": ("original", "default"),
        "rope_rotate_half_dims": (False,),
        "attn_logit_softcapping_method": ("tanh",),
        "sliding_window_size": (-1,),
        "global_attn_every_n": (1,),
    },
)
