"""What the keys of a generation_config.json mean besides the sampling defaults and eos_token_id, which are read.

It is written for transformers' `generate`. As in vLLM, what it says of `generate`'s other ways to choose tokens is not
applied; the log names it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

logger = logging.getLogger(__name__)

OF_CALLS = "it says how `generate` runs or what it returns, not what it writes"
OF_PROMPTS = "the tokenizer says it"
NOT_FOLLOWED = "it chooses between sampling and the most likely tokens; the temperature does, as in vLLM"
OF_ENCODERS = "it is for models with an encoder"
IDLE: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        (
            *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "return_dict_in_generate"),
            *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_legacy_cache"),
            *("compile_config", "disable_compile", "continuous_batching_config", "low_memory", "prefill_chunk_size"),
            *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "prompt_lookup_num_tokens"),
            *("assistant_confidence_threshold", "max_matching_ngram_size", "assistant_early_exit", "use_mtp"),
            *("assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight", "speculation_type"),
            *("_from_model_config", "transformers_version", "trust_remote_code", "chat_format", "max_window_size"),
            *("max_length", "num_return_sequences", "max_time", "generation_kwargs", "user_token_id", "name_or_path"),
        ),
        OF_CALLS,
    )
    | dict.fromkeys(("bos_token_id", "pad_token_id", "assistant_token_id", "token_healing"), OF_PROMPTS)
    | dict.fromkeys(("do_sample", "renormalize_logits", "remove_invalid_values"), NOT_FOLLOWED)
    | {"decoder_start_token_id": OF_ENCODERS}
)
"""Keys that do not matter here, with the reason."""
UNSET: Mapping[str, Any] = MappingProxyType(
    {
        **dict.fromkeys(("num_beams", "num_beam_groups"), 1),
        **dict.fromkeys(("typical_p", "length_penalty", "encoder_repetition_penalty"), 1.0),
        "guidance_scale": 1,
    }
)
"""Values with which a key asks for nothing, besides none, 0, false and empty ones."""


def warn_of_what_is_not_applied(path: Path, content: Mapping[str, Any], read: Collection[str]) -> None:
    """Names keys in the log that `generate` would apply, or that are not known. read: keys that are applied."""
    others = {name: value for name, value in content.items() if name not in read and name not in IDLE}
    found = sorted(name for name, value in others.items() if value and value != UNSET.get(name))
    if found:
        logger.warning("%s has %s, which has no effect here, as in vLLM", path, ", ".join(found))
