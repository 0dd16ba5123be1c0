"""MiMo-V2-Flash: sliding windows with attention sinks and twice the key/value heads, values that have fewer dimensions
than keys, and DeepSeek V3's mixtures."""

from dataclasses import replace
from typing import Any

from headrace.executor.models.arch import ArchSpec, LayerSpec, WeightNames
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.families import Config, Family, NotNativeError
from headrace.executor.models.families._config import (
    corrected_routing,
    flag,
    integer,
    layer_types,
    llama_like,
    mixture_after_dense,
    number,
    optional_integer,
    optional_number,
    require_whole_sections,
    rope,
)
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    sinks="self_attn.attention_sink_bias",
    ignorable=(*WeightNames.ignorable, r"^model\.mtp\."),
)
SLIDING_THETA, FULL_THETA = 10_000.0, 5_000_000.0


def build(config: Config) -> ArchSpec:
    defaults = {"head_dim": 192, "v_head_dim": 128, "sliding_window": 129, "num_key_value_heads": 4}
    config = {**defaults, "partial_rotary_factor": 0.334, "rms_norm_eps": 1e-5} | config.renamed(
        rms_norm_eps="layernorm_epsilon"
    )
    config = config | _window(config)
    config = config | _listed(config, "mlp_layer_types", "moe_layer_freq", ("dense", "sparse"))
    config = config | _listed(config, "layer_types", "hybrid_layer_pattern", ("full_attention", "sliding_attention"))
    num_layers = integer(config, "num_hidden_layers")
    default = ["full_attention" if i == 0 or not (i + 1) % 6 else "sliding_attention" for i in range(num_layers)]
    types = layer_types(config, num_layers, default)
    if "sliding_attention" not in types:
        config.pass_over("sliding_window", "swa_", "add_swa_")
    require_whole_sections(config, list(dict.fromkeys(types)), "rope_theta", "partial_rotary_factor")
    mixers = {kind: _attention(config, kind) for kind in dict.fromkeys(types)}
    scale = optional_number(config, "attention_value_scale") if "attention_value_scale" in config else 0.707
    spec = llama_like(
        config | {"rope_parameters": None, "rope_scaling": None, "rope_theta": None},
        ffn=mixture_after_dense(config, corrected_routing(config), default_dense=1),
        names=NAMES,
        scaled=tuple((f"self_attn.v_proj.{kind}", scale or 1.0) for kind in ("weight", "bias")),
    )
    layers = (LayerSpec(mixers[kind], layer.ffn) for kind, layer in zip(types, spec.layers, strict=True))
    return replace(spec, layers=tuple(layers))


def _attention(config: Config, kind: str) -> Attention:
    slides, head_dim = kind == "sliding_attention", integer(config, "head_dim")
    for key in ("num_attention_heads", "head_dim", "v_head_dim"):
        if integer(config, f"swa_{key}", integer(config, key)) != integer(config, key):
            raise NotNativeError(f"the config's swa_{key} differs from its {key}, which is not supported")
    kv_heads = integer(config, "num_key_value_heads")
    theta = FULL_THETA
    if slides:
        kv_heads = integer(config, "swa_num_key_value_heads", 2 * kv_heads)
        theta = number(config, "swa_rope_theta", SLIDING_THETA)
    own = config | {"rope_theta": None} if slides else config
    key, has_sinks = ("add_swa_attention_sink_bias", True) if slides else ("add_full_attention_sink_bias", False)
    return Attention(
        num_heads=integer(config, "num_attention_heads"),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=integer(config, "v_head_dim"),
        scale=head_dim**-0.5,
        rope=rope(own, head_dim, theta, kind),
        sliding_window=integer(config, "sliding_window") if slides else None,
        bias=flag(config, "attention_bias", False),
        sinks=flag(config, key, has_sinks),
    )


def _window(config: Config) -> dict[str, int]:
    """The sliding window from the published `sliding_window_size`, the tokens before a token, to which it adds the
    token itself. Publishers have the size under the window's name too, and transformers saves the window there."""
    if (size := optional_integer(config, "sliding_window_size")) is None:
        return {}
    window = integer(config, "sliding_window") if config.stores("sliding_window") else size
    if window not in (size, size + 1):
        raise ModelError(f"the config's sliding_window is {window} and its sliding_window_size {size}")
    return {"sliding_window": size + 1}


def _listed(config: Config, key: str, own: str, words: tuple[str, str]) -> dict[str, Any]:
    """The field `key` from a list of 0 and 1 per layer under the published name `own`, which is read no more; empty if
    there is none."""
    given = config.get(own)
    if given is None or (config.get(key) is not None and not isinstance(given, list)):
        return {}
    if not isinstance(given, list) or not all(isinstance(each, int) and each in (0, 1) for each in given):
        raise ModelError(f"the config's {own} must have 0 or 1 for each layer, got {given!r:.80}")
    listed = [words[each] for each in given]
    if config.get(key) not in (None, listed):
        raise ModelError(f"the config's {key} and {own} contradict each other")
    return {key: listed, own: None}


FAMILY = Family(
    ("MiMoV2FlashForCausalLM",),
    build,
    ignored={"attention_chunk_size": "windows have their own size", "hybrid_block_size": "the pattern says it"},
    assumes={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
)
