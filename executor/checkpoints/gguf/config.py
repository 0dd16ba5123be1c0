"""What a GGUF file's metadata says, as a Hugging Face config: one entry of ARCHITECTURES per family.

What llama.cpp's converter does to each family, and so what must be undone, is in its conversion scripts
(https://github.com/ggml-org/llama.cpp, conversion/): `permuted` families have the rows of the query and key
projections reordered for rotation by neighbouring pairs; `offset_norms` families have 1 added to their norm weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from headrace.executor.checkpoints.gguf.header import GGUFHeader, StringArray
from headrace.ipc.failure import ModelError

EXPERT = MappingProxyType(
    {
        "ffn_gate": "mlp.experts.{}.gate_proj",
        "ffn_up": "mlp.experts.{}.up_proj",
        "ffn_down": "mlp.experts.{}.down_proj",
    }
)
MIXTRAL_EXPERT = MappingProxyType(
    {
        "ffn_gate": "block_sparse_moe.experts.{}.w1",
        "ffn_up": "block_sparse_moe.experts.{}.w3",
        "ffn_down": "block_sparse_moe.experts.{}.w2",
    }
)

GRANITE_EXPERT = MappingProxyType({name: f"block_sparse_moe.{path[4:]}" for name, path in EXPERT.items()})


@dataclass(frozen=True)
class GGUFArchitecture:
    architecture: str
    """As in a Hugging Face config's `architectures`."""
    model_type: str
    permuted: bool = False
    offset_norms: bool = False
    expert: Mapping[str, str] = field(default_factory=dict)
    """Of one expert's matrices, which a file has one by one (`ffn_up.7`) or all in one tensor (`ffn_up_exps`)."""
    extra: Callable[[_Fields, dict[str, Any]], dict[str, Any]] | None = None
    """Fields of the config that this architecture has beside the common ones."""
    renormalised: bool = False
    """Whether chosen experts' weights add up to 1, where the file does not say."""

    def is_stack(self, name: str) -> bool:
        """Whether this is the same matrix of every expert."""
        match = re.fullmatch(r"blk\.\d+\.(\w+)_exps\.weight", name)
        return match is not None and match[1] in self.expert

    def expert_name(self, name: str, expert: int) -> str:
        """The Hugging Face name of one expert's matrix in a stack."""
        return self.hf_name(name.replace("_exps.", f".{expert}."))

    def hf_name(self, name: str) -> str:
        """Of an expert's matrix. Another stays as it is."""
        stem, _, kind = name.rpartition(".")
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(\d+)", stem)
        if match and match[2] in self.expert:
            return f"model.layers.{match[1]}.{self.expert[match[2]].format(match[3])}.{kind}"
        return name


def tensor_names(header: GGUFHeader, config: dict[str, Any]) -> dict[str, str]:
    """Hugging Face names by the file's, both without `.weight` and `.bias`: the gguf package's tables, read backwards
    for what a model of this config declares. One that has none stays as it is, for the decoder to refuse."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    from headrace.executor.models.families import spec_from_config
    from headrace.executor.models.sizes import model_weights

    spec = spec_from_config(config)
    kind = next(key for key, name in MODEL_ARCH_NAMES.items() if name == header.metadata["general.architecture"])
    table = get_tensor_name_map(kind, spec.num_layers)
    prefix = spec.names.prefixes[0]
    stems = [spec.names.layer(prefix, index) + fused.name for index in range(spec.num_layers) for fused in spec.fused]
    stems += [weight.name.removesuffix(".weight").removesuffix(".bias") for weight in model_weights(spec)]
    found: dict[str, str] = {}
    for stem in stems:
        if own := table.get_name(stem):
            found.setdefault(own, stem)  # what is stored together comes before its parts
    return found


def _biases(fields: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    """Which projections have biases, as Llama's config says it."""
    return {
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_output.bias" in fields.header.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in fields.header.tensors,
    }


def _query_biases(fields: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in fields.header.tensors}


def _granite(fields: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    keys = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return _biases(fields, config) | {name: fields.number(key) for name, key in keys.items()}


def _starcoder2(fields: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": config["layer_norm_eps"],
        "use_bias": "blk.0.attn_q.bias" in fields.header.tensors,
    }


def _stablelm(fields: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "use_parallel_residual": bool(fields.header.metadata.get("stablelm.use_parallel_residual", False)),
        "use_qkv_bias": "blk.0.attn_q.bias" in fields.header.tensors,
    }


def _command_r(fields: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    has_norms = "blk.0.attn_q_norm.weight" in fields.header.tensors
    return {"logit_scale": fields.number("logit_scale"), "use_qk_norm": has_norms}


def _seed_oss(fields: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    tensors = fields.header.tensors
    return {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "attention_out_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
    }


def _squared_relu(fields: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    return _biases(fields, config) | {"hidden_act": "relu2", "norm_eps": config.get("layer_norm_eps")}


def _windowed(fields: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": fields.integer("attention.sliding_window", 0) or None}


def _clipped(fields: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    return {"clip_qkv": fields.number("attention.clamp_kqv", 0.0) or None}


GEMMA_27B_LAYERS = MappingProxyType({"gemma2": 46, "gemma3_text": 62})
# What ends a turn, for files that name only the token that ends a document.
END_OF_TURN = (b"<|eot_id|>", b"<|im_end|>", b"<end_of_turn>", b"<|end|>")
SAMPLING_KEYS = MappingProxyType(
    {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
)
# The published Llama 3 scaling, tried first where the factors alone leave the thresholds open.
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192


class _Fields:
    """Typed reading of one architecture's keys."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header
        self.prefix = str(header.metadata.get("general.architecture", ""))

    def get(self, key: str, kinds: tuple[type, ...], default: Any = None) -> Any:
        """A value of one of the kinds. Raises ModelError when it is neither there nor has a default, or of another."""
        name = f"{self.prefix}.{key}"
        value = self.header.metadata.get(name, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # given per layer, all alike
        if value is None:
            raise ModelError(f"{self.header.path} lacks the metadata key {name}")
        if isinstance(value, bool) or not isinstance(value, kinds):
            shown = f"an array of {len(value)}" if isinstance(value, np.ndarray | StringArray) else repr(value)
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise ModelError(f"{self.header.path}: the metadata key {name} is {shown}; a single {expected} is expected")
        return value

    def has(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.header.metadata

    def integer(self, key: str, default: int | None = None) -> int:
        value: int = self.get(key, (int,), default)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return float(self.get(key, (int, float), default))


def architecture_of(header: GGUFHeader) -> GGUFArchitecture:
    """Raises ModelError when the file does not name one, or names one that is not supported."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ModelError(f"{header.path} holds no model: its metadata has no general.architecture")
    if name not in ARCHITECTURES:
        raise ModelError(
            f"{header.path} is of architecture {name}; supported in GGUF files are {', '.join(ARCHITECTURES)}"
        )
    found = MIXTRAL if name == "llama" and header.metadata.get("llama.expert_count") else ARCHITECTURES[name]
    if header.metadata.get(f"{name}.expert_count") and not found.expert:
        raise ModelError(f"{header.path} is a mixture of experts ({name}), which this architecture is not known to be")
    return found


def config_from_gguf(header: GGUFHeader) -> dict[str, Any]:
    """A Hugging Face config.json's content. Raises ModelError, naming the key that is missing or wrong."""
    architecture = architecture_of(header)
    fields = _Fields(header)
    tensors = header.tensors
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{header.path} has no tensor token_embd.weight; it is not a whole language model")
    num_heads, hidden_size = fields.integer("attention.head_count"), fields.integer("embedding_length")
    if num_heads < 1:
        raise ModelError(f"{header.path}: {fields.prefix}.attention.head_count is {num_heads}; at least 1 is expected")
    rotary_dim = fields.integer("rope.dimension_count", 0)
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    config: dict[str, Any] = {
        "architectures": [architecture.architecture],
        "model_type": architecture.model_type,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("feed_forward_length", 0 if architecture.expert else None),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        **_eps(fields),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if rotary_dim and rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    if scaling := _rope_scaling(fields, config):
        config["rope_scaling"] = scaling
    if architecture.extra is not None:
        config |= architecture.extra(fields, config)
    if architecture.expert:
        config |= _experts(fields, config, architecture)
    return config | _token_ids(header)


def _eps(fields: _Fields) -> dict[str, float]:
    if fields.has("attention.layer_norm_epsilon"):
        return {"layer_norm_eps": fields.number("attention.layer_norm_epsilon")}
    return {"rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon")}


def _rope_scaling(fields: _Fields, config: dict[str, Any]) -> dict[str, Any] | None:
    factors = fields.header.tensors.get("rope_freqs.weight")
    if factors is not None:
        return _llama3_scaling(fields.header, factors.data.reshape(-1).view("<f4"), config)
    kind = fields.get("rope.scaling.type", (str,), "none")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if fields.has("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = fields.integer("rope.scaling.original_context_length")
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if fields.has(f"rope.scaling.{key}"):
            scaling[name] = fields.number(f"rope.scaling.{key}")
    return scaling


def _llama3_scaling(header: GGUFHeader, factors: np.ndarray, config: dict[str, Any]) -> dict[str, Any] | None:
    """Llama 3's parameters from the factors they were turned into.

    factors: [rotary dimensions / 2] float32, what each frequency is divided by: 1 for short wavelengths, `factor`
    for long ones, and 1 / ((1 - s) / factor + s) between, where s is linear in the frequency. Only the ratios of the
    original context and the two thresholds to each other show in them, so the lower threshold is set to Llama's 1.
    Raises ModelError when the factors follow no such rule.
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
    raise ModelError(
        f"{header.path}: the factors in rope_freqs.weight do not follow Llama 3's rule, the only one supported"
    )


def _experts(fields: _Fields, config: dict[str, Any], architecture: GGUFArchitecture) -> dict[str, Any]:
    """Of a mixture, every layer of which has experts."""
    header, inner = fields.header, config["intermediate_size"]
    found = {
        "num_local_experts" if architecture is MIXTRAL else "num_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "norm_topk_prob": bool(header.metadata.get(f"{fields.prefix}.expert_weights_norm", architecture.renormalised)),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length", inner),
    }
    if architecture.model_type == "qwen2_moe":
        shared = header.tensors.get("blk.0.ffn_up_shexp.weight")
        length = fields.integer("expert_shared_feed_forward_length", 0 if shared is None else shared.shape[0])
        found |= {"shared_expert_intermediate_size": length, "qkv_bias": "blk.0.attn_q.bias" in header.tensors}
    return found


def _gemma(fields: _Fields, config: dict[str, Any]) -> dict[str, Any]:
    """What the file leaves to llama.cpp's model code: the query scale and, of Gemma 3, the base of sliding layers."""
    layers = config["num_hidden_layers"]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    is_27b = layers == GEMMA_27B_LAYERS[config["model_type"]]
    found: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if is_27b else config["head_dim"],
    }
    if config["model_type"] == "gemma3_text":
        found["rope_local_base_freq"] = fields.number("rope.freq_base_swa", 10000.0)
        found["rope_theta"] = fields.number("rope.freq_base", 1_000_000.0)
    if fields.has("attn_logit_softcapping"):
        found["attn_logit_softcapping"] = fields.number("attn_logit_softcapping")
    window = fields.integer("attention.sliding_window", 0)
    if window:
        found["sliding_window"] = window
    else:
        found["layer_types"] = ["full_attention"] * layers
    if fields.has("final_logit_softcapping"):
        found["final_logit_softcapping"] = fields.number("final_logit_softcapping")
    return found


ARCHITECTURES: Mapping[str, GGUFArchitecture] = MappingProxyType(
    {
        "llama": GGUFArchitecture("LlamaForCausalLM", "llama", permuted=True, extra=_biases),
        "qwen2": GGUFArchitecture("Qwen2ForCausalLM", "qwen2"),
        "qwen3": GGUFArchitecture("Qwen3ForCausalLM", "qwen3"),
        "gemma2": GGUFArchitecture("Gemma2ForCausalLM", "gemma2", offset_norms=True, extra=_gemma),
        "gemma3": GGUFArchitecture("Gemma3ForCausalLM", "gemma3_text", offset_norms=True, extra=_gemma),
        "smollm3": GGUFArchitecture("SmolLM3ForCausalLM", "smollm3", permuted=True, extra=_biases),
        "qwen2moe": GGUFArchitecture("Qwen2MoeForCausalLM", "qwen2_moe", expert=EXPERT),
        "qwen3moe": GGUFArchitecture("Qwen3MoeForCausalLM", "qwen3_moe", expert=EXPERT, renormalised=True),
        "arcee": GGUFArchitecture("ArceeForCausalLM", "arcee", permuted=True, extra=_squared_relu),
        "command-r": GGUFArchitecture("CohereForCausalLM", "cohere", extra=_command_r),
        "ernie4_5": GGUFArchitecture("Ernie4_5ForCausalLM", "ernie4_5"),
        "glm4": GGUFArchitecture("Glm4ForCausalLM", "glm4", extra=_query_biases),
        "gemma": GGUFArchitecture("GemmaForCausalLM", "gemma", offset_norms=True),
        "granite": GGUFArchitecture("GraniteForCausalLM", "granite", permuted=True, extra=_granite),
        "granitemoe": GGUFArchitecture(
            "GraniteMoeForCausalLM",
            "granitemoe",
            permuted=True,
            extra=_granite,
            expert=GRANITE_EXPERT,
            renormalised=True,
        ),
        "nemotron": GGUFArchitecture("NemotronForCausalLM", "nemotron", offset_norms=True, extra=_squared_relu),
        "olmo": GGUFArchitecture("OlmoForCausalLM", "olmo", permuted=True, extra=_clipped),
        "olmo2": GGUFArchitecture("Olmo2ForCausalLM", "olmo2"),
        "phi2": GGUFArchitecture("PhiForCausalLM", "phi"),
        "phi3": GGUFArchitecture("Phi3ForCausalLM", "phi3", extra=_windowed),
        "seed_oss": GGUFArchitecture("SeedOssForCausalLM", "seed_oss", extra=_seed_oss),
        "stablelm": GGUFArchitecture("StableLmForCausalLM", "stablelm", extra=_stablelm),
        "starcoder2": GGUFArchitecture("Starcoder2ForCausalLM", "starcoder2", extra=_starcoder2),
        "olmoe": GGUFArchitecture("OlmoeForCausalLM", "olmoe", expert=EXPERT),
    }
)
MIXTRAL = GGUFArchitecture("MixtralForCausalLM", "mixtral", permuted=True, expert=MIXTRAL_EXPERT, renormalised=True)
"""What a file of architecture llama is that has experts."""


def _token_ids(header: GGUFHeader) -> dict[str, Any]:
    """bos, eos and pad ids under Hugging Face's names; several ends make a list."""
    metadata = header.metadata
    found: dict[str, Any] = {}
    for key, name in (("bos_token_id", "bos_token_id"), ("padding_token_id", "pad_token_id")):
        if isinstance(metadata.get(f"tokenizer.ggml.{key}"), int):
            found[name] = metadata[f"tokenizer.ggml.{key}"]
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    tokens = metadata.get("tokenizer.ggml.tokens")
    if ends[1] is None and isinstance(tokens, StringArray):
        ends += [index for index, token in enumerate(tokens.raw()) if token in END_OF_TURN]
    unique = list(dict.fromkeys(end for end in ends if isinstance(end, int)))
    if unique:
        found["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    return found


def sampling_from_gguf(header: GGUFHeader) -> dict[str, Any]:
    """What a generation_config.json would say, for files that carry sampling defaults."""
    values = {name: header.metadata.get(f"general.sampling.{key}") for key, name in SAMPLING_KEYS.items()}
    return {name: value for name, value in values.items() if isinstance(value, int | float)}
