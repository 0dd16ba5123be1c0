"""Reads Hugging Face configs for families: typed fields, rotary parameters old and new, layers, Llama-like models."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from headrace.executor.models.arch import ArchSpec, LayerSpec, NormSpec, RopeKind, RopeSpec, WeightNames
from headrace.executor.models.blocks import Ffn, Routing
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.blocks.dense import Activation, Dense, NamedActivation
from headrace.executor.models.blocks.experts import Experts
from headrace.executor.models.families import Config, NotNativeError
from headrace.ipc.failure import ModelError
from headrace.kernels.expert_groups import ExpertGroups

logger = logging.getLogger(__name__)
ACTIVATIONS: dict[str, NamedActivation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}
TELECHAT3 = "telechat3-yarn"
ROPE_KINDS: dict[str, RopeKind] = {
    "default": "default",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "deepseek_yarn": "yarn",
    TELECHAT3: "yarn",
    "longrope": "longrope",
    "su": "longrope",
    "proportional": "proportional",
}


LARGEST = 2**31 - 1
"""The largest int32, which kernels count with."""
LARGEST_FLOAT = 3.4028234663852886e38
"""The largest float32, which kernels compute with."""
SMALLEST_FLOAT = 1e-45
"""Above 0, likewise."""
MAY_BE_NEGATIVE = {"moe_layer_end_index": -1}
"""Fields of whole numbers that may be below 0, with their least values: -1 is the last layer."""
MOST = {
    **dict.fromkeys(("num_hidden_layers", "num_local_experts", "num_experts", "n_routed_experts"), 4096),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 65536),
}
"""Limits of fields for which a loop runs or an object is made per unit, so that a damaged or malicious config cannot
keep the engine busy without end."""


def integer(config: Config, key: str, default: int | None = None) -> int:
    """A whole number; null counts as missing. Raises ModelError."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"the config's {_spelt(config, key)} must be a whole number, got {_shown(config, key)}")
    if value < MAY_BE_NEGATIVE.get(key, 0) and config.get(key) is not None:
        raise ModelError(f"the config's {_spelt(config, key)} must not be negative, got {_shown(config, key)}")
    most = MOST.get(key, LARGEST)
    if abs(value) > most:
        said = f"the config's {_spelt(config, key)} is {_shown(config, key)}"
        raise ModelError(f"{said}; at most {most:,} can be computed with")
    return value


def number(config: Config, key: str, default: float | None = None) -> float:
    """A number that float32 can hold; null counts as missing. Raises ModelError."""
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise ModelError(f"the config's {_spelt(config, key)} must be a number, got {_shown(config, key)}")
    if abs(value) > LARGEST_FLOAT or 0 < abs(value) < SMALLEST_FLOAT:
        allowed = f"at most {LARGEST_FLOAT:.4g}" if abs(value) > 1 else f"0, or at least {SMALLEST_FLOAT:g},"
        raise ModelError(f"the config's {_spelt(config, key)} is {_shown(config, key)}; {allowed} can be computed with")
    return float(value)


def positive(config: Config, key: str, default: float | None = None) -> float:
    value = number(config, key, default)
    if value <= 0:
        raise ModelError(f"the config's {_spelt(config, key)} must be positive, got {_shown(config, key)}")
    return value


def optional_number(config: Config, key: str) -> float | None:
    return None if config.get(key) is None else number(config, key)


def one_of(config: Config, key: str, *names: str) -> str:
    """One of these names; the first if the field is missing or null. Raises ModelError."""
    name = names[0] if config.get(key) is None else config[key]
    if name not in names:
        raise ModelError(f"the config's {_spelt(config, key)} is {name!r:.80}; supported are {' and '.join(names)}")
    return str(name)


def optional_integer(config: Config, key: str) -> int | None:
    return None if config.get(key) is None else integer(config, key)


def flag(config: Config, key: str, default: bool) -> bool:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ModelError(f"the config's {_spelt(config, key)} must be true or false, got {_shown(config, key)}")
    return value


def activation(config: Config, key: str, default: str) -> NamedActivation:
    name = default if config.get(key) is None else config[key]
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ModelError(f"the config's {_spelt(config, key)} is {name!r}; supported are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def results_times(factor: float, *names: str) -> tuple[tuple[str, float], ...]:
    """Of `ArchSpec.scaled`: what multiplies the results of these matrices, also those that adapters add to them."""
    return tuple((f"{name}.{kind}", factor) for name in names for kind in ("weight", "bias") if factor != 1)


def limited_silu(config: Config, key: str) -> Activation:
    """silu of gates of at most the limit that the key gives, 10 where it is missing, which is the largest magnitude of
    what they are multiplied with too. Raises NotNativeError for other limits."""
    if (limit := number(config, key, 10.0)) != 10:
        raise NotNativeError(f"the config's {_spelt(config, key)} is {limit:g}; gates can have a limit of 10")
    return "silu_below_10"


def _shown(config: Config, key: str) -> str:
    return repr(config[key]) if config.get(key) is not None else "nothing"


def _spelt(config: Config, key: str) -> str:
    """The field's name in the config file, for error messages; both possible names if the file has neither."""
    own = config.own_names.get(key)
    if own is None or (config.get(own) is None and config.get(key) is not None):
        return key
    return own if config.get(own) is not None else f"{own} (or {key})"


def with_rotary_dim(config: Config, head_dim: int, default: int | None = None) -> Config:
    """The config with the share of a head that is rotated, where `rotary_dim` has its dimensions. default: of a config
    that has none; None: it stays as it is.

    Raises ModelError if the config has the share, too, and that is of other dimensions; it may be rounded.
    """
    rotated = optional_integer(config, "rotary_dim")
    if rotated is None:
        rotated = default
    if rotated is None:
        return config
    for place in (config, rope_section(config)):
        if not place.stores("partial_rotary_factor"):
            continue
        share = number(place, "partial_rotary_factor")
        # That of the section is the one which is computed with.
        if abs(share * head_dim - rotated) >= 1 or (place is not config and int(head_dim * share) != rotated):
            raise ModelError(
                f"the config's rotary_dim is {rotated} of a head's {head_dim}, and its partial_rotary_factor {share}; "
                "they say the same thing"
            )
    share = rotated / head_dim
    return config | {"partial_rotary_factor": share if int(head_dim * share) == rotated else math.nextafter(share, 2)}


def rope(config: Config, head_dim: int, default_theta: float, layer_type: str | None = None) -> RopeSpec:
    """The rotary parameters; those of `layer_type` if the config has them per type.

    Reads `rope_parameters` (transformers 5) as well as `rope_theta` and `rope_scaling` (before). Raises ModelError.
    """
    given = rope_section(config)
    if layer_type is not None and layer_type in given:
        given.pass_over("full_attention", "sliding_attention")  # of a type that no layer has, too
        given = given.section(layer_type)
    theta = _of_rope(config, given, "rope_theta", default_theta)
    rotary_dim = int(head_dim * _of_rope(config, given, "partial_rotary_factor", 1.0))
    kind = _rope_kind(given)
    if kind == "default":
        return RopeSpec(theta, rotary_dim)
    if kind == "linear":
        return RopeSpec(theta, rotary_dim, kind, factor=_factor(given))
    if kind == "proportional":
        return RopeSpec(theta, head_dim, kind, factor=_factor(given, 1.0), turned_dim=rotary_dim // 2 * 2)
    max_positions = integer(config, "max_position_embeddings")
    if kind == "longrope":
        return _longrope(config, given, theta, rotary_dim)
    if kind == "dynamic":
        return RopeSpec(theta, rotary_dim, kind, _factor(given), original_max_positions=max_positions)
    original = integer(config, "original_max_position_embeddings", -1)
    if original < 0:
        original = integer(given, "original_max_position_embeddings", max_positions)
    if kind == "llama3":
        return RopeSpec(
            theta,
            rotary_dim,
            kind,
            _factor(given),
            original,
            low_freq_factor=number(given, "low_freq_factor"),
            high_freq_factor=number(given, "high_freq_factor"),
        )
    factor = _factor(given, max_positions / max(original, 1) if original != max_positions else None)
    return RopeSpec(
        theta,
        rotary_dim,
        kind,
        factor,
        original,
        attention_factor=_yarn_attention_factor(given, factor),
        beta_fast=positive(given, "beta_fast", 32.0),
        beta_slow=positive(given, "beta_slow", 1.0),
        truncate=flag(given, "truncate", True),
    )


def rope_section(config: Config) -> Config:
    """The config's rotary parameters; `rope_scaling` takes precedence over `rope_parameters`."""
    return config.section("rope_scaling") or config.section("rope_parameters")


def require_whole_sections(config: Config, kinds: Sequence[str], *keys: str) -> None:
    """Refuses rotary parameters that are not a section for each of these kinds of layers, with these keys, unless there
    are none: for families whose class in transformers has defaults for all sections together, and for no key of one.
    Raises ModelError."""
    given = rope_section(config)
    if not given or (given.keys() <= {"rope_type", "type"} and _rope_kind(given) == "default"):
        return
    for kind in kinds:
        section = given.section(kind)
        if lacking := [key for key in keys if section.get(key) is None]:
            raise ModelError(
                f"the config's rope parameters must have a section {kind} with {' and '.join(keys)}; it lacks "
                f"{' and '.join(lacking)}, for which there is no default"
            )


def _of_rope(config: Config, given: Config, key: str, default: float) -> float:
    """A rotary parameter that stands in the section or beside it. Raises ModelError if the two differ."""
    if given.get(key) is None:
        return number(config, key, default)
    value = number(given, key)
    if config.stores(key) and number(config, key) != value:
        raise ModelError(f"the config's {key} is {config[key]!r}, and {value} as a rope parameter; it is one field")
    return value


def _rope_kind(given: Config) -> RopeKind:
    named = [given[key] for key in ("rope_type", "type") if given.get(key) is not None] or ["default"]
    for each in named:
        if not isinstance(each, str) or each not in ROPE_KINDS:
            raise ModelError(f"rope scaling of type {each!r:.80} is not supported; known: {', '.join(ROPE_KINDS)}")
    kinds = [ROPE_KINDS[each] for each in named]
    if kinds[0] != kinds[-1]:
        raise ModelError(f"the config's rope_type is {named[0]!r} and its type {named[-1]!r}; it is one field")
    return kinds[0]


def _factor(given: Config, default: float | None = None) -> float:
    """The factor by which contexts are extended. Raises ModelError."""
    factor = positive(given, "factor", default)
    if factor > LARGEST:
        raise ModelError(f"the config's rope factor is {factor!r}; at most {LARGEST:,} can be computed with")
    return factor


def _longrope(config: Config, given: Config, theta: float, rotary_dim: int) -> RopeSpec:
    """LongRoPE (Ding et al. 2024): each frequency has its own divisor, and another one for long contexts."""
    max_positions = integer(config, "max_position_embeddings")
    original = integer(given, "original_max_position_embeddings", -1)
    if original < 1:
        original = integer(config, "original_max_position_embeddings", max_positions)
    short, long = given.get("short_factor"), given.get("long_factor")
    for key, factors in (("short_factor", short), ("long_factor", long)):
        if not isinstance(factors, list) or not all(isinstance(each, int | float) for each in factors):
            raise ModelError(f"the rope parameter {key} must be a list of numbers, got {factors!r}")
    assert isinstance(short, list)
    assert isinstance(long, list)
    factor = _factor(given, max_positions / max(original, 1))
    attention_factor = optional_number(given, "attention_factor")
    if attention_factor is None:
        attention_factor = longrope_attention_factor(factor, original)
    return RopeSpec(
        theta,
        rotary_dim,
        "longrope",
        factor,
        original,
        attention_factor=attention_factor,
        divisors=tuple(map(float, short)),
        long_divisors=tuple(map(float, long)),
    )


def longrope_attention_factor(factor: float, original: int) -> float:
    """LongRoPE's default factor of cos and sin. original: the context before scaling, in tokens."""
    if original < 2:
        raise ModelError(f"longrope needs the original context's length, got {original}")
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def _yarn_attention_factor(given: Config, factor: float) -> float:
    """YaRN's temperature (Peng et al. 2023, eq. 22), or the quotient of two if the config has mscale and
    mscale_all_dim."""
    scale, scale_all = optional_number(given, "mscale"), optional_number(given, "mscale_all_dim")
    named = optional_number(given, "attention_factor")
    if TELECHAT3 in (given.get("rope_type"), given.get("type")):
        return 0.07 * math.log(factor) + 1.0
    if named is not None:
        return named

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    return magnitude(scale) / magnitude(scale_all) if scale and scale_all else magnitude(1.0)


def scaled_context(config: Config, rotary: RopeSpec, default: int) -> int:
    """The longest context, in tokens, that the rope scaling supports. Raises ModelError if it is too long."""
    max_positions = integer(config, "max_position_embeddings", default)
    if dual := config.section("dual_chunk_attention_config"):
        max_positions = min(max_positions, _first_chunk(dual, max_positions))
    if rotary.kind in ("linear", "dynamic"):
        longest = max_positions * rotary.factor
    elif rotary.kind == "yarn":
        longest = rotary.original_max_positions * rotary.factor
    else:
        return max_positions
    if longest > LARGEST:
        raise ModelError(
            f"the config's rope factor {rotary.factor:g} makes a context of {longest:.3g} tokens; at most {LARGEST:,} "
            "can be computed with"
        )
    return int(longest)


def _first_chunk(dual: Config, whole: int) -> int:
    """The context in which dual chunk attention (An et al. 2024) attends as full attention does: the first chunk.
    Its sparse attention approximates that."""
    for key in dual:
        if key.startswith("sparse_attention_"):
            dual.get(key)
    first = integer(dual, "chunk_size", 8192) - integer(dual, "local_size", 1024)
    if first < 1:
        raise ModelError(
            f"the config's dual_chunk_attention_config has chunks of {first} tokens besides the local ones"
        )
    if first < whole:
        _tell_of_chunks(first, whole)
    return first


@cache
def _tell_of_chunks(first: int, whole: int) -> None:
    logger.warning(
        "the config says %d tokens with dual chunk attention, which is not supported: contexts end at its first %d, in "
        "which it is full attention",
        whole,
        first,
    )


def layer_types(config: Config, num_layers: int, default: Sequence[str]) -> list[str]:
    """full_attention or sliding_attention for each layer: the config's `layer_types`, else the default. Raises
    ModelError for other types or too few."""
    given = config.get("layer_types")
    types = list(default) if given is None else given
    if not isinstance(types, list | tuple):
        raise ModelError(f"the config's layer_types must be a list of types of layers, got {given!r:.80}")
    if unknown := sorted(set(map(str, types)) - {"full_attention", "sliding_attention"}):
        raise ModelError(f"layer types {', '.join(unknown)} are not supported, only full and sliding attention are")
    if len(types) < num_layers:
        raise ModelError(f"the config has {num_layers} layers but {len(types)} layer_types")
    return list(types[:num_layers])


def every_nth_full(num_layers: int, step: int, key: str) -> list[str]:
    """The types of layers of which each `step`th has full attention and the others a window. key: the config's name of
    the step. Raises ModelError."""
    if step < 1:
        raise ModelError(f"the config's {key} must be at least 1, got {step}")
    return ["sliding_attention" if (index + 1) % step else "full_attention" for index in range(num_layers)]


def layer_configs(config: Config, count: int, *keys: str) -> list[Config]:
    """The config as each layer has it, where its `per_layer_config` has other values of these keys for some. Raises
    ModelError."""
    found, given = [config] * count, config.section("per_layer_config")
    for name in given:
        own = given.section(name)
        if not name.isdecimal() or int(name) >= count or (others := set(own) - set(keys)):
            said = ", ".join(sorted(others)) if name.isdecimal() and int(name) < count else "no layer"
            raise ModelError(f"the config's per_layer_config has {said} at {name!r:.80}; known: {', '.join(keys)}")
        found[int(name)] = config | dict(own)
    return found


def listed_layers(config: Config, key: str, default: Iterable[int]) -> frozenset[int]:
    """Indices of layers, which the field has as a list or as text between commas. Raises ModelError."""
    listed = config.get(key)
    if listed is None:
        return frozenset(default)
    parts = listed.split(",") if isinstance(listed, str) else listed
    if not isinstance(parts, list) or not all(str(each).strip().isdecimal() for each in parts if str(each).strip()):
        raise ModelError(f"the config's {key} must be a list of layers, got {listed!r:.80}")
    return frozenset(int(each) for each in parts if str(each).strip())


def text_part(config: Config) -> Config:
    """The config of a multimodal checkpoint's language model; the config itself if it is that. Whether the head is tied
    is said outside of the section, as transformers reads it, or inside."""
    text = config.section("text_config")
    if not text:
        return config
    outside = {key: config[key] for key in ("tie_word_embeddings",) if config.stores(key)}
    flag(text, "tie_word_embeddings", False)  # checked, and so read, also where it does not decide
    return text | outside | {"architectures": config["architectures"]}


def biases(config: Config, key: str, default: bool) -> dict[str, bool]:
    """The bias fields of `Attention`, for a family whose projections all have biases or none does; `attention_out_bias`
    says otherwise of the output's, as GGUF files can have it."""
    bias = flag(config, key, default)
    return {"bias": bias, "output_bias": flag(config, "attention_out_bias", bias)}


def layer_norm(config: Config, key: str = "layer_norm_eps", *, default: float = 1e-5, **fields: Any) -> NormSpec:
    return NormSpec("layer", number(config, key, default), **fields)


def plain(config: Config, inner: int, key: str, default: str, *, bias: bool = True) -> Dense:
    """An FFN without a gate; `key` names its activation."""
    return Dense(inner, activation(config, key, default), gated=False, bias=bias)


def rotated_layers(config: Config, default: Sequence[bool]) -> list[bool]:
    """Whether each layer has rotary positions: the config's `no_rope_layers`, which has 1 for those that have, else
    the default. Raises ModelError."""
    found = config.get("no_rope_layers") or list(default)
    if not isinstance(found, list) or len(found) < len(default):
        raise ModelError(f"the config's no_rope_layers must list all {len(default)} layers, got {found!r}")
    if not all(isinstance(each, int) and each in (0, 1) for each in found):
        raise ModelError(f"the config's no_rope_layers must have 0 or 1 for each layer, got {found!r}")
    return [bool(each) for each in found[: len(default)]]


class Positions(NamedTuple):
    """A layer's rotation and sliding window."""

    rope: RopeSpec | None
    sliding_window: int | None = None


def alibi_slopes(num_heads: int, scale: float = 1.0) -> tuple[float, ...]:
    """ALiBi's slopes (Press et al. 2022), times scale: powers of 2^(-8 / num_heads). If num_heads is no power of two,
    they are those of the power of two below it, then every other one of the power above it."""
    size = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-8 * index / size) * scale for index in range(1, size + 1)]
    return tuple(slopes if size == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])


def by_type(types: Sequence[str], rotary: RopeSpec, window: int | None) -> list[Positions]:
    """Positions of layers with one rope; those of type sliding_attention have the window."""
    return [Positions(rotary, window if kind == "sliding_attention" else None) for kind in types]


def head_dim_of(config: Config, default: int | None = None) -> int:
    """The config's head_dim; without it the default, or hidden_size / num_attention_heads."""
    if default is None:
        num_heads = integer(config, "num_attention_heads")
        if num_heads < 1:
            raise ModelError(f"the config's num_attention_heads must be at least 1, got {num_heads}")
        default = integer(config, "hidden_size") // num_heads
    head_dim = integer(config, "head_dim", default)
    if head_dim < 1:
        raise ModelError(
            f"the config's head_dim, or hidden_size / num_attention_heads, must be at least 1, got {head_dim}"
        )
    return head_dim


def used_window(config: Config) -> int | None:
    """The sliding window, if the config's `use_sliding_window` says that it is used."""
    window = 4096 if "sliding_window" not in config else optional_integer(config, "sliding_window")
    return window if flag(config, "use_sliding_window", False) else None


def qwen_positions(config: Config, rotary: RopeSpec) -> list[Positions]:
    """Qwen 2 and 3: if `use_sliding_window`, layers from `max_window_layers` on have sliding windows."""
    num_layers = integer(config, "num_hidden_layers")
    window = used_window(config)
    first = integer(config, "max_window_layers", 28)
    default = ["sliding_attention" if window and i >= first else "full_attention" for i in range(num_layers)]
    return by_type(layer_types(config, num_layers, default), rotary, window)


def qwen_moe_positions(config: Config, rotary: RopeSpec) -> list[Positions]:
    """Qwen 2 with experts: if `use_sliding_window`, every other one of the first `max_window_layers` layers has a
    sliding window."""
    num_layers = integer(config, "num_hidden_layers")
    window = used_window(config)
    first = integer(config, "max_window_layers", 28)
    default = [
        "sliding_attention" if window and i % 2 == 0 and i < first else "full_attention" for i in range(num_layers)
    ]
    return by_type(layer_types(config, num_layers, default), rotary, window)


def dense(config: Config, key: str = "hidden_act", default: str = "silu", *, bias: bool = False) -> Dense:
    """A gated FFN of the config's intermediate_size; `key` names its activation."""
    return Dense(integer(config, "intermediate_size"), activation(config, key, default), bias=bias)


def experts(config: Config, inner: int, *, renormalise: bool, shared_inner: int = 0) -> Experts:
    """Experts with softmax routing; their number is the config's num_experts or num_local_experts."""
    key = "num_local_experts" if config.get("num_experts") is None else "num_experts"
    routing = Routing(integer(config, "num_experts_per_tok"), "softmax", renormalise)
    return Experts(integer(config, key), routing, inner, activation(config, "hidden_act", "silu"), shared_inner)


def corrected_routing(config: Config) -> Routing:
    """DeepSeek V3's routing: sigmoid scores; groups of experts are chosen by the sum of their two best scores."""
    num_groups = integer(config, "n_group", 1)
    return Routing(
        integer(config, "num_experts_per_tok"),
        "sigmoid",
        renormalise=flag(config, "norm_topk_prob", True),
        scale=number(config, "routed_scaling_factor", 1.0),
        groups=ExpertGroups(num_groups, integer(config, "topk_group", 1), best=2 if num_groups > 1 else 1),
    )


def mixture_after_dense(
    config: Config,
    routing: Routing,
    *,
    correction: bool = True,
    default_dense: int = 0,
    shared_inner: int | None = None,
) -> Callable[[int], Ffn]:
    """DeepSeek's FFNs by layer index: first some dense layers, then mixtures with shared experts; or as
    `mlp_layer_types` says. shared_inner: of all shared experts together; None: each is of a routed one's size."""
    inner = integer(config, "moe_intermediate_size")
    mixture = Experts(
        integer(config, "n_routed_experts"),
        routing,
        inner,
        activation(config, "hidden_act", "silu"),
        shared_inner=inner * integer(config, "n_shared_experts", 0) if shared_inner is None else shared_inner,
        shared_gate=False,
        correction="vector" if correction else "no",
    )
    routes = routed_layers(config, default_dense)
    return lambda index: mixture if routes[index] else dense(config)


def routed_layers(config: Config, default_dense: int) -> list[bool]:
    """Whether each layer has experts: the config's `mlp_layer_types`, else each `moe_layer_freq`th layer after the
    first `first_k_dense_replace` ones. Raises ModelError."""
    count, first = integer(config, "num_hidden_layers"), integer(config, "first_k_dense_replace", default_dense)
    step, given = integer(config, "moe_layer_freq", 1), config.get("mlp_layer_types")
    if given is None:
        return [index >= first and index % max(1, step) == 0 for index in range(count)]
    if not isinstance(given, list) or len(given) < count or set(map(str, given)) - {"dense", "sparse"}:
        raise ModelError(f"the config's mlp_layer_types must list dense or sparse for each layer, got {given!r:.80}")
    return [each == "sparse" for each in given[:count]]


def further_layers(config: Config) -> WeightNames:
    """DeepSeek's names. Its checkpoints hold additional layers for multi-token prediction, which are ignored."""
    num_layers, further = integer(config, "num_hidden_layers"), integer(config, "num_nextn_predict_layers", 1)
    ignorable = tuple(rf"^model\.layers\.{num_layers + index}\." for index in range(max(1, further)))
    return WeightNames(shared_expert="mlp.shared_experts", ignorable=(*WeightNames.ignorable, *ignorable))


def sparse_layers(config: Config, mixture: Experts) -> Callable[[int], Ffn]:
    """Qwen's FFNs by layer index: the mixture in every `decoder_sparse_step`th layer except `mlp_only_layers`."""
    step = integer(config, "decoder_sparse_step", 1)
    dense_layers = config.get("mlp_only_layers") or []
    if step < 1:
        raise ModelError(f"the config's decoder_sparse_step must be at least 1, got {step}")
    if not isinstance(dense_layers, list) or not all(type(each) is int for each in dense_layers):
        raise ModelError(f"the config's mlp_only_layers must be a list of layers, got {dense_layers!r}")
    return lambda index: mixture if index not in dense_layers and (index + 1) % step == 0 else dense(config)


def llama_like(
    config: Config,
    *,
    positions: Sequence[Positions] | None = None,
    head_dim: int | None = None,
    attention: Mapping[str, Any] | None = None,
    ffn: Ffn | Callable[[int], Ffn] | None = None,
    default_context: int = 2048,
    tied_head: bool = False,
    interleaved: bool = False,
    **overrides: Any,
) -> ArchSpec:
    """The architecture that most families share: RMS norms before the blocks, a gated FFN, rotary positions,
    grouped-query attention.

    positions: of each layer; by default all use the config's rope. attention: overrides fields of `Attention`. ffn: for
    all layers, or a function of the layer's index. tied_head: if the config does not say. interleaved: see
    `RopeSpec.interleaved`. overrides: fields of ArchSpec.
    """
    head_dim = head_dim or head_dim_of(config)
    rotary = replace(rope(config, head_dim, 10000.0), interleaved=interleaved)
    if positions is None:
        positions = [Positions(rotary)] * integer(config, "num_hidden_layers")
    ffn = dense(config) if ffn is None else ffn
    heads: dict[str, Any] = {
        "num_heads": integer(config, "num_attention_heads"),
        "num_kv_heads": integer(config, "num_key_value_heads", integer(config, "num_attention_heads")),
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "causal": flag(config, "is_causal", True),
    }
    mixers = {each: Attention(**(heads | each._asdict() | dict(attention or {}))) for each in dict.fromkeys(positions)}
    fields: dict[str, Any] = {
        "architecture": config["architectures"][0],
        "hidden_size": integer(config, "hidden_size"),
        "vocab_size": integer(config, "vocab_size"),
        "max_positions": scaled_context(config, rotary, default_context),
        "layers": tuple(
            LayerSpec(mixers[each], ffn if isinstance(ffn, Ffn) else ffn(index)) for index, each in enumerate(positions)
        ),
        "norm": NormSpec("rms", number(config, "rms_norm_eps", 1e-6)),
        "tied_head": flag(config, "tie_word_embeddings", tied_head),
        "names": WeightNames(),
    }
    return ArchSpec(**(fields | overrides))
