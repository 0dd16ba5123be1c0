"""Flags of tokenizer_config.json that say how text is changed before it is split, applied to a tokenizer.json: where a
space is put before it, and whether it is written in small letters.

transformers applies them in the classes below, which build their tokenizer anew; the others take it as it stands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headrace.executor.checkpoints.tokenizers.sentencepiece_tokenizers import SPACE, Prefix, prefix_steps

LLAMA = ("LlamaTokenizer", "CodeLlamaTokenizer")
REPLACES_SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
BYTE_LEVEL: Mapping[str, bool] = MappingProxyType(
    dict.fromkeys(
        (
            *("GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer", "CohereTokenizer"),
            *("CodeGenTokenizer", "RobertaTokenizer", "BartTokenizer", "LongformerTokenizer", "LEDTokenizer"),
            *("MvpTokenizer", "DebertaTokenizer", "LukeTokenizer"),
        ),
        False,
    )
    | {"BlenderbotTokenizer": True}
)
"""By class, its `add_prefix_space` where the config has none."""
XLM_R = ("XLMRobertaTokenizer", "CamembertTokenizer")
BERT = tuple(
    f"{name}Tokenizer"
    for name in (
        *("Bert", "ConvBert", "DistilBert", "Electra", "Funnel", "LayoutLM", "MPNet", "MobileBert", "Splinter"),
        "SqueezeBert",
    )
)
BERT_FLAGS: Mapping[str, tuple[str, bool | None]] = MappingProxyType(
    {
        "do_lower_case": ("lowercase", True),
        "strip_accents": ("strip_accents", None),
        "tokenize_chinese_chars": ("handle_chinese_chars", True),
    }
)
"""By flag, the field of a BertNormalizer, and the value of these classes without the flag."""


def with_text_flags(data: bytes, config: Mapping[str, Any]) -> bytes:
    """data: a tokenizer.json. config: content of tokenizer_config.json, whose `add_prefix_space` and, of Llama's
    tokenizers, `legacy` decide if they are there; BERT's and byte-level ones have values of their own for flags that
    are not."""
    name = str(config.get("tokenizer_class")).removesuffix("Fast")
    if name in BERT:
        return _with_bert_flags(data, config)
    asked, legacy = config.get("add_prefix_space", BYTE_LEVEL.get(name)), config.get("legacy")
    if (asked is None and (legacy is None or name in XLM_R)) or name not in (*LLAMA, *BYTE_LEVEL, *XLM_R):
        return data
    content = json.loads(data)
    steps = _steps(content.get("pre_tokenizer"), "pretokenizers")
    byte_level = [step for step in steps if step.get("type") == "ByteLevel"]
    before = json.dumps(content)
    if byte_level and name in BYTE_LEVEL and asked is not None:
        for step in byte_level:
            step["add_prefix_space"] = bool(asked)
    if not byte_level and name not in BYTE_LEVEL:
        scheme: Prefix = "never" if asked is False else "always" if legacy or name in XLM_R else "first"
        _set_prefix(content, steps, scheme)
    return data if json.dumps(content) == before else json.dumps(content, ensure_ascii=False).encode()


def _with_bert_flags(data: bytes, config: Mapping[str, Any]) -> bytes:
    content = json.loads(data)
    wanted = {field: config.get(flag, default) for flag, (field, default) in BERT_FLAGS.items()}
    steps = [each for each in _steps(content.get("normalizer"), "normalizers") if each.get("type") == "BertNormalizer"]
    if all(each.get(field) == value for each in steps for field, value in wanted.items()):
        return data
    for each in steps:
        each |= wanted
    return json.dumps(content, ensure_ascii=False).encode()


def _steps(part: Any, key: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, which may be a sequence, in which `key` names them."""
    if not part:
        return []
    return list(part[key]) if part.get("type") == "Sequence" else [part]


def _set_prefix(content: dict[str, Any], steps: list[dict[str, Any]], scheme: Prefix) -> None:
    """Puts a space before text by `scheme`, in place of the Metaspace or the normalizer that puts it."""
    metaspaces = [step for step in steps if step.get("type") == "Metaspace"]
    normalizers = _steps(content.get("normalizer"), "normalizers")
    prepends = [step for step in normalizers if step == {"type": "Prepend", "prepend": SPACE}]
    if metaspaces:
        # Of two, the first puts it and the second replaces spaces.
        metaspaces[0]["prepend_scheme"] = scheme
    elif REPLACES_SPACES in normalizers and (scheme != "always" or not prepends):
        content["normalizer"] = {
            "type": "Sequence",
            "normalizers": [each for each in normalizers if each not in prepends],
        }
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*prefix_steps(scheme), *steps]}
