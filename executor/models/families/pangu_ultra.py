"""openPangu Ultra: DeepSeek V3's shape without groups of experts, with norms after both blocks too."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import corrected_routing, flag
from headrace.executor.models.families._latent import deepseek
from headrace.executor.models.families.pangu_pro import RENAMED


def build(config: Config) -> ArchSpec:
    corrected = flag(config, "router_enable_expert_bias", False)
    spec = deepseek(config, corrected_routing(config), correction=corrected)
    spec = replace(spec, names=replace(spec.names, renamed=RENAMED))
    if not flag(config, "sandwich_norm", False):
        return spec
    names = replace(spec.names, mlp_norm="pre_mlp_layernorm", mlp_post_norm="post_mlp_layernorm")
    return replace(spec, norm_placement="sandwich", names=names)


FAMILY = Family(("PanguUltraMoEForCausalLM",), build, assumes={"n_group": (1,), "topk_group": (1,)})
