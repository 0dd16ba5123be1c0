"""LFM2: gated short convolutions, and attention in some of the layers."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace.executor.models.arch import ArchSpec, NormSpec, WeightNames
from headrace.executor.models.blocks import Ffn
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.blocks.short_convolution import ShortConv
from headrace.executor.models.families import Config, Family
from headrace.executor.models.families._config import (
    Positions,
    flag,
    head_dim_of,
    integer,
    llama_like,
    number,
    positive,
    rope,
)
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    final_norm="embedding_norm",
    output="self_attn.out_proj",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    router="feed_forward.gate",
    router_correction="feed_forward.expert_bias",
    experts="feed_forward.experts",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
)
IGNORED = {
    "block_mlp_init_scale": "training alone",
    "block_out_init_scale": "training alone",
    "block_use_xavier_init": "training alone",
    "conv_use_xavier_init": "training alone",
    "theta": "rope_theta has it",
}
ASSUMES = {"block_use_swiglu": (True,), "use_pos_enc": (True,)}


def layer_kinds(config: Config) -> list[str]:
    """conv or full_attention for each layer: `layer_types`, else attention where `full_attn_idxs` says so, else in all.
    Raises ModelError, also if the two contradict each other."""
    count, given, places = integer(config, "num_hidden_layers"), config.get("layer_types"), config.get("full_attn_idxs")
    listed = None
    if places is not None:
        if not isinstance(places, list) or not all(type(each) is int and 0 <= each < count for each in places):
            raise ModelError(f"the config's full_attn_idxs must list layers below {count}, got {places!r:.80}")
        listed = ["full_attention" if index in places else "conv" for index in range(count)]
    if given is None:
        return listed or ["full_attention"] * count
    if not isinstance(given, list) or set(map(str, given)) - {"conv", "full_attention"}:
        raise ModelError(f"the config's layer_types must be a list of conv and full_attention, got {given!r:.200}")
    if len(given) < count:
        raise ModelError(f"the config has {count} layers but {len(given)} layer_types")
    if listed not in (None, given[:count]):
        raise ModelError(f"the config's layer_types have attention in other layers than full_attn_idxs, {places!r:.80}")
    return given[:count]


def lfm2_like(config: Config, ffn: Callable[[int], Ffn], kinds: Sequence[str]) -> ArchSpec:
    """LFM2's mixers around an FFN by layer index."""
    hidden, head_dim = integer(config, "hidden_size"), head_dim_of(config)
    norm, tied = number(config, "norm_eps", 1e-5), flag(config, "tie_word_embeddings", True)
    spec = llama_like(
        config,
        positions=[Positions(rope(config, head_dim, 1e6))] * len(kinds),
        head_dim=head_dim,
        attention={"qk_norm": "head"},
        ffn=ffn,
        default_context=128000,
        tied_head=True,
        norm=NormSpec("rms", norm),
        names=NAMES,
        fused=(ShortConv.fused(hidden),),
    )
    conv = ShortConv(channels=hidden, width=integer(config, "conv_L_cache", 3), bias=flag(config, "conv_bias", False))
    layers = [
        layer if kind == "full_attention" else replace(layer, mixer=conv)
        for kind, layer in zip(kinds, spec.layers, strict=True)
    ]
    return replace(spec, layers=tuple(layers), tied_head=flag(config, "tie_embedding", tied))


def _inner(config: Config) -> int:
    """The FFN's inner size: two thirds of the config's, times a multiplier, in whole multiples, unless that is off."""
    inner = integer(config, "block_ff_dim", integer(config, "intermediate_size", 12288))
    multiplier = positive(config, "block_ffn_dim_multiplier", 1.0)
    step = integer(config, "block_multiple_of", 256)
    if not flag(config, "block_auto_adjust_ff_dim", True):
        return inner
    if step < 1:
        raise ModelError(f"the config's block_multiple_of must be at least 1, got {step}")
    return -(-int(multiplier * int(2 * inner / 3)) // step) * step


def build(config: Config) -> ArchSpec:
    ffn = Dense(_inner(config), "silu")
    return lfm2_like(config, lambda _: ffn, layer_kinds(config))


FAMILY = Family(("Lfm2ForCausalLM",), build, ignored=IGNORED, assumes=ASSUMES)
