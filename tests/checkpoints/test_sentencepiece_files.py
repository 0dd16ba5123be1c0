"""SentencePiece models without a tokenizer.json: the ids that SentencePiece itself gives, whatever class is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiny_models
from test_tokenizer_bundle import TEXTS, auto_tokenizer, bundle_of, ids_of, load_without_transformers
from thinned import every
from tokenizers import Tokenizer

from headrace.executor.checkpoints.tokenizers import sentencepiece_files
from headrace.executor.checkpoints.tokenizers.comparison_texts import TEXTS as COMPARED
from headrace.executor.checkpoints.tokenizers.sentencepiece_files import MOST_DIFFERENT
from headrace.frontend.text import tokenizer as frontend
from headrace.ipc.failure import ModelError

IDENTITY = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
MARKS = {"user_defined_symbols": ["<tool>", "▁▁▁"], "control_symbols": ["<ctl>"]}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "bpe": {"model_type": "bpe", "byte_fallback": True, **IDENTITY},
    "bpe without a prefix": {"model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": False, **IDENTITY},
    "bpe normalised": {"model_type": "bpe", "byte_fallback": True},
    "bpe with marks": {"model_type": "bpe", "byte_fallback": True, **IDENTITY, **MARKS},
    "bpe normalised with marks": {"model_type": "bpe", "byte_fallback": True, "user_defined_symbols": ["<tool>"]},
    "unigram": {"model_type": "unigram", "byte_fallback": True},
    "unigram of unknown characters": {"model_type": "unigram", "user_defined_symbols": ["<tool>"]},
    "unigram as it is": {"model_type": "unigram", "byte_fallback": True, "add_dummy_prefix": False, **IDENTITY},
    "unigram in small letters": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc_cf"},
}
WITH_MARKS = ("a <tool> b", "<tool>x  <tool>", "x     y", "<tool>", "  <tool>  ", "a<tool>b")
PLAIN = tuple(text for text in (*COMPARED, *TEXTS, *WITH_MARKS) if "<s>" not in text)
"""Special tokens are read in texts, as of every tokenizer, and SentencePiece reads none."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of each kind."""
    folder = tmp_path_factory.mktemp("trained")
    text = folder / "text"
    text.write_text("\n".join((*TEXTS, *COMPARED, *(tiny_models.TRAINING_TEXT,) * 8)))
    for name, options in KINDS.items():
        sentencepiece.SentencePieceTrainer.train(
            input=str(text),
            model_prefix=str(folder / name),
            vocab_size=700,
            hard_vocab_limit=False,
            character_coverage=0.98,
            minloglevel=3,
            **options,
        )
    return folder


def folder_of(trained: Path, folder: Path, kind: str = "bpe", **config: Any) -> Path:
    shutil.copy(trained / f"{kind}.model", folder / "tokenizer.model")
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def processor(folder: Path) -> Any:
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


@pytest.mark.parametrize(
    "config", every(2, [{}, {"tokenizer_class": "LlamaTokenizer"}, {"tokenizer_class": "NoSuchTokenizer"}]), ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_texts_become_sentencepieces_own_tokens(
    kind: str, config: dict[str, Any], trained: Path, tmp_path: Path, private_cache: Path
) -> None:
    folder = folder_of(trained, tmp_path, kind, **config)
    ours, theirs = frontend.Tokenizer(bundle_of(folder)), processor(folder)
    different = [text for text in PLAIN if ours.encode(text) != theirs.encode(text)]
    assert len(different) <= (MOST_DIFFERENT if "unigram" in kind else 0), different
    for text in PLAIN:
        ids = theirs.encode(text)
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(ids), text
    assert len(ours) == len(theirs)
    assert ours.special_tokens_map == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_a_folder_with_nothing_but_the_model_needs_no_transformers(
    trained: Path, tmp_path: Path, private_cache: Path
) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "float32"}')
    assert load_without_transformers(folder_of(trained, tmp_path)) > 10_000


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ["▁a", "</s>", "▁a"]),
        ({"tokenizer_class": "LlamaTokenizer"}, ["▁a", "</s>", "a"]),
        ({"tokenizer_class": "LlamaTokenizerFast", "legacy": True}, ["▁a", "</s>", "▁a"]),
        ({"legacy": False}, ["▁a", "</s>", "a"]),
        ({"add_prefix_space": False}, ["a", "</s>", "a"]),
        ({"add_bos_token": True}, ["<s>", "▁a", "</s>", "▁a"]),
        ({"add_eos_token": True, "eos_token": "<unk>"}, ["▁a", "</s>", "▁a", "<unk>"]),
    ],
    ids=str,
)
def test_flags_of_the_config_apply(
    config: dict[str, Any], expected: Sequence[str], trained: Path, tmp_path: Path, private_cache: Path
) -> None:
    tokenizer = Tokenizer.from_buffer(bundle_of(folder_of(trained, tmp_path, **config)).tokenizer_json)
    assert tokenizer.encode("a</s>a").tokens == expected


def test_a_prefix_may_be_asked_of_a_model_without_one(trained: Path, tmp_path: Path, private_cache: Path) -> None:
    folder = folder_of(trained, tmp_path, "bpe without a prefix", add_prefix_space=True)
    assert ids_of(bundle_of(folder), "Hello") == processor(folder).encode(" Hello")


def test_tokens_are_added_behind_the_pieces_and_placed_in_them(
    trained: Path, tmp_path: Path, private_cache: Path
) -> None:
    folder = folder_of(trained, tmp_path, "bpe with marks", extra_special_tokens=["<|tool|>"])
    size = processor(folder).piece_to_id("<ctl>"), len(processor(folder))
    listed = {str(size[0]): "<|im_start|>", str(size[1] + 1): "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {key: {"content": text} for key, text in listed.items()}})
    )
    bundle = bundle_of(folder)
    assert ids_of(bundle, "<|im_start|><|im_end|>") == [size[0], size[1] + 1]


def test_flags_that_the_config_lists_of_a_piece_apply_as_in_transformers(
    trained: Path, tmp_path: Path, private_cache: Path
) -> None:
    listed = {"2": {"content": "</s>", "special": False, "rstrip": True, "normalized": False}}
    folder = folder_of(
        trained, tmp_path, tokenizer_class="LlamaTokenizer", eos_token="</s>", added_tokens_decoder=listed
    )
    bundle, theirs = bundle_of(folder), auto_tokenizer(folder)
    for text in ("a</s> b", "a </s>  </s>b", "</s>"):
        assert ids_of(bundle, text) == theirs.encode(text, add_special_tokens=False), text


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"trainer_spec.model_type": 4}, "is a character model"),
        ({"trainer_spec.treat_whitespace_as_suffix": True}, r"puts the space behind a word \(treat_white"),
        ({"normalizer_spec.escape_whitespaces": False}, r"leaves spaces as they are \(escape_whitespaces\)"),
        ({"denormalizer_spec.precompiled_charsmap": b"a"}, r"changes characters of its output \(denormalizer_spec\)"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(
    changed: Mapping[str, Any], reason: str, trained: Path, tmp_path: Path, private_cache: Path
) -> None:
    model = sentencepiece_files.parse(trained / "bpe.model")
    for place, value in changed.items():
        part, name = place.split(".")
        setattr(getattr(model, part), name, value)
    (tmp_path / "tokenizer.model").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=rf"tokenizer\.model cannot be converted: it {reason}"):
        bundle_of(tmp_path)


def test_a_conversion_that_gives_other_tokens_is_refused(
    trained: Path, tmp_path: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = sentencepiece_files.sentencepiece_tokenizer

    def without_prefix(path: Path, pieces: Any) -> Any:
        tokenizer = own(path, pieces)
        tokenizer.pre_tokenizer = None
        return tokenizer

    monkeypatch.setattr(sentencepiece_files, "sentencepiece_tokenizer", without_prefix)
    with pytest.raises(ModelError, match=r"cannot be converted: 'Hello' gives \[.*\], and SentencePiece gives \["):
        bundle_of(folder_of(trained, tmp_path))


def test_classes_with_ids_of_their_own_are_converted_by_transformers_and_compared(
    trained: Path, tmp_path: Path, private_cache: Path
) -> None:
    folder = folder_of(trained, tmp_path, "unigram of unknown characters", tokenizer_class="XLMRobertaTokenizer")
    (folder / "tokenizer.model").rename(folder / "sentencepiece.bpe.model")
    tokenizer = Tokenizer.from_buffer(bundle_of(folder).tokenizer_json)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.bpe.model"))
    found = tokenizer.encode("Hello  water", add_special_tokens=False)
    assert found.tokens == theirs.encode("Hello  water", out_type=str)
    assert tokenizer.token_to_id("<pad>") == 1
    shutil.copy(trained / "unigram.model", folder / "sentencepiece.bpe.model")
    with pytest.raises(ModelError, match=r"cannot be converted: .* gives"):  # this class spells no bytes
        bundle_of(folder)
