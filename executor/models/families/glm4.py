"""GLM 4 0414 (GLM-4-32B, GLM-Z1): GLM 4's shape with additional norms after attention and FFN."""

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families.glm import glm_like

NAMES = WeightNames(
    mlp_norm="post_attention_layernorm",
    attention_post_norm="post_self_attn_layernorm",
    mlp_post_norm="post_mlp_layernorm",
)


def build(config: Config) -> ArchSpec:
    return glm_like(config, norm_placement="sandwich", names=NAMES)


FAMILY = Family(("Glm4ForCausalLM",), build)
