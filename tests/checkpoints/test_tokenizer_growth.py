"""Tokenizers that make much text of little are refused when they are read, and the file is named."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from fake_tokenizers import byte_level_tokenizer
from thinned import every

from headrace.core.options.parsing import parse_options
from headrace.executor.checkpoints.checkpoint import Checkpoint
from headrace.executor.checkpoints.tokenizers.tokenizer import load_bundle
from headrace.executor.checkpoints.tokenizers.tokenizer_growth import MOST_ADDED, MOST_TEXT_BYTES, check_growth
from headrace.ipc.failure import ModelError

LONG = "x" * (1 << 20)


def replace(content: str, **pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern or {"String": "a"}, "content": content}


def in_a_row(name: str, parts: list[Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: parts}


def precompiled(*replacements: str) -> dict[str, Any]:
    data = (4).to_bytes(4, "little") + bytes(4) + b"".join(each.encode() + b"\0" for each in replacements)
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def template(single: list[Any], ids: list[int]) -> dict[str, Any]:
    special = {"<s>": {"id": "<s>", "ids": ids, "tokens": ["<s>"] * len(ids)}}
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": special}


TEXT, SPECIAL = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<s>", "type_id": 0}}


def with_parts(**parts: Any) -> bytes:
    return json.dumps({**json.loads(byte_level_tokenizer().to_str()), **parts}).encode()


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"normalizer": replace(LONG)}, "normalizer"),
        ({"normalizer": replace(LONG, Regex=".")}, "normalizer"),
        ({"normalizer": in_a_row("normalizers", [replace("aa")] * 20)}, "normalizer"),
        ({"normalizer": in_a_row("normalizers", [in_a_row("normalizers", [replace(LONG)])])}, "normalizer"),
        ({"normalizer": {"type": "Prepend", "prepend": LONG}}, "normalizer"),
        ({"normalizer": precompiled("a", LONG)}, "normalizer"),
        ({"decoder": replace(LONG)}, "decoder"),
        ({"decoder": in_a_row("decoders", [{"type": "Fuse"}, *[replace("aa")] * 20])}, "decoder"),
        ({"post_processor": template([TEXT] * 2, [0])}, "post_processor"),
        ({"post_processor": template([SPECIAL, TEXT], [0] * (MOST_ADDED + 1))}, "post_processor"),
        ({"post_processor": template([SPECIAL] * (MOST_ADDED + 1), [0])}, "post_processor"),
        ({"added_tokens": [{"id": 0, "content": LONG}]}, "has a token of more than 16384 bytes"),
        ({"model": {"type": "BPE", "vocab": {LONG: 0}, "merges": []}}, "has a token of more than 16384 bytes"),
        ({"model": {"type": "Unigram", "vocab": [[LONG, 0.0]]}}, "has a token of more than 16384 bytes"),
    ],
)
def test_what_multiplies_text_is_refused(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=f"^the/file: the tokenizer.*{said}"):
        check_growth(with_parts(**parts), "the/file")


SPACES = replace("\u2581", String=" ")


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {
            "normalizer": in_a_row(
                "normalizers", [replace("\u2581", String=" "), {"type": "NFKC"}, precompiled("x" * 18)]
            )
        },
        {
            "normalizer": in_a_row(
                "normalizers", [{"type": "Prepend", "prepend": "\u2581"}, replace("\u2581", String=" ")]
            )
        },
        {"decoder": in_a_row("decoders", [replace(" ", String="\u2581"), {"type": "ByteFallback"}, {"type": "Fuse"}])},
        {"post_processor": template([SPECIAL, TEXT, SPECIAL], [0])},
    ],
)
def test_usual_parts_are_taken(parts: dict[str, Any]) -> None:
    check_growth(with_parts(**parts), "the/file")


@pytest.mark.parametrize(
    "begin", every(2, [0, 1, MOST_TEXT_BYTES // 2 - 1, MOST_TEXT_BYTES // 2, MOST_TEXT_BYTES // 2 + 1])
)
@pytest.mark.parametrize(("length", "is_taken"), [(MOST_TEXT_BYTES, True), (MOST_TEXT_BYTES + 1, False)])
def test_the_longest_token_may_lie_anywhere_in_the_file(begin: int, length: int, is_taken: bool) -> None:
    whole = b'{"model": {"vocab": {' + b" " * begin + b'"' + b"x" * length + b'": 0, "b": 1}}}'
    if is_taken:
        check_growth(whole, "here")
        return
    with pytest.raises(ModelError, match="token of more than"):
        check_growth(whole, "here")


def test_the_file_is_named_where_a_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_bytes(with_parts(normalizer=replace(LONG)))
    checkpoint = Checkpoint(
        name="mill", path=tmp_path, format="dummy", config={}, dtype_name="float32", generation_config={},
        eos_token_ids=(),
    )  # fmt: skip
    with pytest.raises(ModelError, match=f"{tmp_path}.*normalizer"):
        load_bundle(checkpoint, parse_options())
