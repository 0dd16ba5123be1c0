"""Granite 3 with experts: Granite's shape with experts in all layers."""

from headrace.executor.models.arch import ArchSpec, StackedExperts, WeightNames
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import biases, experts, integer, llama_like, positive
from headrace.executor.models.families.granite import multipliers

NAMES = WeightNames(
    router="block_sparse_moe.router.layer",
    experts="block_sparse_moe.experts",
    renamed=((r"\.router\.weight$", ".router.layer.weight"),),  # transformers' module
)
STACKED = StackedExperts("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight")


def build(config: Config) -> ArchSpec:
    return llama_like(
        config,
        attention={"scale": positive(config, "attention_multiplier", 1.0), **biases(config, "attention_bias", False)},
        ffn=experts(config, integer(config, "intermediate_size"), renormalise=True),
        **multipliers(config),
        names=NAMES,
        stacked=STACKED,
    )


FAMILY = Family(("GraniteMoeForCausalLM",), build, assumes={"norm_topk_prob": (True,)})
