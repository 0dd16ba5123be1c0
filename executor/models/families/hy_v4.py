"""HunYuan V4: DeepSeek V3.2's shape, with hyper-connections, gated attention with sinks, and experts whose gates have a
limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace.executor.models.arch import STACKED, ArchSpec
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.blocks.hyper_connections import HyperConnections
from headrace.executor.models.blocks.latent import LatentAttention
from headrace.executor.models.blocks.sparse_latent import SparseLatentAttention
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import corrected_routing, further_layers, integer, limited_silu, number
from headrace.executor.models.families._latent import deepseek
from headrace.executor.models.families.deepseek_v32 import from_the_first, indexer_types

RENAMED = (
    (r"\.hc_pre\.hc_", ".hc_"),
    (r"\.hc_attn_layer\.hc_(fn|base|scale)$", r".attn_hc.\1"),
    (r"\.hc_mlp_layer\.hc_(fn|base|scale)$", r".ffn_hc.\1"),
    (r"\.hc_head_(fn|base|scale)$", r".hc_\1"),
    (r"\.learnable_sink_param$", ".sinks"),
    (r"\.linear_gate\.", ".gate_proj."),
)
"""The published names, which transformers has others for; it saves some names that are neither."""
DEFAULTS = {"n_shared_experts": 1, "first_k_dense_replace": 1, "rope_interleave": False}


def build(config: Config) -> ArchSpec:
    config = DEFAULTS | config
    activation = limited_silu(config, "swiglu_limit")
    spec = deepseek(config, corrected_routing(config), correction=True)
    if config.get("indexer_types") is None:
        default = ["full" if index % 4 == 1 or not index else "shared" for index in range(spec.num_layers)]
        config = config | {"indexer_types": default}
    kinds = from_the_first(indexer_types(config, spec.num_layers))
    own: dict[str, Any] = {
        "num_chosen": integer(config, "index_topk", 2048),
        "index_heads": integer(config, "index_n_heads", 16),
        "index_dim": integer(config, "index_head_dim", 128),
        "index_eps": spec.norm.eps,
        "index_rotates_last": True,
        "sinks": True,
    }
    layers = []
    for kind, layer in zip(kinds, spec.layers, strict=True):
        plain, ffn = layer.mixer, layer.ffn
        assert isinstance(plain, LatentAttention)
        gated = replace(plain, gate="value")
        mixer = SparseLatentAttention(**vars(gated), index="halves" if kind == "full" else "none", **own)
        if isinstance(ffn, Experts):
            ffn = replace(ffn, activation=activation, shared_activation="silu")
        layers.append(replace(layer, mixer=mixer, ffn=ffn))
    names = further_layers(config)
    return replace(
        spec,
        layers=tuple(layers),
        stream=_stream(config, spec),
        stacked=STACKED,
        names=replace(
            names,
            query_gate="self_attn.gate_proj",
            renamed=RENAMED,
            ignorable=(*names.ignorable, r"^model\.mtp_layers\."),
        ),
    )


def _stream(config: Config, spec: ArchSpec) -> HyperConnections:
    eps = number(config, "hc_eps", 1e-6)
    return HyperConnections(
        hidden=spec.hidden_size,
        num_rows=integer(config, "hc_mult", 4),
        norm_eps=spec.norm.eps,
        eps=eps,
        magnitude=number(config, "hc_magnitude", 2.0),
        least=eps,
    )


FAMILY = Family(
    ("HYV4ForCausalLM",),
    build,
    ignored={
        "layer_types": "all layers attend by an index",
        "learnable_sink_init": "before training",
        "head_dim": "qk_rope_head_dim says it",
        "qk_head_dim": "the parts' sizes say it",
    },
    assumes={"hidden_act": ("silu",)},
)
