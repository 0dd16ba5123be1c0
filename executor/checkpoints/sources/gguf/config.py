"""Converts a GGUF file's metadata to a Hugging Face config. What is specific to an architecture is in `dense.py` and
`mixtures.py`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from headrace.executor.checkpoints.sources.gguf.architecture import (
    LONG_FACTORS,
    SHORT_FACTORS,
    Fields,
    GGUFArchitecture,
)
from headrace.executor.checkpoints.sources.gguf.dense import DENSE
from headrace.executor.checkpoints.sources.gguf.encoders import ENCODERS, classifier_fields
from headrace.executor.checkpoints.sources.gguf.header import GGUFHeader, shown
from headrace.executor.checkpoints.sources.gguf.mixtures import MIXTRAL, MIXTURES, mixture
from headrace.executor.checkpoints.sources.gguf.recurrent import RECURRENT
from headrace.executor.checkpoints.sources.gguf.special_tokens import end_token_ids
from headrace.executor.models.families._config import MOST
from headrace.executor.models.families._defaults import scales_by_default
from headrace.ipc.failure import ModelError
from headrace.ipc.process.log import printable

logger = logging.getLogger(__name__)
ARCHITECTURES: Mapping[str, GGUFArchitecture] = MappingProxyType({**DENSE, **MIXTURES, **RECURRENT, **ENCODERS})
SAMPLING_KEYS = MappingProxyType(
    {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
)
QUANTIZATION_VERSION = 2
"""Of the layouts of blocks; the first had others."""
# Parameters of the published Llama 3 scaling, which `_llama3_scaling` tries first.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192


def architecture_of(header: GGUFHeader) -> GGUFArchitecture:
    """The file's architecture. Raises ModelError if its metadata names none, or one that is not supported."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ModelError(f"{header.path} holds no model: its metadata has no general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{header.path} is of architecture {name}; supported in GGUF files are {', '.join(sorted(ARCHITECTURES))}"
        )
    experts = header.metadata.get(f"{name}.expert_count", 0)
    if isinstance(experts, bool) or not isinstance(experts, int):
        raise ModelError(
            f"{header.path}: the metadata key {name}.expert_count is {shown(experts)}; a number is expected"
        )
    found = MIXTRAL if name == "llama" and experts else ARCHITECTURES[name]
    if experts and not found.is_mixture:
        raise ModelError(f"{header.path} is a mixture of experts ({name}), which this architecture is not known to be")
    return found


def config_from_gguf(header: GGUFHeader) -> dict[str, Any]:
    """The content of the equivalent config.json. Raises ModelError, naming the key that is missing or wrong."""
    architecture = architecture_of(header)
    _check_general(header)
    fields = Fields(header)
    tensors = header.tensors
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{header.path} has no tensor token_embd.weight; it is not a whole language model")
    own: dict[str, Any] = {
        "architectures": [architecture.architecture],
        "model_type": architecture.model_type,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if architecture.whole is not None:
        own |= architecture.whole(fields)
        fields.check_unread()
        return own | _token_ids(header)
    num_heads = _query_heads(fields, architecture)
    hidden_size = fields.count("embedding_length")
    num_layers = fields.count("block_count", most=MOST["num_hidden_layers"]) - fields.integer("nextn_predict_layers", 0)
    if num_layers < 1:
        raise ModelError(f"{header.path}: {num_layers} layers ({fields.prefix}.block_count less nextn_predict_layers)")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    if head_dim < 1:
        raise ModelError(
            f"{header.path}: heads of {head_dim} values each ({fields.prefix}.embedding_length is {hidden_size}, "
            f"attention.head_count {num_heads}); at least 1 is expected"
        )
    config: dict[str, Any] = {
        **own,
        "hidden_size": hidden_size,
        "intermediate_size": fields.integers("feed_forward_length", 0 if architecture.is_mixture else None),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": _key_heads(fields, architecture, num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        **_eps(fields, architecture),
        "rope_theta": _theta(fields),
        # All dimensions rotate where the file does not say, in families of which a part does, too.
        "partial_rotary_factor": fields.count("rope.dimension_count", head_dim) / head_dim,
    }
    if scaling := _rope_scaling(fields, config):
        config["rope_scaling"] = scaling
    elif scales_by_default(architecture.architecture):
        config["rope_scaling"] = {"rope_type": "default"}
    if architecture.is_mixture and not (architecture.may_be_dense and not fields.integer("expert_count", 0)):
        config |= mixture(fields, config, architecture)
    if architecture.extra is not None:
        config |= architecture.extra(fields, config)
    config |= classifier_fields(fields, config)
    _expect_common(fields, architecture, config)
    fields.check_unread()
    return config | _token_ids(header)


def _check_general(header: GGUFHeader) -> None:
    """Raises ModelError for a file of something else than a model, and for blocks that an other version of the format
    has packed. The other keys that begin so are notes of who made the file, and of what."""
    for key, known in (("general.type", "model"), ("general.quantization_version", QUANTIZATION_VERSION)):
        if (found := header.metadata.get(key, known)) != known:
            raise ModelError(f"{header.path}: the metadata key {key} is {shown(found)}; {known} is expected")


def _query_heads(fields: Fields, architecture: GGUFArchitecture) -> int:
    """Attention heads of the layers that have attention; a file may say 0 of the others. Raises ModelError if these
    differ, unless the architecture reads them itself."""
    if architecture.heads_differ:
        heads = fields.integers("attention.head_count")
        return max(heads) if isinstance(heads, list) else fields.count("attention.head_count")
    found = fields.integers("attention.head_count") if architecture.key_heads_differ else 0
    counts = set(found) - {0} if isinstance(found, list) else set()
    if len(counts) == 1:
        return counts.pop()
    return fields.count("attention.head_count", most=MOST["num_attention_heads"])


def _key_heads(fields: Fields, architecture: GGUFArchitecture, num_heads: int) -> int:
    """Key/value heads of the layers that have attention. Raises ModelError if these differ."""
    differ = architecture.key_heads_differ or architecture.heads_differ
    several = architecture.some_attend or differ
    found = fields.integers("attention.head_count_kv", num_heads) if several else num_heads
    counts = set(found) - {0} if isinstance(found, list) else set()
    if counts and differ:
        return max(counts)
    return counts.pop() if len(counts) == 1 else fields.count("attention.head_count_kv", num_heads)


def _theta(fields: Fields) -> float:
    theta = fields.number("rope.freq_base", 10000.0)
    if theta <= 1:
        raise ModelError(f"{fields.header.path}: {fields.prefix}.rope.freq_base is {theta}; more than 1 is expected")
    return theta


def _expect_common(fields: Fields, architecture: GGUFArchitecture, config: Mapping[str, Any]) -> None:
    """Checks keys whose values must be those of others that are computed with."""
    head_dim, value_dim = config["head_dim"], config.get("v_head_dim")
    fields.expect("attention.key_length_swa", head_dim)
    fields.expect("attention.value_length_swa", value_dim or head_dim)
    head_dim = config.get("global_head_dim", head_dim)
    rotary_dim = fields.integer("rope.dimension_count", head_dim)
    if "kv_lora_rank" in config:
        is_compressed = fields.has("attention.value_length_mla")
        fields.expect("attention.value_length_mla", value_dim)
        fields.expect("attention.key_length_mla", config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
        fields.expect("attention.value_length", config["kv_lora_rank"] if is_compressed else value_dim)
    else:
        fields.expect("attention.value_length", value_dim or head_dim)
    fields.expect("rope.dimension_count_swa", config["head_dim"] if "global_head_dim" in config else rotary_dim)
    if not {"rope_local_base_freq", "rope_local_theta", "rope_parameters"} & config.keys():
        fields.expect("rope.freq_base_swa", config["rope_theta"])
    fields.expect("embedding_length_out", config["hidden_size"])
    heads = config["num_attention_heads"]
    if architecture.key_heads == "all":
        fields.expect("attention.head_count_kv", heads)
    elif architecture.key_heads == "one":
        fields.expect("attention.head_count_kv", 1, heads)
    _expect_one_position(fields, rotary_dim)


def _expect_one_position(fields: Fields, rotary_dim: int) -> None:
    """Checks the sections of a rotation that turn by a token's time, height and width, which are one position in text
    alone: together they must be all of it. Raises ModelError."""
    sections = fields.sections("rope.dimension_sections")
    if any(sections) and (sum(sections[:3]) != rotary_dim // 2 or any(sections[3:])):
        raise ModelError(
            f"{fields.header.path}: the metadata key {fields.prefix}.rope.dimension_sections is {sections!r:.80}; "
            f"three of together {rotary_dim // 2} are computed, one position in text"
        )


def _eps(fields: Fields, architecture: GGUFArchitecture) -> dict[str, float]:
    """The norms' eps, under all names that families use for it."""
    if architecture.layer_norms:
        keys = ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
        return dict.fromkeys(keys, fields.number("attention.layer_norm_epsilon"))
    return {"rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon")}


def _rope_scaling(fields: Fields, config: dict[str, Any]) -> dict[str, Any] | None:
    """As llama.cpp scales: a factor without a type is linear, `none` scales nothing, and factors of each frequency
    (tensors) come besides."""
    older = fields.number("rope.scale_linear", 0.0)
    kind, factor = fields.get("rope.scaling.type", (str,), "linear"), fields.number("rope.scaling.factor", older)
    factor = 1.0 if kind == "none" else factor or 1.0
    magnitude = fields.number("rope.scaling.attn_factor", 1.0)
    factors = fields.header.tensors.get("rope_freqs.weight")
    if LONG_FACTORS in fields.header.tensors or SHORT_FACTORS in fields.header.tensors:
        if kind not in ("none", "linear", "longrope"):
            fields.expect("rope.scaling.type", "longrope")
        if factors is not None:
            raise ModelError(f"{fields.header.path} has {LONG_FACTORS} and rope_freqs.weight; it is one scaling")
        return _longrope(fields, config, factor)
    if kind == "yarn" and factor != 1.0 and factors is None:
        return _yarn(fields, factor, magnitude)
    fields.expect("rope.scaling.attn_factor", 1.0)
    if kind not in ("none", "linear", "longrope", "yarn"):
        raise ModelError(
            f"{fields.header.path}: the metadata key {fields.prefix}.rope.scaling.type is {kind!r:.80}; none, linear, "
            "yarn and longrope are supported"
        )
    if factors is not None:
        return _scaled_by_frequency(factors.data.reshape(-1).view("<f4"), factor, config)
    return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _yarn(fields: Fields, factor: float, magnitude: float) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if fields.has("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = fields.integer("rope.scaling.original_context_length")
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if fields.has(f"rope.scaling.{key}"):
            scaling[name] = fields.number(f"rope.scaling.{key}")
    if magnitude != 1.0:  # a further factor of cos and sin, besides YaRN's own
        scaling["attention_factor"] = magnitude * (1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0)
    return scaling


def _longrope(fields: Fields, config: dict[str, Any], factor: float) -> dict[str, Any]:
    """Parameters of LongRoPE, whose factors are tensors of the file; `factor` divides all frequencies besides. Raises
    ModelError if one of the two is missing."""
    tensors = fields.header.tensors
    for name, other in ((SHORT_FACTORS, LONG_FACTORS), (LONG_FACTORS, SHORT_FACTORS)):
        if name not in tensors:
            raise ModelError(f"{fields.header.path} has a tensor {other} and no {name}")
    short, long = (
        [float(str(each)) * factor for each in tensors[name].data.reshape(-1).view("<f4")]
        for name in (SHORT_FACTORS, LONG_FACTORS)
    )
    original = fields.count("rope.scaling.original_context_length", config["max_position_embeddings"])
    found = {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "original_max_position_embeddings": original,
    }
    if fields.has("rope.scaling.attn_factor"):
        found["attention_factor"] = fields.number("rope.scaling.attn_factor")
    return found


def _scaled_by_frequency(factors: np.ndarray, factor: float, config: dict[str, Any]) -> dict[str, Any] | None:
    """Divisors of each frequency, as Llama 3's parameters if they follow its rule, else as they are. None if they
    scale nothing. factors: [rotary dimensions / 2] float32. factor: divides all besides."""
    if factor == 1.0:
        if (factors == 1.0).all():
            return None
        if (found := _llama3_scaling(factors, config)) is not None:
            return found
    divisors = [float(str(each)) * factor for each in factors]
    return {
        "rope_type": "longrope",
        "short_factor": divisors,
        "long_factor": divisors,
        "original_max_position_embeddings": config["max_position_embeddings"],
        "attention_factor": 1.0,
    }


def _llama3_scaling(factors: np.ndarray, config: dict[str, Any]) -> dict[str, Any] | None:
    """Reconstructs Llama 3's rope scaling parameters from the factors that the converter computed from them. None if
    the factors do not follow this rule.

    factors: [rotary dimensions / 2] float32, the divisor of each frequency: 1 for short wavelengths, `factor` for long
    ones, and 1 / ((1 - s) / factor + s) between, where s is linear in the frequency. They determine the original
    context and the two thresholds only up to a common factor, so the lower threshold is set to Llama's 1.
    """
    factor = float(factors.max())
    if factor <= 1.0:
        return None
    frequencies = config["rope_theta"] ** -(np.arange(len(factors)) / len(factors)) / (2 * math.pi)
    candidates = [(LLAMA3_LOW, LLAMA3_HIGH, float(LLAMA3_CONTEXT))]
    between = (factors > 1.0 + 1e-4) & (factors < factor * (1 - 1e-4))
    if between.sum() >= 2:
        smooth = (1 / factors[between] - 1 / factor) / (1 - 1 / factor)
        slope, start = np.polyfit(frequencies[between], smooth, 1)
        if slope > 0 > start:
            high = LLAMA3_LOW * (1 - 1 / start)
            candidates.append((LLAMA3_LOW, round(high, 3), float(round(slope * (high - LLAMA3_LOW)))))
    for low, high, context in candidates:
        smooth = np.clip((context * frequencies - low) / (high - low), 0, 1)
        if np.allclose(1 / ((1 - smooth) / factor + smooth), factors, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": int(context),
            }
    return None


def _token_ids(header: GGUFHeader) -> dict[str, Any]:
    """bos, eos and pad token ids under Hugging Face's names; several eos ids are a list."""
    metadata = header.metadata
    found: dict[str, Any] = {}
    for key, name in (("bos_token_id", "bos_token_id"), ("padding_token_id", "pad_token_id")):
        if isinstance(metadata.get(f"tokenizer.ggml.{key}"), int):
            found[name] = metadata[f"tokenizer.ggml.{key}"]
    if ends := end_token_ids(header):
        found["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return found


def sampling_from_gguf(header: GGUFHeader) -> dict[str, Any]:
    """The content of the equivalent generation_config.json: sampling defaults in the metadata."""
    start = "general.sampling."
    given = {key.removeprefix(start): value for key, value in header.metadata.items() if key.startswith(start)}
    of_effect = {key for key, value in given.items() if isinstance(value, np.ndarray) or value not in (0, -1, "")}
    if others := sorted(of_effect - SAMPLING_KEYS.keys()):
        logger.warning("%s: sampling defaults without effect: %s", header.path, printable(", ".join(others)))
    for key in given.keys() & SAMPLING_KEYS.keys():
        if isinstance(given[key], bool) or not isinstance(given[key], int | float):
            said = f"the metadata key {start}{key} is {given[key]!r:.80}; a number is expected"
            raise ModelError(f"{header.path}: {said}")
    return {name: given[key] for key, name in SAMPLING_KEYS.items() if key in given}
