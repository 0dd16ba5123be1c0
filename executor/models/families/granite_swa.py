"""Granite with sliding windows, attention sinks and a rotary base of each layer; with experts or without."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, RopeSpec, StackedExperts
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    biases,
    dense,
    flag,
    head_dim_of,
    integer,
    layer_types,
    llama_like,
    optional_integer,
    positive,
    rope,
)
from headrace.executor.models.families.granite import multipliers
from headrace.executor.models.families.granitemoehybrid import NAMES, ffn_of, shared_parts
from headrace.ipc.failure import ModelError

WITH_EXPERTS = "GraniteMoeSWAForCausalLM"
STACKED = StackedExperts("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.experts.down_proj")


def _positions(config: Config, head_dim: int) -> list[Positions]:
    count, plain = integer(config, "num_hidden_layers"), rope(config, head_dim, 10000.0)
    types = layer_types(config, count, ["sliding_attention" if i % 4 else "full_attention" for i in range(count)])
    given = config.get("layer_rope_theta")
    thetas = [plain.theta] * count if given is None else given
    if not isinstance(thetas, list) or len(thetas) != count or not all(type(each) in (int, float) for each in thetas):
        raise ModelError(
            f"the config's layer_rope_theta must be a number for each of {count} layers, got {given!r:.80}"
        )
    window = optional_integer(config, "sliding_window")

    def rotary(theta: float) -> RopeSpec | None:
        return replace(plain, theta=float(theta)) if theta else None

    return [
        Positions(rotary(theta), window if kind == "sliding_attention" else None)
        for theta, kind in zip(thetas, types, strict=True)
    ]


def build(config: Config) -> ArchSpec:
    config, head_dim = {"sliding_window": 128} | config, head_dim_of(config)
    attention = {"scale": positive(config, "attention_multiplier", 1.0), **biases(config, "attention_bias", False)}
    fields = {"positions": _positions(config, head_dim), "head_dim": head_dim, **multipliers(config)}
    if config["architectures"][0] != WITH_EXPERTS:
        ffn = dense(config, bias=flag(config, "mlp_bias", False))
        return llama_like(config, attention=attention | {"sinks": True}, ffn=ffn, **fields)
    shared = integer(config, "shared_intermediate_size", 0)
    return llama_like(
        config,
        attention=attention | {"sinks": True},
        ffn=ffn_of(config, shared),
        names=replace(NAMES, router="block_sparse_moe.router", renamed=()),
        stacked=STACKED,
        fused=shared_parts(config, shared) if shared else (),
        **fields,
    )


FAMILY = Family(("GraniteSWAForCausalLM", WITH_EXPERTS), build)
