"""LFM2 with experts: after some dense layers, experts with sigmoid scores, chosen by corrected scores."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, StackedExperts
from headrace.executor.models.blocks import Routing
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import flag, integer, number
from headrace.executor.models.families.lfm2 import ASSUMES, IGNORED, layer_kinds, lfm2_like


def build(config: Config) -> ArchSpec:
    dense = Dense(integer(config, "intermediate_size", 7168), "silu")
    routing = Routing(
        integer(config, "num_experts_per_tok", 4),
        "sigmoid",
        renormalise=flag(config, "norm_topk_prob", True),
        scale=number(config, "routed_scaling_factor", 1.0),
    )
    mixture = Experts(
        integer(config, "num_experts", 32),
        routing,
        integer(config, "moe_intermediate_size", 1792),
        "silu",
        correction="vector" if flag(config, "use_expert_bias", True) else "no",
    )
    first = integer(config, "num_dense_layers", 2)
    spec = lfm2_like(config, lambda index: dense if index < first else mixture, layer_kinds(config))
    stacked = StackedExperts("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj")
    return replace(spec, stacked=stacked)


FAMILY = Family(("Lfm2MoeForCausalLM",), build, ignored=IGNORED, assumes=ASSUMES)
