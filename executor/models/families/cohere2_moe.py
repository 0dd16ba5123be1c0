"""Cohere 2 with experts: Command A's parallel blocks and windows, dense FFNs first, and shared experts whose mean with
the chosen ones may be taken."""

from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, NormSpec, WeightNames
from headrace.executor.models.blocks import Ffn, Routing
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    activation,
    biases,
    dense,
    every_nth_full,
    flag,
    head_dim_of,
    integer,
    layer_norm,
    layer_types,
    llama_like,
    number,
    optional_integer,
    positive,
    results_times,
    rope,
    routed_layers,
)
from headrace.executor.models.families.cohere2 import ASSUMES, IGNORED
from headrace.ipc.failure import ModelError

NAMES = WeightNames(mlp_norm="input_layernorm", shared_expert="mlp.shared_experts")
SCORES = ("softmax", "sigmoid")
HALF = results_times(0.5, "mlp.shared_experts.down_proj")


def build(config: Config) -> ArchSpec:
    routes = routed_layers(config, 0)
    takes_mean, mixture = _mixture(config)
    ffns: list[Ffn] = [mixture] * len(routes)
    if not all(routes):
        plain = dense(config | {"intermediate_size": integer(config, "prefix_dense_intermediate_size")})
        ffns = [mixture if each else plain for each in routes]
    own_norm = config.get("rms_norm_eps") is not None
    return llama_like(
        config,
        positions=_positions(config, routes),
        head_dim=head_dim_of(config, 128),
        attention=biases(config, "attention_bias", False),
        max_positions=integer(config, "model_max_length", integer(config, "max_position_embeddings", 8192)),
        tied_head=flag(config, "tie_word_embeddings", True),
        norm=NormSpec("rms", number(config, "rms_norm_eps")) if own_norm else layer_norm(config, bias=False),
        norm_placement="parallel",
        ffn=ffns.__getitem__,
        logit_scale=positive(config, "logit_scale", 0.0625),
        scaled=HALF if takes_mean else (),
        names=NAMES,
    )


def _mixture(config: Config) -> tuple[bool, Experts]:
    """Whether the mean of the chosen and the shared experts is taken, and the mixture, whose weights are half then.
    Raises ModelError."""
    scores, inner = str(config.get("expert_selection_fn", "softmax")), integer(config, "intermediate_size")
    joins, shared = (
        str(config.get("shared_expert_combination_strategy", "average")),
        integer(config, "num_shared_experts", 0),
    )
    for key, value, known in (
        ("expert_selection_fn", scores, SCORES),
        ("shared_expert_combination_strategy", joins, ("average", "sum")),
    ):
        if value not in known:
            raise ModelError(f"the config's {key} must be {' or '.join(known)}, got {value!r:.80}")
    takes_mean = shared > 0 and joins == "average"
    # A softmax of the chosen experts' logits is the quotients of that of all: always normalised.
    renormalise = flag(config, "norm_topk_prob", True) or scores == "softmax"
    routing = Routing(
        integer(config, "num_experts_per_tok", 2),
        "softmax" if scores == "softmax" else "sigmoid",
        renormalise,
        scale=0.5 if takes_mean else 1.0,
    )
    return takes_mean, Experts(
        integer(config, "num_experts", 8),
        routing,
        inner,
        activation(config, "hidden_act", "silu"),
        shared_inner=inner * shared,
        shared_gate=False,
    )


def _positions(config: Config, routes: list[bool]) -> list[Positions]:
    """Of each layer. Raises ModelError."""
    prefix = integer(config, "prefix_dense_sliding_window_pattern", 1)
    pattern, first = integer(config, "sliding_window_pattern", 4), integer(config, "first_k_dense_replace", 0)
    default = every_nth_full(first, prefix, "prefix_dense_sliding_window_pattern")
    default += every_nth_full(len(routes) - first, pattern, "sliding_window_pattern")
    types = layer_types(config, len(routes), default)
    rotary = replace(rope(config, head_dim_of(config, 128), 10_000.0), interleaved=True)
    sliding = Positions(rotary, optional_integer(config, "sliding_window") or 4096)
    found = []
    for kind, is_sparse in zip(types, routes, strict=True):
        turns = not is_sparse and prefix == 1
        found.append(sliding if kind == "sliding_attention" else Positions(rotary if turns else None))
    return found


FAMILY = Family(
    ("Cohere2MoeForCausalLM",),
    build,
    ignored={
        **IGNORED,
        "prefix_dense_intermediate_size": "of dense layers, where there are any",
        "prefix_dense_sliding_window_pattern": "of dense layers, where there are any",
    },
    assumes=ASSUMES,
)
