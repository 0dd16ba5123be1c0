"""MiniMax M2: experts in all layers, with sigmoid scores and chosen by corrected scores."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.blocks import Routing
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import activation, head_dim_of, integer, llama_like
from headrace.executor.models.families.mixtral import NAMES


def build(config: Config) -> ArchSpec:
    if config.get("rotary_dim") is not None:
        config = {**config, "partial_rotary_factor": integer(config, "rotary_dim") / head_dim_of(config)}
    mixture = Experts(
        integer(config, "num_local_experts"),
        Routing(integer(config, "num_experts_per_tok"), "sigmoid", renormalise=True),
        integer(config, "intermediate_size"),
        activation(config, "hidden_act", "silu"),
        correction="vector",
    )
    return llama_like(
        config,
        attention={"qk_norm": "whole"},
        ffn=mixture,
        names=replace(
            NAMES,
            router_correction="block_sparse_moe.e_score_correction_bias",
            ignorable=(*NAMES.ignorable, r"^model\.mtp_modules\."),
        ),
    )


FAMILY = Family(("MiniMaxM2ForCausalLM",), build)
