"""A.X-K1: DeepSeek V3's shape, with a norm on the results of its mixtures."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import corrected_routing
from headrace.executor.models.families._latent import deepseek

DEFAULTS = {
    "first_k_dense_replace": 1,
    "n_group": 8,
    "topk_group": 4,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}
POST_NORM = "post_mlp_layernorm"


def build(config: Config) -> ArchSpec:
    config = DEFAULTS | config
    spec = deepseek(config, corrected_routing(config), correction=True)
    layers, unused = list(spec.layers), []
    for index, layer in enumerate(layers):
        if isinstance(layer.ffn, Experts):
            ffn = replace(layer.ffn, correction_optional=True)  # the published files have none
            layers[index] = replace(layer, ffn=ffn, norm_placement="ffn_sandwich")
        else:  # the published files have a norm of each layer
            unused.append(rf"\.layers\.{index}\.{POST_NORM}\.")
    names = replace(spec.names, mlp_post_norm=POST_NORM, ignorable=(*spec.names.ignorable, *unused))
    return replace(spec, layers=tuple(layers), names=names)


FAMILY = Family(
    ("AXK1ForCausalLM",),
    build,
    ignored={"topk_method": "experts have a correction where the file has it"},
    assumes={"scoring_func": ("sigmoid", "noaux_tc")},
)
