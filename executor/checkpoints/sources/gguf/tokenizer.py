"""Converts the tokenizer in a GGUF file's metadata to a `TokenizerBundle`, which gives the ids of llama.cpp.

SentencePiece vocabularies and byte-level BPEs whose pre-tokenizer is in `SPLITS` are built with the `tokenizers`
library alone, in a few hundred milliseconds. Others are converted by transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from headrace.executor.checkpoints.sources.gguf.encoders import ENCODERS
from headrace.executor.checkpoints.sources.gguf.header import GGUFHeader, StringArray
from headrace.executor.checkpoints.sources.gguf.special_tokens import (
    CONTROL,
    KEY,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    special_token_id,
    token_types,
)
from headrace.executor.checkpoints.sources.gguf.splits import SPLITS, UNNAMED
from headrace.executor.checkpoints.tokenizers.converted_tokenizers import WITHOUT
from headrace.executor.checkpoints.tokenizers.sentencepiece_tokenizers import Pieces, sentencepiece_tokenizer
from headrace.executor.checkpoints.tokenizers.text_ends import add_ends, add_ends_of_encoder
from headrace.ipc.failure import ModelError
from headrace.ipc.messages import TokenizerBundle

ADDED = (UNKNOWN, CONTROL, USER_DEFINED)
"""Types of tokens that are looked for in a text before it is split."""
SPECIAL_TOKENS = MappingProxyType(
    {
        "bos_token": "bos",
        "eos_token": "eos",
        "unk_token": "unknown",
        "pad_token": "padding",
        "sep_token": "seperator",  # spelt so in the format
        "cls_token": "cls",
        "mask_token": "mask",
    }
)
"""The format's names of special tokens, by role."""


def gguf_bundle(header: GGUFHeader) -> TokenizerBundle:
    """The file's tokenizer. Raises ModelError if it has none, or one that cannot be converted."""
    metadata = header.metadata
    kind, tokens = metadata.get(f"{KEY}model"), metadata.get(f"{KEY}tokens")
    if not isinstance(kind, str) or kind in ("none", "no_vocab") or not isinstance(tokens, StringArray):
        raise ModelError(f"{header.path} has no tokenizer ({KEY}model and {KEY}tokens are looked for)", hint=WITHOUT)
    texts = list(tokens)
    special = _special_tokens(metadata, texts)
    if kind == "bert":
        json_text = _word_piece(header, texts, special)
    elif kind in ("llama", "t5"):
        json_text = _sentencepiece(header, texts, special)
    elif kind == "gpt2":
        json_text = _byte_level(header, texts, special)
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
    scores = metadata.get(f"{KEY}scores")
    if scores is not None and len(scores) < len(texts):
        raise ModelError(f"{header.path}: {KEY}scores has {len(scores)} entries for {len(texts)} tokens")
    charsmap = metadata.get(f"{KEY}precompiled_charsmap") if is_unigram else None
    if charsmap is not None and getattr(getattr(charsmap, "dtype", None), "itemsize", 0) != 1:
        raise ModelError(f"{header.path}: {KEY}precompiled_charsmap is no array of bytes")
    types = token_types(header, texts)
    tokenizer = sentencepiece_tokenizer(
        header.path,
        Pieces(
            texts=texts,
            scores=[0.0] * len(texts) if scores is None else scores.tolist()[: len(texts)],
            types=types,
            unknown_id=special_token_id(metadata, "unknown", len(texts)),
            is_unigram=is_unigram,
            byte_fallback=not is_unigram,
            prefix="always" if metadata.get(f"{KEY}add_space_prefix", not is_unigram) else "never",
            removes_extra_spaces=is_unigram and bool(metadata.get(f"{KEY}remove_extra_whitespaces", False)),
            charsmap=b"" if charsmap is None else charsmap.tobytes(),
            user_defined_first=True,
            strips_behind=_strips_behind(
                metadata, [text for text, kind in zip(texts, types, strict=True) if kind in ADDED]
            ),
        ),
    )
    if header.metadata.get("general.architecture") in ENCODERS:
        _put_ends_of_encoder(tokenizer, header, special)
    else:
        _put_ends(tokenizer, metadata, special, adds_bos=not is_unigram, adds_eos=is_unigram)
    json_text: str = tokenizer.to_str()
    return json_text


def _strips_behind(metadata: Mapping[str, Any], added: list[str]) -> set[str]:
    """Phi-3's tokens remove white space behind them, which llama.cpp knows by the model's name."""
    name = str(metadata.get("general.name")).lower()
    is_phi3 = "phi-3" in name or "phi3" in name
    return {*added, "</s>"} - {"<unk>", "<s>", "<|endoftext|>"} if is_phi3 else set()


def _put_ends(
    tokenizer: Any, metadata: Mapping[str, Any], special: Mapping[str, str], *, adds_bos: bool, adds_eos: bool = False
) -> None:
    """Puts bos and eos around texts if the file says so or, where it does not say, by these defaults."""
    asked = {
        "bos_token": metadata.get(f"{KEY}add_bos_token", adds_bos),
        "eos_token": metadata.get(f"{KEY}add_eos_token", adds_eos),
    }
    add_ends(tokenizer, *(special.get(role) if is_put else None for role, is_put in asked.items()))


def _put_ends_of_encoder(
    tokenizer: Any, header: GGUFHeader, special: Mapping[str, str], *, is_doubled: bool = True
) -> None:
    """As BERT and RoBERTa are trained, whose heads read the first token. Raises ModelError for a file that does not say
    which tokens they are."""
    first, last = special.get("cls_token", special.get("bos_token")), special.get("sep_token", special.get("eos_token"))
    if first is None or last is None:
        raise ModelError(f"{header.path} does not say which tokens begin and end a text ({KEY}cls_token_id and others)")
    add_ends_of_encoder(tokenizer, first, last, is_doubled=is_doubled)


WORD_START = "\u2581"
"""In a file before a token that begins a word; a published vocabulary has ## before the others."""


def _word_piece(header: GGUFHeader, texts: list[str], special: Mapping[str, str]) -> str:
    """The tokenizer.json of BERT's WordPiece. Where the file does not say, a vocabulary without capitals is one of
    texts in lower case, and accents are removed from these alone."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    types, vocabulary, has_capitals, named = token_types(header, texts), dict[str, int](), False, list[str]()
    for index, (text, kind) in enumerate(zip(texts, types, strict=True)):
        if kind in (CONTROL, UNKNOWN) or text in special.values():  # which files without types name alone
            named.append(text)
        else:
            has_capitals |= kind == NORMAL and text != text.lower()
            text = text.removeprefix(WORD_START) if text.startswith(WORD_START) else f"##{text}"
        vocabulary.setdefault(text, index)
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=special.get("unk_token", "[UNK]")))
    lowercase = header.metadata.get(f"{KEY}normalizer.lowercase", not has_capitals)
    strip_accents = header.metadata.get(f"{KEY}normalizer.strip_accents", lowercase)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase, strip_accents=strip_accents)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in named])
    _put_ends_of_encoder(tokenizer, header, special, is_doubled=False)
    json_text: str = tokenizer.to_str()
    return json_text


def _byte_level(header: GGUFHeader, texts: list[str], special: Mapping[str, str]) -> str:
    """The tokenizer.json of a byte-level BPE. Raises ModelError if its way of splitting text is not known, or its
    vocabulary and merges do not agree."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    metadata = header.metadata
    pre = metadata.get(f"{KEY}pre") or UNNAMED
    if (split := SPLITS.get(pre)) is None:
        raise ModelError(
            f"how the tokenizer in {header.path} cuts text (pre-tokenizer {pre}) is not known; known: "
            f"{', '.join(sorted(SPLITS))}",
            hint="--tokenizer names the original model's, and --skip-tokenizer-init runs without",
        )
    if not isinstance(metadata.get(f"{KEY}merges"), StringArray):
        raise ModelError(f"the tokenizer in {header.path} has no {KEY}merges", hint=WITHOUT)
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
    added = [(text, kind) for text, kind in zip(texts, token_types(header, texts), strict=True) if kind in ADDED]
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=kind != USER_DEFINED) for text, kind in added])
    if header.metadata.get("general.architecture") in ENCODERS:
        _put_ends_of_encoder(tokenizer, header, special)
    else:
        _put_ends(tokenizer, metadata, special, adds_bos=split.adds_bos)
    json_text: str = tokenizer.to_str()
    return json_text


def _by_transformers(header: GGUFHeader) -> str:
    from transformers import PreTrainedTokenizerFast

    path = header.path
    try:
        converted = PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
    except Exception as error:  # whatever an unknown kind of vocabulary leads to
        kind, pre = header.metadata.get(f"{KEY}model"), header.metadata.get(f"{KEY}pre")
        raise ModelError(
            f"the tokenizer in {path} (model {kind}, pre-tokenizer {pre}) cannot be converted: {error}", hint=WITHOUT
        ) from error
    json_text: str = converted.backend_tokenizer.to_str()
    return json_text
