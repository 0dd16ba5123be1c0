"""What the keys of tokenizer files mean here: each is read, or known not to matter, with the reason.

A key that is not known is refused in a GGUF file, whose keys are llama.cpp's, and named in the log for
tokenizer_config.json, which holds whatever its author wrote.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from headrace.executor.checkpoints.sources.gguf.header import GGUFHeader, StringArray, shown
from headrace.ipc.failure import ModelError

logger = logging.getLogger(__name__)

READ = ""
"""The meaning of keys that are read."""
Keys = Mapping[str, str]
"""READ, or the reason why a key does not matter."""
OF_CODE = "it says which code reads the files; what they say is read without it"
OF_BATCHES = "prompts are neither padded nor cut"
OF_OTHERS = "transformers reads it for other uses of a tokenizer than prompts and answers"
OF_ENCODERS = "a tokenizer.json has its normalizer; the classes that build their own are those of encoders"
OF_DECODING = "it changes text that is decoded at once; answers are decoded token by token, as in vLLM"
OF_INFILLING = "it is for prompts with a gap, which are made by the caller"
OF_TRAINING = "it says how the vocabulary was trained"


def keys(meaning: str, *names: str) -> dict[str, str]:
    """The same meaning for several keys."""
    return dict.fromkeys(names, meaning)


TOKENIZER_CONFIG: Keys = MappingProxyType(
    keys(
        READ,
        *("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens", "split_special_tokens"),
        *("chat_template", "tokenizer_class", "add_prefix_space", "legacy", "fast_tokenizer_files", "auto_map"),
        *("add_bos_token", "add_eos_token", "sp_model_kwargs", "truncation_side"),
    )
    | keys(
        OF_CODE, "name_or_path", "tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file", "use_fast"
    )
    | keys(OF_CODE, "processor_class", "backend", "is_local", "local_files_only", "from_slow", "tokenizer_type")
    | keys(OF_CODE, "init_inputs", "files_loaded", "transformers_version", "device_map", "verbose", "language")
    | keys(OF_BATCHES, "padding_side", "truncation", "padding", "max_length", "stride", "max_len")
    | keys(OF_BATCHES, "truncation_strategy", "pad_to_multiple_of", "pad_token_type_id", "model_max_length")
    | keys(OF_BATCHES, "return_token_type_ids", "return_tensors", "return_attention_mask")
    | keys(READ, "model_input_names")
    | keys(OF_OTHERS, "use_default_system_prompt", "trim_offsets", "suffix_first", "fill_token")
    | keys(OF_OTHERS, "chat_control_tokens", "response_schema", "response_template", "model_specific_special_tokens")
    | keys(READ, "do_lower_case", "strip_accents", "tokenize_chinese_chars")
    | keys(OF_ENCODERS, "do_basic_tokenize", "never_split")
    | keys(OF_ENCODERS, "remove_space", "keep_accents", "do_word_tokenize", "do_subword_tokenize", "cls_token_box")
    | keys(OF_DECODING, "clean_up_tokenization_spaces", "spaces_between_special_tokens", "errors")
    | keys(OF_DECODING, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")
)
"""Keys of tokenizer_config.json. Those that end in _token are special tokens, whatever their name."""

GGUF: Keys = MappingProxyType(
    keys(READ, *("model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "add_eos_token"))
    | keys(READ, *("add_space_prefix", "remove_extra_whitespaces", "precompiled_charsmap", "eos_token_ids"))
    | keys(READ, *(f"{role}_token_id" for role in ("bos", "eos", "eot", "eom", "unknown", "padding", "cls", "mask")))
    | keys(READ, "seperator_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")
    | keys(
        OF_INFILLING, *(f"{part}_token_id" for part in ("fim_pre", "fim_suf", "fim_mid", "prefix", "suffix", "middle"))
    )
    | keys(READ, "normalizer.lowercase", "normalizer.strip_accents")
    | keys(OF_ENCODERS, "token_type_count", "add_sep_token")
    | keys("an older name of the tokens that token_type marks", "added_tokens")
)
"""Keys of a GGUF file, without `tokenizer.ggml.`."""
GGUF_BESIDE: Keys = MappingProxyType(
    {
        "chat_template": READ,
        "chat_templates": "the templates that it names stand under keys of their own",
        "huggingface.json": "llama.cpp reads the vocabulary beside it",
        "rwkv.world": "it belongs to a kind of vocabulary that is refused",
    }
)
"""Keys without `tokenizer.`."""
OF_WORD_PIECE: Keys = MappingProxyType(
    keys("llama.cpp reads it for WordPiece vocabularies alone", "normalizer.lowercase", "normalizer.strip_accents")
)
NOT_IN_BPE: Keys = MappingProxyType(
    keys(
        "llama.cpp reads it for SentencePiece vocabularies alone",
        *("scores", "add_space_prefix", "remove_extra_whitespaces", "precompiled_charsmap"),
    )
    | {**OF_WORD_PIECE}
)
NOT_IN_WORD_PIECE: Keys = MappingProxyType(
    {name: reason for name, reason in NOT_IN_BPE.items() if name not in OF_WORD_PIECE}
    | keys("llama.cpp reads it for byte-level vocabularies alone", "merges", "pre")
    | keys("its texts always have both ends, as its models are trained", "add_bos_token", "add_eos_token")
)
NOT_IN_SENTENCEPIECE: Keys = MappingProxyType(
    {**OF_WORD_PIECE}
    | keys("llama.cpp reads it for byte-level vocabularies alone", "merges", "pre")
    | keys("llama.cpp reads it for unigram vocabularies alone", "remove_extra_whitespaces", "precompiled_charsmap")
)

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The roles that every tokenizer knows, in the order in which their tokens are added; others follow."""
A_TOKEN = "a token's text or an object with its content"
CONFIG_TYPES: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(ROLES, A_TOKEN)
    | dict.fromkeys(("add_bos_token", "add_eos_token", "add_prefix_space", "legacy"), "true or false")
    | dict.fromkeys(("split_special_tokens", "do_lower_case", "strip_accents"), "true or false")
    | {"tokenize_chinese_chars": "true or false", "tokenizer_class": "a text", "model_max_length": "a number"}
    | {"chat_template": "a text or a list of named templates", "fast_tokenizer_files": "a list of texts"}
    | {"truncation_side": "a text"}
    | dict.fromkeys(("added_tokens_decoder", "sp_model_kwargs"), "an object")
)
"""What the value of a key of tokenizer_config.json or special_tokens_map.json must be, unless it is null, which says
nothing. `folder_tokens.py` and `folder_templates.py` check what is in lists and objects."""
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
TOKEN_TYPES: Mapping[str, str] = MappingProxyType(
    dict.fromkeys((*TOKEN_FLAGS, "special"), "true or false") | {"content": "a text"}
)
"""What is in an object that stands for a token."""

FLAGS = ("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces")
GGUF_TYPES: Mapping[str, str] = MappingProxyType(
    dict.fromkeys((*FLAGS, "normalizer.lowercase", "normalizer.strip_accents"), "true or false")
    | dict.fromkeys((name for name in GGUF if name.endswith("_token_id")), "a whole number")
    | dict.fromkeys(("model", "pre", "chat_template"), "a text")
    | dict.fromkeys(("tokens", "merges"), "a list of texts")
    | dict.fromkeys(("token_type", "eos_token_ids"), "a list of whole numbers")
    | {"scores": "a list of numbers"}
)
"""What the value of a GGUF file's key must be, as in llama.cpp; the same names as above."""

SENTENCEPIECE: Keys = MappingProxyType(
    keys(READ, *(f"trainer_spec.{name}" for name in ("model_type", "byte_fallback", "treat_whitespace_as_suffix")))
    | keys(READ, *(f"trainer_spec.{name}_id" for name in ("bos", "eos", "unk", "pad")))
    | keys(READ, *(f"normalizer_spec.{name}" for name in ("precompiled_charsmap", "add_dummy_prefix")))
    | keys(READ, *(f"normalizer_spec.{name}" for name in ("remove_extra_whitespaces", "escape_whitespaces")))
    | keys(READ, "denormalizer_spec.precompiled_charsmap", "pieces")
    | keys(OF_DECODING, "trainer_spec.unk_surface")
)
"""Fields of a SentencePiece model. Others of its trainer_spec say how it was trained; others of its normalizer_spec,
what the map of characters was made from."""


def check_tokenizer_config(path: Path, config: Mapping[str, Any]) -> None:
    """Raises ModelError for values of other types and for what the file asks for that is not supported, and names
    unknown keys in the log."""
    check_types(path, config)
    others = config.get("fast_tokenizer_files") or ["tokenizer.json"]
    if others != ["tokenizer.json"]:
        raise ModelError(f"{path}: fast_tokenizer_files names {others!r:.80}; only tokenizer.json is read")
    options = config.get("sp_model_kwargs")
    if options is not None and options.get("enable_sampling"):
        raise ModelError(f"{path}: sp_model_kwargs sets enable_sampling, with which a text is split at random")
    unknown = [name for name in config if name not in TOKENIZER_CONFIG and not is_role(name, config[name])]
    if unknown := [name for name in unknown if config[name] not in (None, False, "", [], {})]:
        logger.warning("%s has %s, which is not known and has no effect", path, ", ".join(sorted(unknown)))


def is_role(name: str, value: Any) -> bool:
    """Whether the key gives a token a role. Other tokenizers have roles of their own, and keys such as add_x_token."""
    return name.endswith("_token") and isinstance(value, str | Mapping)


def check_types(where: Path | str, content: Mapping[str, Any], types: Mapping[str, str] = CONFIG_TYPES) -> None:
    """Raises ModelError, naming file and key, for a value of another type than `types` has for its key."""
    for name in types.keys() & content.keys():
        if content[name] is not None:
            _check_type(f"{where}: {name}", content[name], types[name])


def check_gguf_keys(header: GGUFHeader) -> None:
    """Raises ModelError for keys of a tokenizer that are not known or have a value of another type, and for tokens that
    must never be written."""
    for key, value in header.metadata.items():
        if not key.startswith("tokenizer."):
            continue
        name = key.removeprefix("tokenizer.")
        if name == "ggml.suppress_tokens" and len(value):
            raise ModelError(f"{header.path}: {key} forbids {len(value)} tokens to the model, which is not supported")
        is_known = name.removeprefix("ggml.") in (*GGUF, "suppress_tokens") or name in GGUF_BESIDE
        if not is_known and not name.startswith("chat_template."):
            raise ModelError(
                f"{header.path} has {key}, which is not known and may change what its tokenizer does",
                hint="--tokenizer names another one",
            )
        wanted = GGUF_TYPES.get("chat_template" if name.startswith("chat_template.") else name.removeprefix("ggml."))
        if wanted is not None:
            _check_type(f"{header.path}: the metadata key {key}", value, wanted)


TAKEN_AS: Mapping[str, Container[str]] = MappingProxyType(
    {
        "a list of numbers": ("a list of numbers", "a list of whole numbers"),
        "a number": ("a number", "a whole number"),
        A_TOKEN: ("a text", "an object"),
        "a text or a list of named templates": ("a text", "a list", "a list of texts"),
    }
)
"""The types that are taken for what is expected, where there are several."""


def _check_type(subject: str, value: Any, wanted: str) -> None:
    if _type_of(value) not in TAKEN_AS.get(wanted, (wanted,)):
        raise ModelError(f"{subject} is {shown(value)}; {wanted} is expected")


def _type_of(value: Any) -> str:
    """The type of a value of a GGUF file or of JSON, in the words of `GGUF_TYPES` and `CONFIG_TYPES`."""
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, StringArray) or (isinstance(value, list) and all(isinstance(each, str) for each in value)):
        return "a list of texts"
    if isinstance(value, np.ndarray):
        return "a list of whole numbers" if value.dtype.kind in "iu" else "a list of numbers"
    words = {str: "a text", int: "a whole number", float: "a number", dict: "an object", list: "a list"}
    return words.get(type(value), "a number")
