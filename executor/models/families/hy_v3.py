"""HunYuan V3 (Hy3): grouped-query attention with normed queries and keys, and DeepSeek V3's mixtures."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    biases,
    corrected_routing,
    further_layers,
    head_dim_of,
    llama_like,
    mixture_after_dense,
)

OTHER_NAMES = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "routed_scaling_factor": "router_scaling_factor",
}
RENAMED = (
    (r"\.mlp\.router\.gate\.", ".mlp.gate."),
    (r"\.mlp\.expert_bias$", ".mlp.e_score_correction_bias"),
    (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),
)
"""Published names, to those of transformers' modules."""


def build(config: Config) -> ArchSpec:
    config = {"n_shared_experts": 1, "routed_scaling_factor": 2.826} | config.renamed(**OTHER_NAMES)
    names = replace(further_layers(config), router_correction="mlp.e_score_correction_bias", renamed=RENAMED)
    return llama_like(
        config,
        head_dim=head_dim_of(config, 128),
        attention={"qk_norm": "head", **biases(config, "attention_bias", False)},
        ffn=mixture_after_dense(config, corrected_routing(config), default_dense=1),
        names=names,
        default_context=131_072,
    )


FAMILY = Family(
    ("HYV3ForCausalLM",),
    build,
    ignored={
        "enable_moe_fp32_combine": "sums are at least as precise as the model's type",
        "num_nextn_predict_layers": "of further layers, which are not run",
    },
)
