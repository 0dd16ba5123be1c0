"""K2 Horizon: Llama's shape with norms of groups of columns, rotation of a part of each half of a head, experts beside
shared ones, and, in the MoVA models, gated attention whose values are those of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from headrace.executor.models.arch import ArchSpec, LayerSpec, NormSpec, RopeSpec, WeightNames
from headrace.executor.models.blocks import Ffn, Routing
from headrace.executor.models.blocks.attention import Attention, as_kind
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.blocks.gated_norm import GateActivation
from headrace.executor.models.blocks.value_experts import HorizonAttention
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import (
    activation,
    biases,
    dense,
    flag,
    head_dim_of,
    integer,
    llama_like,
    number,
    sparse_layers,
)
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    shared_expert="mlp.shared_experts", router_correction="mlp.gate.bias", query_gate="self_attn.gate_proj"
)
OF_SPARSE = ("mlp_only_layers", "decoder_sparse_step")
GATES: dict[str, GateActivation] = {"silu": "silu", "softplus": "softplus2"}


def build(config: Config) -> ArchSpec:
    head_dim, config = head_dim_of(config), {"rope_theta": 1e7} | config
    spec = llama_like(
        config,
        head_dim=head_dim,
        ffn=_ffns(config),
        attention=biases(config, "attention_bias", False) | _gates(config),
        norm=NormSpec("rms", number(config, "rms_norm_eps", 1e-6), groups=integer(config, "layernorm_num_groups", 1)),
        default_context=524_288,
        names=NAMES,
    )
    own = {"norms_heads": flag(config, "query_key_norm", False)}
    experts = _values(config)
    layers = [
        _layer(layer, head_dim, integer(config, "rope_head_dim", head_dim), own, experts) for layer in spec.layers
    ]
    return replace(spec, layers=tuple(layers))


def _ffns(config: Config) -> Ffn | Callable[[int], Ffn]:
    if not integer(config, "num_experts", 0):
        config.pass_over("num_experts_per_tok", "num_shared_experts", "norm_topk_prob", "router_", "moe_", *OF_SPARSE)
        return dense(config)
    return sparse_layers(config, _mixture(config))


def _mixture(config: Config) -> Experts:
    inner = integer(config, "moe_intermediate_size")
    return Experts(
        integer(config, "num_experts"),
        Routing(
            integer(config, "num_experts_per_tok"),
            _scoring(config),
            renormalise=flag(config, "norm_topk_prob", True),
            scale=number(config, "router_scaling_factor", 1.0),
        ),
        inner,
        activation(config, "hidden_act", "silu"),
        shared_inner=inner * integer(config, "num_shared_experts", 0),
        shared_gate=False,
        correction="vector" if flag(config, "moe_gate_bias", True) else "no",
    )


def _gates(config: Config) -> dict[str, Any]:
    """Of the attention of all layers."""
    gate = config.get("attention_gate_func")
    if gate is not None and gate not in GATES:
        raise ModelError(f"the config's attention_gate_func is {gate!r:.80}; supported are {', '.join(GATES)} and null")
    return {} if gate is None else {"gated": True, "gate_activation": GATES[gate], "gate_bias": False}


def _values(config: Config) -> dict[str, Any]:
    """Of the attention of layers with experts, whose values are those of experts too."""
    if not (count := integer(config, "mova_num_experts", 0)):
        config.pass_over("mova_num_experts_per_tok")
        return {}
    chosen = integer(config, "mova_num_experts_per_tok")
    scale = number(config, "router_scaling_factor", 1.0)
    routing = Routing(chosen, _scoring(config), renormalise=chosen > 1, scale=scale)
    return {"num_experts": count, "routing": routing, "correction": flag(config, "moe_gate_bias", True)}


def _scoring(config: Config) -> Literal["softmax", "sigmoid"]:
    found = config.get("router_score_func") or "sigmoid"
    if found not in ("softmax", "sigmoid"):
        raise ModelError(f"the config's router_score_func is {found!r:.80}; it is softmax or sigmoid")
    return "softmax" if found == "softmax" else "sigmoid"


def _layer(layer: LayerSpec, head_dim: int, turned: int, own: dict[str, Any], values: dict[str, Any]) -> LayerSpec:
    mixer = layer.mixer
    assert isinstance(mixer, Attention)
    assert mixer.rope is not None
    mixer = replace(mixer, rope=_rotation(mixer.rope, head_dim, turned))
    given = own | (values if isinstance(layer.ffn, Experts) else {})
    if not any(given.values()):
        return replace(layer, mixer=mixer)
    return replace(layer, mixer=as_kind(HorizonAttention, mixer, **given))


def _rotation(rope: RopeSpec, head_dim: int, turned: int) -> RopeSpec:
    """Of the first turned / 2 dimensions of each half of a head, with the frequencies of a head of `turned` ones."""
    if turned == head_dim:
        return rope
    if turned % 2 or not 2 <= turned <= head_dim:
        raise ModelError(f"the config's rope_head_dim must be even, from 2 to head_dim {head_dim}, got {turned}")
    if rope.kind != "default":
        raise NotNativeError("a scaled rotation of a part of each head is not supported")
    return replace(rope, kind="proportional", turned_dim=turned, spread_dim=turned)


FAMILY = Family(
    ("K2HorizonForCausalLM",),
    build,
    assumes={"use_sliding_window": (False,), "sliding_window": (), "dual_chunk_attention_config": ()},
)
