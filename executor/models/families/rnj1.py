"""RNJ 1 with attention in chunks: Gemma 3's shape, in whose layers of chunks a token attends to its chunk, of half the
window's tokens, and to the one before it."""

from collections.abc import Sequence
from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, NormSpec, WeightNames
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    biases,
    dense,
    integer,
    llama_like,
    number,
    optional_number,
    rope,
)
from headrace.ipc.failure import ModelError

NAMES = WeightNames(mlp_norm="pre_feedforward_layernorm")
KINDS = ("full_attention", "chunked_attention")
THETA = 10_000.0


def build(config: Config) -> ArchSpec:
    head_dim = integer(config, "head_dim", 256)
    types = _layer_types(config, integer(config, "num_hidden_layers"))
    ropes = {kind: rope(config, head_dim, THETA, kind) for kind in types}
    spec = llama_like(
        config,
        positions=[Positions(ropes[kind]) for kind in types],
        head_dim=head_dim,
        tied_head=True,
        max_positions=integer(config, "max_position_embeddings", 131_072),
        norm=NormSpec("rms", number(config, "rms_norm_eps", 1e-6), weight_offset=1.0),
        norm_placement="sandwich",
        attention={
            "scale": number(config, "query_pre_attn_scalar", 256) ** -0.5,
            "qk_norm": "head",
            **biases(config, "attention_bias", False),
        },
        ffn=dense(config, "hidden_activation", "gelu_pytorch_tanh"),
        final_soft_cap=optional_number(config, "final_logit_softcapping"),
        embedding_scale=integer(config, "hidden_size") ** 0.5,
        names=NAMES,
    )
    size = _chunk_size(config) if "chunked_attention" in types else 0
    layers = []
    for kind, layer in zip(types, spec.layers, strict=True):
        mixer = layer.mixer
        assert isinstance(mixer, Attention)
        if kind == "chunked_attention":
            mixer = replace(mixer, sliding_window=2 * size, chunk_size=size, chunks_before=1)
        layers.append(replace(layer, mixer=mixer))
    return replace(spec, layers=tuple(layers))


def _chunk_size(config: Config) -> int:
    window = integer(config, "sliding_window", 4096)
    if window < 2:
        raise ModelError(f"the config's sliding_window must be at least 2, two chunks of a token, got {window}")
    return window // 2


def _layer_types(config: Config, count: int) -> Sequence[str]:
    found = config.get("layer_types")
    if not isinstance(found, list) or len(found) < count or set(map(str, found)) - set(KINDS):
        raise ModelError(
            f"the config's layer_types must list {' or '.join(KINDS)} for each of {count} layers, got {found!r:.80}"
        )
    return found[:count]


FAMILY = Family(
    ("Rnj1ForCausalLM",),
    build,
    ignored={"sliding_window": "no layer has chunks"},
    assumes={"attn_logit_softcapping": (), "use_bidirectional_attention": (False,)},
)
