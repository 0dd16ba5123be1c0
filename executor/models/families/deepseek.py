"""DeepSeek-MoE 16B: Llama's attention, and mixtures with shared experts after the first dense layers."""

from headrace.executor.models.arch import ArchSpec, WeightNames
from headrace.executor.models.blocks import Routing
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import biases, flag, integer, llama_like, mixture_after_dense, one_of


def build(config: Config) -> ArchSpec:
    routing = Routing(
        integer(config, "num_experts_per_tok"),
        "sigmoid" if one_of(config, "scoring_func", "softmax", "sigmoid") == "sigmoid" else "softmax",
        renormalise=flag(config, "norm_topk_prob", False),
    )
    return llama_like(
        config,
        attention=biases(config, "attention_bias", False),
        ffn=mixture_after_dense(config, routing, correction=False),
        names=WeightNames(shared_expert="mlp.shared_experts"),
    )


FAMILY = Family(("DeepseekForCausalLM",), build)
