"""DeepSeek V2 and V2 Lite: latent attention, and mixtures with shared experts."""

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.blocks import Routing
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import flag, integer, number, one_of
from headrace.executor.models.families._latent import deepseek
from headrace.kernels.expert_groups import ALL_EXPERTS, ExpertGroups


def build(config: Config) -> ArchSpec:
    method = one_of(config, "topk_method", "greedy", "group_limited_greedy")
    groups = ALL_EXPERTS
    if method == "group_limited_greedy":
        groups = ExpertGroups(integer(config, "n_group"), integer(config, "topk_group"))
    routing = Routing(
        integer(config, "num_experts_per_tok"),
        "sigmoid" if one_of(config, "scoring_func", "softmax", "sigmoid") == "sigmoid" else "softmax",
        renormalise=flag(config, "norm_topk_prob", False),
        scale=number(config, "routed_scaling_factor", 1.0),
        groups=groups,
    )
    return deepseek(config, routing, correction=False)


_BY_GROUPS = "experts have groups with topk_method group_limited_greedy alone, which reads it"
FAMILY = Family(
    ("DeepseekV2ForCausalLM",),
    build,
    ignored={"n_group": _BY_GROUPS, "topk_group": _BY_GROUPS},
    assumes={"mlp_bias": (False,)},
)
