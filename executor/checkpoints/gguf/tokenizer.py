"""Converts the tokenizer in a GGUF file's metadata to a `TokenizerBundle`, which gives the ids of llama.cpp.

SentencePiece vocabularies and byte-level BPEs whose pre-tokenizer is in `SPLITS` are built with the `tokenizers`
library alone, in a few hundred milliseconds. Others are converted by transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from headrace.executor.checkpoints.converted_tokenizers import WITHOUT
from headrace.executor.checkpoints.gguf.header import GGUFHeader, StringArray
from headrace.executor.checkpoints.gguf.special_tokens import CONTROL, KEY, NORMAL, USER_DEFINED, special_token_id
from headrace.executor.checkpoints.sentencepiece_tokenizers import Pieces, sentencepiece_tokenizer
from headrace.executor.checkpoints.text_ends import add_ends
from headrace.ipc.failure import ModelError
from headrace.ipc.messages import TokenizerBundle

UNNAMED = "default"
"""The pre-tokenizer of older files, which do not name one: GPT-2's."""
SPECIAL_TOKENS = MappingProxyType(
    {
        "bos_token": "bos",
        "eos_token": "eos",
        "unk_token": "unknown",
        "pad_token": "padding",
        "sep_token": "seperator",  # spelt so in the format
        "mask_token": "mask",
    }
)
"""The format's names of special tokens, by role."""


@dataclass(frozen=True)
class Split:
    """A pre-tokenizer: how text is split into pieces before the merges. llama.cpp names it in tokenizer.ggml.pre."""

    regex: str | None = None
    """Regular expression of a piece; None: GPT-2's, which the library has built in."""
    single_digits: bool = False
    """Whether every digit is first split off as a piece."""
    before: tuple[str, ...] = ()
    """Regular expressions that split off pieces one after the other; `regex` then splits the text between these."""
    ignore_merges: bool = False
    """Whether a piece that is itself a token is taken without applying merges."""
    adds_bos: bool = False
    """Whether the bos token is put before a text, if the file does not say."""


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = Split(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}",
    ignore_merges=True,
    adds_bos=True,
)
_QWEN2 = Split(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}")
_DEEPSEEK3 = Split(
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}",
    before=(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = Split(
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}",
    ignore_merges=True,
    adds_bos=True,
)
_NO_HAN_UPPER, _NO_HAN_LOWER = rf"[{_UPPER}&&[^\p{{Han}}]]", rf"[{_LOWER}&&[^\p{{Han}}]]"
_KIMI = Split(
    r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_NO_HAN_UPPER}*{_NO_HAN_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_NO_HAN_UPPER}+{_NO_HAN_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}",
    ignore_merges=True,
)
SPLITS: Mapping[str, Split] = MappingProxyType(
    {
        "gpt-2": Split(),
        "smollm": Split(single_digits=True),
        "llama-bpe": _LLAMA3,
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
        "smaug-bpe": Split(_LLAMA3.regex),
        "qwen2": _QWEN2,
        "deepseek-r1-qwen": _QWEN2,
        "tekken": _TEKKEN,
        "stablelm2": _QWEN2,
        "chatglm-bpe": Split(_LLAMA3.regex),
        "glm4": Split(_LLAMA3.regex),
        "deepseek-v3": _DEEPSEEK3,
        "hunyuan-dense": _DEEPSEEK3,
        "kimi-k2": _KIMI,
        **dict.fromkeys(("mpt", "olmo", "jais"), Split()),
        **dict.fromkeys(("starcoder", "refact", "command-r", "exaone"), Split(single_digits=True)),
    }
)


def gguf_bundle(header: GGUFHeader) -> TokenizerBundle:
    """The file's tokenizer. Raises ModelError if it has none, or one that cannot be converted."""
    metadata = header.metadata
    kind, tokens = metadata.get(f"{KEY}model"), metadata.get(f"{KEY}tokens")
    if not isinstance(kind, str) or kind in ("none", "no_vocab") or not isinstance(tokens, StringArray):
        raise ModelError(
            f"{header.path} has no tokenizer ({KEY}model and {KEY}tokens are looked for)",
            hint=WITHOUT,
        )
    texts = list(tokens)
    special = _special_tokens(metadata, texts)
    split = SPLITS.get(str(metadata.get(f"{KEY}pre"))) if kind == "gpt2" else None
    if kind in ("llama", "t5"):
        json_text = _sentencepiece(header, texts, special)
    elif split is not None and isinstance(metadata.get(f"{KEY}merges"), StringArray):
        json_text = _byte_level(header, texts, split, special)
    else:
        json_text = _by_transformers(header)
    return TokenizerBundle(
        tokenizer_json=json_text.encode(), chat_templates=_chat_templates(metadata), special_tokens=special
    )


def _special_tokens(metadata: Mapping[str, Any], texts: list[str]) -> dict[str, str]:
    ids = {name: special_token_id(metadata, role, len(texts)) for name, role in SPECIAL_TOKENS.items()}
    return {name: texts[token_id] for name, token_id in ids.items() if token_id is not None}


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    found = {"default": metadata.get("tokenizer.chat_template")}
    found |= {key.removeprefix("tokenizer.chat_template."): text for key, text in metadata.items() if _names_one(key)}
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _names_one(key: str) -> bool:
    return key.startswith("tokenizer.chat_template.")


def _sentencepiece(header: GGUFHeader, texts: list[str], special: Mapping[str, str]) -> str:
    """The tokenizer.json of a SentencePiece vocabulary: llama's is merged by its scores, t5's is a unigram model.

    Raises ModelError if the vocabulary is not sound.
    """
    metadata, is_unigram = header.metadata, header.metadata[f"{KEY}model"] == "t5"
    types, scores = (metadata.get(f"{KEY}{name}") for name in ("token_type", "scores"))
    charsmap = metadata.get(f"{KEY}precompiled_charsmap") if is_unigram else None
    for name, values in (("token_type", types), ("scores", scores)):
        if values is not None and len(values) < len(texts):
            raise ModelError(f"{header.path}: {KEY}{name} has {len(values)} entries for {len(texts)} tokens")
    tokenizer = sentencepiece_tokenizer(
        header.path,
        Pieces(
            texts=texts,
            scores=[0.0] * len(texts) if scores is None else scores.tolist()[: len(texts)],
            types=[NORMAL] * len(texts) if types is None else types.tolist()[: len(texts)],
            is_unigram=is_unigram,
            byte_fallback=not is_unigram,
            prefix="always" if metadata.get(f"{KEY}add_space_prefix", not is_unigram) else "never",
            removes_extra_spaces=is_unigram and bool(metadata.get(f"{KEY}remove_extra_whitespaces", False)),
            charsmap=b"" if charsmap is None else charsmap.tobytes(),
            user_defined_first=True,
        ),
    )
    _put_ends(tokenizer, metadata, special, adds_bos=not is_unigram, adds_eos=is_unigram)
    json_text: str = tokenizer.to_str()
    return json_text


def _put_ends(
    tokenizer: Any, metadata: Mapping[str, Any], special: Mapping[str, str], *, adds_bos: bool, adds_eos: bool = False
) -> None:
    """Puts bos and eos around texts if the file says so or, where it does not say, by these defaults."""
    asked = {
        "bos_token": metadata.get(f"{KEY}add_bos_token", adds_bos),
        "eos_token": metadata.get(f"{KEY}add_eos_token", adds_eos),
    }
    add_ends(tokenizer, *(special.get(role) if is_put else None for role, is_put in asked.items()))


def _byte_level(header: GGUFHeader, texts: list[str], split: Split, special: Mapping[str, str]) -> str:
    """The tokenizer.json of a byte-level BPE. Raises ModelError if vocabulary and merges do not agree."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    metadata = header.metadata
    merges = [tuple(merge.split(" ", 1)) for merge in metadata[f"{KEY}merges"]]
    vocabulary = {text: index for index, text in enumerate(texts)}
    try:
        model = models.BPE(vocabulary, merges, fuse_unk=False, ignore_merges=split.ignore_merges)
    except Exception as error:  # the library raises plain Exception for every fault
        raise ModelError(f"the tokenizer in {header.path} is not sound: {error}") from error
    tokenizer = Tokenizer(model)
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.single_digits else []
    steps += [pre_tokenizers.Split(Regex(each), behavior="isolated") for each in split.before]
    if split.regex is not None:
        steps.append(pre_tokenizers.Split(Regex(split.regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.regex is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata.get(f"{KEY}token_type")
    for text, token_type in zip(texts, [] if types is None else types.tolist(), strict=False):
        if token_type in (CONTROL, USER_DEFINED):
            tokenizer.add_tokens([AddedToken(text, normalized=False, special=token_type == CONTROL)])
    _put_ends(tokenizer, metadata, special, adds_bos=split.adds_bos)
    json_text: str = tokenizer.to_str()
    return json_text


def _by_transformers(header: GGUFHeader) -> str:
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    path, pre = header.path, header.metadata.get(f"{KEY}pre", UNNAMED)
    if header.metadata.get(f"{KEY}model") == "gpt2" and pre not in (UNNAMED, *GGUF_PRE_TOKENIZER_SPLITS):
        raise ModelError(
            f"how the tokenizer in {path} cuts text (pre-tokenizer {pre}) is not known; known are "
            f"{', '.join(sorted({*SPLITS, *GGUF_PRE_TOKENIZER_SPLITS}))}",
            hint="--tokenizer names the original model's, and --skip-tokenizer-init runs without",
        )
    try:
        converted = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
    except Exception as error:  # whatever an unknown kind of vocabulary leads to
        kind, pre = header.metadata.get(f"{KEY}model"), header.metadata.get(f"{KEY}pre")
        raise ModelError(
            f"the tokenizer in {path} (model {kind}, pre-tokenizer {pre}) cannot be converted: {error}",
            hint=WITHOUT,
        ) from error
    json_text: str = converted.backend_tokenizer.to_str()
    return json_text
