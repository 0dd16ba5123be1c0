"""SentencePiece models of Mistral's own folders: SentencePiece's own tokens, and the library's conversations."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiny_models
from test_tekken import CHAT, HAS_LIBRARY, WEATHER, load, put_library
from test_tokenizer_bundle import TEXTS

from headrace.executor.checkpoints.tokenizers import mistral
from headrace.ipc.failure import ModelError, OptionError

CONTROL = (
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
PLAIN = tuple(text for text in TEXTS if "<s>" not in text)
"""Special tokens are read in texts, as of every tokenizer, and SentencePiece reads none."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("trained"))


def train(folder: Path, control: Sequence[str] = CONTROL) -> Path:
    """Of Mistral's kind."""
    text = folder / "text"
    text.write_text("\n".join((*TEXTS, *(tiny_models.TRAINING_TEXT,) * 4)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "it"),
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        control_symbols=list(control),
        user_defined_symbols=["<between>"],
        minloglevel=2,
    )
    return folder / "it.model"


def test_texts_become_sentencepieces_own_tokens(trained: Path, tmp_path: Path, private_cache: Path) -> None:
    shutil.copy(trained, tmp_path / "tokenizer.model.v3")
    tokenizer, theirs = load(tmp_path), sentencepiece.SentencePieceProcessor(model_file=str(trained))
    for text in (*PLAIN, " one space", "   three", "▁own", "a<between> b", "\n", " "):
        expected = theirs.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == expected, text
        assert tokenizer.decode(expected) == theirs.decode(expected)
    assert tokenizer.encode("a") == [1, *theirs.encode("a")], "a prompt begins with <s>"
    begin, end = (theirs.piece_to_id(each) for each in CONTROL[:2])
    assert tokenizer.encode("[INST] a[/INST]", add_special_tokens=False) == [begin, *theirs.encode("a"), end]
    assert tokenizer.special_tokens_map == {name: token for name, token in mistral.ROLES.items() if token != "<pad>"}
    assert len(tokenizer) == len(theirs)


def test_the_latest_of_mistrals_files_is_read_where_no_other_tokenizer_lies(
    trained: Path, tmp_path: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_library(monkeypatch)

    def told(mode: str = "auto") -> str:
        text: str = load(tmp_path, mode).apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
        return text

    shutil.copy(trained, tmp_path / "tokenizer.model")
    (tmp_path / "params.json").touch()
    assert told() == "<s>[INST]a[/INST] of tokenizer.model"
    shutil.copy(trained, tmp_path / "tokenizer.model.v2")
    shutil.copy(trained, tmp_path / "tokenizer.mm.model.v7m1")
    shutil.copy(trained, tmp_path / "tokenizer.model.v3.bak")
    assert told() == "<s>[INST]a[/INST] of tokenizer.mm.model.v7m1"
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "chat_template": "hello"}')
    assert told() == "hello", "Hugging Face's form of the same"
    assert told("mistral") == "<s>[INST]a[/INST] of tokenizer.mm.model.v7m1"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"trainer_spec.model_type": 1}, "is no BPE"),
        (
            {"trainer_spec.byte_fallback": False, "normalizer_spec.add_dummy_prefix": False},
            "spells no bytes and puts no space before a text",
        ),
        (
            {"normalizer_spec.precompiled_charsmap": b"a", "normalizer_spec.remove_extra_whitespaces": True},
            "changes characters and takes spaces out",
        ),
    ],
)
def test_models_that_read_texts_in_another_way_are_refused(
    changed: dict[str, Any], reason: str, trained: Path, tmp_path: Path, private_cache: Path
) -> None:
    from sentencepiece import sentencepiece_model_pb2

    model: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made as it is imported
    model.ParseFromString(trained.read_bytes())
    for place, value in changed.items():
        part, name = place.split(".")
        setattr(getattr(model, part), name, value)
    (tmp_path / "tokenizer.model.v3").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=rf"tokenizer\.model\.v3 is no tokenizer of Mistral's: it {reason}"):
        load(tmp_path)


def test_what_is_no_model_is_refused_by_its_name(tmp_path: Path, private_cache: Path) -> None:
    (tmp_path / "tokenizer.model.v1").write_bytes(b"\x00 not one")
    with pytest.raises(ModelError, match=r"tokenizer\.model\.v1 is no SentencePiece model"):
        load(tmp_path)
    (tmp_path / "tokenizer.model.v1").write_bytes(b"")
    with pytest.raises(ModelError, match=r"tokenizer\.model\.v1 is no SentencePiece model"):
        load(tmp_path)
    (tmp_path / "tokenizer.model.v1").unlink()
    with pytest.raises(OptionError, match=r"reads tekken\.json or tokenizer\.model\.v1 to v7, and .* has none"):
        load(tmp_path, "mistral")


@pytest.mark.skipif(not HAS_LIBRARY, reason="mistral_common is not installed")
@pytest.mark.parametrize("version", ["v1", "v2", "v3", "v7"])
def test_conversations_become_the_tokens_of_mistral_common(
    version: str, trained: Path, tmp_path: Path, private_cache: Path
) -> None:
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    file = tmp_path / f"tokenizer.model.{version}"
    # What stands around a message is text in v1.
    shutil.copy(train(tmp_path, ()) if version == "v1" else trained, file)
    tokenizer, theirs = load(tmp_path, "mistral"), MistralTokenizer.from_file(file)
    for text in PLAIN:
        assert tokenizer.encode(text) == theirs.instruct_tokenizer.tokenizer.encode(text, bos=True, eos=False)
    asked: list[tuple[list[dict[str, Any]], Any]] = [(CHAT[:2], None), ([*CHAT[:2], *CHAT[4:]], None)]
    if version != "v1":  # which has no tools
        asked += [(CHAT[:2], [WEATHER]), (CHAT[:4], [WEATHER]), (CHAT, [WEATHER])]
    for messages, tools in asked:
        expected = theirs.encode_chat_completion(ChatCompletionRequest.from_openai(messages, tools)).tokens
        found = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
        assert found == expected, (tokenizer.decode(found), tokenizer.decode(expected))
