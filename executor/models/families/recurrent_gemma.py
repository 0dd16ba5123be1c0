"""RecurrentGemma (Griffin): gated linear recurrences, and in every third layer attention within a window."""

import struct
from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, LayerSpec, NormSpec, WeightNames
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.blocks.gated_lru import GatedLru
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    activation,
    flag,
    head_dim_of,
    integer,
    llama_like,
    number,
    rope,
)
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    final_norm="final_norm",
    attention_norm="temporal_pre_norm",
    mlp_norm="channel_pre_norm",
    query="temporal_block.q_proj",
    key="temporal_block.k_proj",
    value="temporal_block.v_proj",
    output="temporal_block.o_proj",
    gate="mlp_block.gate_proj",
    up="mlp_block.up_proj",
    down="mlp_block.down_proj",
)
KINDS = ("recurrent", "attention")


def build(config: Config) -> ArchSpec:
    config = {"partial_rotary_factor": 0.5} | config
    num_layers, head_dim = integer(config, "num_hidden_layers"), head_dim_of(config)
    heads, kind = integer(config, "num_attention_heads"), activation(config, "hidden_activation", "gelu_pytorch_tanh")
    width = integer(config, "lru_width", integer(config, "hidden_size"))
    if kind == "relu2":
        raise ModelError("the config's hidden_activation is relu2, which no gate of a linear recurrence computes")
    if heads < 1 or width % heads:
        raise ModelError(f"the config's lru_width is {width}, which {heads} heads cannot divide evenly")
    recurrent = GatedLru(
        heads=heads,
        head_dim=width // heads,
        conv_width=integer(config, "conv1d_width", 4),
        activation=kind,
    )
    local = Positions(rope(config, head_dim, 10000.0), integer(config, "attention_window_size", 2048))
    spec = llama_like(
        config,
        positions=[local] * num_layers,
        head_dim=head_dim,
        attention={"bias": flag(config, "attention_bias", False), "output_bias": True},
        ffn=Dense(integer(config, "intermediate_size") // 2, kind, bias=True),
        default_context=8192,
        tied_head=True,
        norm=NormSpec("rms", number(config, "rms_norm_eps", 1e-6), weight_offset=1.0),
        embedding_scale=_bfloat16(integer(config, "hidden_size") ** 0.5),
        scales_given=True,
        final_soft_cap=number(config, "logits_soft_cap", 30.0),
        names=NAMES,
    )
    blocks = _blocks(config)
    layers: list[LayerSpec] = [
        replace(layer, mixer=recurrent) if blocks[index % len(blocks)] == "recurrent" else layer
        for index, layer in enumerate(spec.layers)
    ]
    return replace(spec, layers=tuple(layers))


def _blocks(config: Config) -> list[str]:
    """The kinds of layers, which are repeated."""
    given = config.get("block_types") or ["recurrent", "recurrent", "attention"]
    if not isinstance(given, list) or set(map(str, given)) - set(KINDS):
        raise ModelError(f"the config's block_types must list {' and '.join(KINDS)}, got {given!r:.80}")
    return [str(each) for each in given]


def _bfloat16(value: float) -> float:
    """The value as the checkpoint's code rounds it."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    (rounded,) = struct.unpack("<f", struct.pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))
    return float(rounded)


FAMILY = Family(
    ("RecurrentGemmaForCausalLM",),
    build,
    ignored={
        "w_init_variance_scale": "training alone",
        "final_w_init_variance_scale": "training alone",
        "_block_types": "block_types say it",
        "layers_block_type": "block_types say it",
    },
    assumes={"embeddings_scale_by_sqrt_dim": (True,)},
)
