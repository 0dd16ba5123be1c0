"""How byte-level BPEs split text into pieces before the merges: llama.cpp's names (tokenizer.ggml.pre), and the regular
expressions with which the vocabularies were trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

UNNAMED = "default"
"""The name for files that name none."""


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
_WORD, _MARKS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_THREE_DIGITS = Split(rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|{_TAIL}")
_LLAMA3 = replace(_THREE_DIGITS, ignore_merges=True, adds_bos=True)
_QWEN2 = Split(rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_MARKS}|{_TAIL}")
_QWEN35 = Split(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
)
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_AFTER_MARK = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_DEEPSEEK3 = Split(rf"{_AFTER_MARK}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_TAIL}", before=(r"\p{N}{1,3}", _CJK))
_WIDE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_CODER = Split(r"\p{N}", before=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _WIDE))
_DEEPSEEK = Split(
    r"\p{N}+",
    before=(
        r"[\r\n]",
        r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _WIDE,
    ),
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _by_case(ending: str, digits: str) -> str:
    words = (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{ending}|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{ending}"
    )
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"


_TEKKEN = Split(_by_case("", r"\p{N}"), ignore_merges=True, adds_bos=True)
_GPT4O = Split(_by_case(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"))
_NO_HAN_UPPER, _NO_HAN_LOWER = rf"[{_UPPER}&&[^\p{{Han}}]]", rf"[{_LOWER}&&[^\p{{Han}}]]"
_KIMI = Split(
    r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_NO_HAN_UPPER}*{_NO_HAN_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_NO_HAN_UPPER}+{_NO_HAN_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_MARKS}|{_TAIL}",
    ignore_merges=True,
)
_BAILING = Split(rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}|{_MARKS}|\s*[\r\n]|\s+(?!\S)|\s+")
_EXAONE_MOE = Split(
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_GPT2 = Split()
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_OF_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPLITS: Mapping[str, Split] = MappingProxyType(
    {
        **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "trillion"), _GPT2),
        **dict.fromkeys(("mpt", "olmo", "jais", "granite-docling"), _GPT2),
        **dict.fromkeys(("roberta-bpe", "jina-es", "jina-de", "jina-v1-en"), replace(_GPT2, adds_bos=True)),
        **dict.fromkeys(("jina-v2-es", "jina-v2-de", "jina-v2-code"), replace(_GPT2, adds_bos=True)),
        **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone"), Split(single_digits=True)),
        **dict.fromkeys(("codeshell", "minerva-7b", "mellum2"), Split(single_digits=True)),
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"), _LLAMA3),
        "lfm2": _LLAMA3,
        **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe"), _THREE_DIGITS),
        **dict.fromkeys(("glm4", "glm5"), replace(_THREE_DIGITS, ignore_merges=True)),
        **dict.fromkeys(
            ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open", "grok-2", "megrez"), _QWEN2
        ),
        **dict.fromkeys(("kormo", "f2llmv2"), _QWEN2),
        "qwen35": _QWEN35,
        **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK3),
        "deepseek-coder": _DEEPSEEK_CODER,
        "deepseek-llm": _DEEPSEEK,
        "seed-coder": Split(rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_TAIL}"),
        **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
        "exaone-moe": _EXAONE_MOE,
        "minicpm5": Split(
            rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}+|{_MARKS}|{_TAIL}", before=(r"\p{N}{1,3}",), ignore_merges=True
        ),
        "ufakzeka": Split(rf"{_WORD}|\p{{N}}|{_MARKS}|{_TAIL}"),
        "tekken": _TEKKEN,
        **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"), _GPT4O),
        "kimi-k2": _KIMI,
        **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), Split(_BLOOM)),
        "viking": Split(r"\p{N}", before=(_BLOOM,)),
        "falcon": Split("[0-9][0-9][0-9]", before=(r"[\p{P}\$\+<=>\^~\|`]+", _OF_GPT2)),
        UNNAMED: Split("[0-9][0-9][0-9]", before=(r"[\p{P}\$\+<=>\^~\|]+", _OF_GPT2, r"\p{N}+")),
    }
)
