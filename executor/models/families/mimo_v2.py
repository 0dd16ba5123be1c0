"""MiMo-V2-Flash and V2.5: sliding windows with attention sinks and twice the key/value heads, values that have fewer
dimensions than keys, and DeepSeek V3's mixtures.

Checkpoints of V2.5 may store queries, keys and values as one matrix: Q K V, or in fp8, which was divided among devices,
Q0 K0 V0 Q1 K1 V1 ... Of a multimodal one only the language model is read.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from headrace.executor.models.arch import ArchSpec, Fused, LayerSpec, WeightNames
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
    results_times,
    rope,
)
from headrace.ipc.failure import ModelError

NAMES = WeightNames(
    sinks="self_attn.attention_sink_bias",
    ignorable=(
        *WeightNames.ignorable,
        r"^model\.mtp\.",
        r"^(model\.)?visual\.",
        r"^(audio_encoder|speech_embeddings|audio_tokenizer)\.",
    ),
)
SLIDING_THETA, FULL_THETA = 10_000.0, 5_000_000.0


def build(config: Config) -> ArchSpec:
    if config["architectures"] == ["MiMoV2FlashForCausalLM"]:
        return _build(config)
    for own, key in (("hybrid_layer_pattern", "layer_types"), ("moe_layer_freq", "mlp_layer_types")):
        if config.get(own) is None and config.get(key) is None:
            raise ModelError(f"the config has no {own}, which has 0 or 1 for each layer")
    spec = _build(_defaults_of_v2_5(config) | config)
    return replace(spec, fused=tuple(_fused(spec, _chunks(config))))


def _build(config: Config) -> ArchSpec:
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
        scaled=results_times(scale or 1.0, "self_attn.v_proj"),
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


def _defaults_of_v2_5(config: Config) -> dict[str, Any]:
    """What its code has for fields that a file leaves out."""
    found = {"attention_value_scale": None, "add_swa_attention_sink_bias": False, "partial_rotary_factor": 1.0}
    if config.get("rope_parameters") is not None:
        return found
    theta = number(config, "rope_theta", 1_000_000.0)
    return {**found, "rope_theta": theta, "swa_rope_theta": theta}


def _chunks(config: Config) -> int:
    """In how many chunks fused matrices are stored. In fp8 it is the key/value heads of full attention, in layers with
    windows too."""
    stored = config.get("quantization_config")
    if not isinstance(stored, Mapping) or stored.get("quant_method") != "fp8":
        return 1
    for key in ("modules_to_not_convert", "ignored_layers"):
        if any("qkv_proj" in str(each) for each in stored.get(key) or ()):
            raise ModelError(f"the config's {key} names qkv_proj; its rows are known in fp8, or with no matrix in fp8")
    return integer(config, "num_key_value_heads")


def _fused(spec: ArchSpec, chunks: int) -> Iterator[Fused]:
    """Of each kind of layer."""
    for mixer in dict.fromkeys(layer.mixer for layer in spec.layers):
        assert isinstance(mixer, Attention), "as built"
        heads = {NAMES.query: mixer.num_heads, NAMES.key: mixer.num_kv_heads, NAMES.value: mixer.num_kv_heads}
        if any(count % chunks for count in heads.values()):
            counts = f"{mixer.num_heads} heads of queries and {mixer.num_kv_heads} of keys"
            raise ModelError(f"the config's num_key_value_heads is {chunks}, and does not divide {counts} of a layer")
        sizes = {NAMES.query: mixer.head_dim, NAMES.key: mixer.head_dim, NAMES.value: mixer.value_dim or mixer.head_dim}
        yield Fused(
            "self_attn.qkv_proj",
            tuple((name, count // chunks * sizes[name]) for name, count in heads.items()),
            chunks,
            layers=frozenset(index for index, layer in enumerate(spec.layers) if layer.mixer == mixer),
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
    ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM"),
    build,
    ignored={"attention_chunk_size": "windows have their own size", "hybrid_block_size": "the pattern says it"},
    assumes={"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
)
