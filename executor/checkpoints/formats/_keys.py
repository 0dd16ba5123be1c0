"""What a format knows of the keys of its config. Each key is read, is known not to matter, or must not be set, as the
format declares (`Format.keys`); any other key is refused by name, as it may say that weights mean something else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from headrace.ipc.failure import ModelError

READ = ""
"""The meaning of keys that the format reads."""
ANY = "*"
"""Stands for every key that has no meaning of its own, where names of modules or groups are keys."""
DETAILS = 60
"""Characters of a value shown in an error."""


@dataclass(frozen=True)
class RefusedKey:
    """The meaning of keys that must not be set."""

    reason: str


Meaning = str | RefusedKey | Mapping[str, Any]
"""READ, or the reason why the key does not matter; else Refused, or the meanings of the keys of a nested object or of
the objects in a list."""
Keys = Mapping[str, Meaning]

BY_TENSORS = "the checkpoint's tensors show it"
SEARCH = "a note of how the tool found the weights, which are stored as it found them"
OTHERS = "it chooses a kernel or a way of loading of another engine"
OF_INPUTS = "activations keep at least the precision that the checkpoint asks for"
OF_CACHE = "scales of the cache are read from the tensors, and --kv-cache-dtype chooses its type"


def keys(meaning: Meaning, *names: str) -> dict[str, Meaning]:
    """The same meaning for several keys."""
    return dict.fromkeys(names, meaning)


COMMON: Keys = MappingProxyType(
    {"quant_method": READ}
    | keys(
        BY_TENSORS,
        *("modules_to_not_convert", "modules_to_convert", "ignored_layers", "ignore", "modules_in_block_to_quantize"),
        *("block_name_to_quantize", "to_quant_block_names", "lm_head", "quantize_embeddings"),
    )
    | keys(
        SEARCH,
        *(
            "version",
            "provider",
            "producer",
            "quantizer",
            "meta",
            "dataset",
            "tokenizer",
            "batch_size",
            "iters",
            "seqlen",
        ),
        *("nsamples", "seed", "lr", "minmax_lr", "amp", "autoround_version"),
    )
    | keys(OTHERS, "dequantize", "use_optimized_inference", "run_compressed")
)
"""Keys that configs of many formats have."""
OF_TOOLS: Keys = MappingProxyType(
    keys(
        SEARCH,
        *("damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "model_name_or_path", "mse"),
        *("model_file_base_name", "act_group_aware", "hyb_act", "model_seqlen", "pad_token_id", "cache_block_outputs"),
        *("module_name_preceding_first_block", "v2", "v2_alpha", "gptaq", "foem", "hessian", "fail_safe", "fallback"),
        *("mock_quantization", "offload_to_disk", "scale_search_chunked_activations", "preprocessors", "smooth"),
        *("enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "gradient_accumulate_steps"),
        *("low_gpu_mem_usage", "scale_dtype", "supported_types", "quant_block_list", "enable_alg_ext", "lr_scheduler"),
        *("duo_scaling", "max_calib_samples", "max_calib_seq_len", "apply_clip", "n_parallel_calib_samples", "device"),
    )
    | keys(
        OTHERS,
        *(
            "backend",
            "use_exllama",
            "disable_exllama",
            "exllama_config",
            "max_input_length",
            "use_cuda_fp16",
            "do_fuse",
        ),
        *("fuse_max_seq_len", "modules_to_fuse", "pack_impl", "vllm_backend"),
    )
    | keys(
        OF_INPUTS,
        *("act_bits", "act_data_type", "act_group_size", "act_sym", "act_dynamic", "activation", "activation_scheme"),
    )
    | keys(
        OF_CACHE,
        *("static_kv_dtype", "static_kv_granularity", "static_attention_dtype", "static_attention_granularity"),
    )
    | {"pack_dtype": BY_TENSORS}
    | keys(
        RefusedKey("inputs of some layers are rotated while the model computes, which is not supported"),
        *("rotation", "rotation_config", "rotation_configs"),
    )
    | {"adapter": RefusedKey("low-rank corrections beside the weights are not supported")}
)
"""Keys that GPTQModel, AutoGPTQ, AutoAWQ, AutoRound and transformers write."""


def check_keys(config: Mapping[str, Any], known: Keys, subject: str) -> None:
    """Raises ModelError for a key that is unknown or refused, unless its value is that of an unset one."""
    for name, value in config.items():
        meaning = known.get(name, known.get(ANY))
        if isinstance(meaning, Mapping):
            for each in value if isinstance(value, list | tuple) else [value]:
                if isinstance(each, Mapping):
                    check_keys(each, meaning, f"{subject}'s {name}")
        elif meaning is None and value not in (None, False, "", [], {}):
            raise ModelError(
                f"{subject} has {name}={_shown(value)}, which is not known and may change what its weights mean; known "
                f"are {', '.join(each for each in known if each != ANY)}",
                hint='where it changes nothing, hf_overrides={"quantization_config": {"' + name + '": null}} leaves it '
                "aside",
            )
        elif isinstance(meaning, RefusedKey) and value not in (None, False, "", [], {}):
            raise ModelError(f"{subject} has {name}={_shown(value)}: {meaning.reason}")


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= DETAILS else shown[:DETAILS] + " ..."
