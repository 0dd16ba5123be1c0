"""Granite 4: Mamba 2's mixers, and attention in some layers; experts beside a shared one, or that alone. And Granite 3
with a shared expert, whose layers all have attention."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, Fused, StackedExperts, WeightNames
from headrace.executor.models.blocks import Ffn
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    activation,
    biases,
    experts,
    head_dim_of,
    integer,
    llama_like,
    one_of,
    positive,
    rope,
)
from headrace.executor.models.families._ssd import FIELDS, IGNORED, mamba, recurrent_layers
from headrace.executor.models.families.granite import multipliers

HYBRID = "GraniteMoeHybridForCausalLM"
SHARED = "shared_mlp"
NAMES = WeightNames(
    router="block_sparse_moe.router.layer",
    experts="block_sparse_moe.experts",
    shared_expert=SHARED,
    gate=f"{SHARED}.gate_proj",
    up=f"{SHARED}.up_proj",
    down=f"{SHARED}.down_proj",
    renamed=((r"\.router\.weight$", ".router.layer.weight"),),  # transformers' module
)
STACKED = StackedExperts("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight")


def ffn_of(config: Config, shared: int) -> Ffn:
    if not integer(config, "num_local_experts", 8):
        integer(config, "num_experts_per_tok", 2)  # of no expert
        return Dense(shared, activation(config, "hidden_act", "silu"))
    routed = experts(config, integer(config, "intermediate_size"), renormalise=True, shared_inner=shared)
    return replace(routed, shared_gate=False)


def shared_parts(config: Config, shared: int) -> tuple[Fused, ...]:
    """How checkpoints store the shared expert."""
    return (
        Fused(f"{SHARED}.input_linear", ((NAMES.gate, shared), (NAMES.up, shared))),
        Fused(f"{SHARED}.output_linear", ((NAMES.down, integer(config, "hidden_size")),)),
    )


def build(config: Config) -> ArchSpec:
    count, head_dim, shared = (
        integer(config, "num_hidden_layers"),
        head_dim_of(config),
        integer(config, "shared_intermediate_size", 1024),
    )
    is_hybrid = config["architectures"][0] == HYBRID
    kinds = recurrent_layers(config, "layer_types", count) if is_hybrid else [False] * count
    rotates = not is_hybrid or one_of(config, "position_embedding_type", "nope", "rope") == "rope"
    fused = list(shared_parts(config, shared))
    mixer = mamba(config) if any(kinds) else None
    if is_hybrid and mixer is None:  # as of Granite 4's smallest
        config.pass_over(*FIELDS)
    if mixer is not None and not mixer.problem():
        fused += mixer.fused()
    spec = llama_like(
        config,
        positions=[Positions(rope(config, head_dim, 10000.0) if rotates else None)] * count,
        head_dim=head_dim,
        attention={"scale": positive(config, "attention_multiplier", 1.0), **biases(config, "attention_bias", False)},
        ffn=ffn_of(config, shared),
        **multipliers(config),
        names=NAMES,
        stacked=STACKED,
        fused=tuple(fused),
    )
    layers = zip(kinds, spec.layers, strict=True)
    return replace(
        spec,
        layers=tuple(replace(each, mixer=mixer) if recurrent and mixer else each for recurrent, each in layers),
    )


FAMILY = Family(
    (HYBRID, "GraniteMoeSharedForCausalLM"), build, ignored=IGNORED, assumes={"normalization_function": ("rmsnorm",)}
)
