"""Tokenizers of tiktoken's files (Kimi K2's, Qwen's first): the tokens that tiktoken's rule gives."""

from __future__ import annotations

import base64
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import regex
from tokenizers import Tokenizer

from headrace.core.options.parsing import parse_options
from headrace.executor.checkpoints.checkpoint import Checkpoint
from headrace.executor.checkpoints.tokenizers.tokenizer import load_bundle
from headrace.ipc.failure import ModelError

# As the models' own code has them.
KIMI = "|".join(
    (
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXTS = (
    "Hello world, the mill's wheel turns; IT'LL TURN 123456 times.",
    "水车转动了 3.14 次,然后 stops。日本語のテストです 水",
    "tabs\tand  spaces   \n\n\nlines\r\n  end  ",
    "É ÄÖÜ ǅ a\u0301b \u00a0 \U0001f600 naïve Straße don't I'VE",
    "".join(chr(number) for number in range(0x20, 0x250)),
)


def trained_ranks(pattern: str, size: int) -> dict[bytes, int]:
    """A vocabulary as tiktoken's are made: merges of the most frequent pairs, learned from the texts."""
    ranks = {bytes((byte,)): byte for byte in range(256)}
    pieces = [piece.encode() for text in TEXTS * 2 for piece in regex.findall(pattern, text, flags=regex.V1)]
    words = [[bytes((byte,)) for byte in piece] for piece in pieces]
    while len(ranks) < size:
        counts: dict[tuple[bytes, bytes], int] = {}
        for word in words:
            for pair in itertools.pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        best = max(counts, key=lambda pair: (counts[pair], pair))
        ranks[best[0] + best[1]] = len(ranks)
        words = [joined(word, best[0] + best[1]) for word in words]
    return ranks


def joined(word: list[bytes], token: bytes) -> list[bytes]:
    found: list[bytes] = []
    for part in word:
        if found and found[-1] + part == token:
            found[-1] = token
        else:
            found.append(part)
    return found


def by_rank(pattern: str, ranks: dict[bytes, int], text: str) -> list[int]:
    """tiktoken's rule: of each piece, join again and again what makes the token of the lowest rank."""
    found = []
    for piece in regex.findall(pattern, text, flags=regex.V1):
        word = [bytes((byte,)) for byte in piece.encode()]
        while True:
            pairs = [(ranks.get(a + b, 1 << 30), place) for place, (a, b) in enumerate(itertools.pairwise(word))]
            rank, place = min(pairs, default=(1 << 30, 0))
            if rank == 1 << 30:
                break
            word[place : place + 2] = [word[place] + word[place + 1]]
        found += [ranks[token] for token in word]
    return found


def save(folder: Path, kind: str, ranks: dict[bytes, int], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    name = {"TikTokenTokenizer": "tiktoken.model", "QWenTokenizer": "qwen.tiktoken"}[kind]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    (folder / name).write_text("".join(lines))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, **config}))
    return folder


def load(folder: Path) -> Any:
    checkpoint = Checkpoint(
        name="mill", path=folder, format="dummy", config={}, dtype_name="float32", generation_config={},
        eos_token_ids=(),
    )  # fmt: skip
    return load_bundle(checkpoint, parse_options())


@pytest.mark.parametrize(("kind", "pattern"), [("TikTokenTokenizer", KIMI), ("QWenTokenizer", QWEN)])
def test_text_becomes_the_tokens_of_tiktokens_rule(
    kind: str, pattern: str, tmp_path: Path, private_cache: Path
) -> None:
    ranks = trained_ranks(pattern, 420)
    tokenizer = Tokenizer.from_buffer(load(save(tmp_path / kind, kind, ranks)).tokenizer_json)
    draw = random.Random(7)
    letters = "".join(TEXTS)
    for text in (*TEXTS, *("".join(draw.choices(letters, k=60)) for _ in range(200))):
        found = tokenizer.encode(text, add_special_tokens=False).ids
        assert found == by_rank(pattern, ranks, text), text
        assert tokenizer.decode(found, skip_special_tokens=False) == text


def test_special_tokens_have_the_ids_that_the_config_gives_them(tmp_path: Path, private_cache: Path) -> None:
    ranks = trained_ranks(KIMI, 300)
    added = {"300": "[BOS]", "302": "<|im_end|>", "305": "[PAD]"}
    decoder = {key: {"content": text, "special": True} for key, text in added.items()}
    folder = save(tmp_path / "kimi", "TikTokenTokenizer", ranks, added_tokens_decoder=decoder, bos_token="[BOS]")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    bundle = load(folder)
    tokenizer = Tokenizer.from_buffer(bundle.tokenizer_json)
    assert {int(key): tokenizer.id_to_token(int(key)) for key in added} == {int(k): v for k, v in added.items()}
    assert tokenizer.id_to_token(301) == "<|reserved_token_301|>"
    assert tokenizer.encode("a<|im_end|>b").ids == [ord("a"), 302, ord("b")]
    assert bundle.special_tokens == {"bos_token": "[BOS]"}
    assert bundle.chat_templates == {"default": "{{ messages }}"}
    qwen = Tokenizer.from_buffer(load(save(tmp_path / "qwen", "QWenTokenizer", ranks)).tokenizer_json)
    assert qwen.encode("<|im_start|>").ids == [301]
    assert qwen.get_vocab_size() == 300 + 208


def test_a_token_that_the_config_lists_as_text_is_text(tmp_path: Path, private_cache: Path) -> None:
    """As Kimi K2's markers of calls."""
    decoder = {
        "300": {"content": "<|call|>", "special": False, "lstrip": True},
        "301": {"content": "<|end|>", "special": True},
    }
    folder = save(tmp_path / "kimi", "TikTokenTokenizer", trained_ranks(KIMI, 300), added_tokens_decoder=decoder)
    tokenizer = Tokenizer.from_buffer(load(folder).tokenizer_json)
    found = tokenizer.encode("a <|call|>b<|end|>").ids
    assert found == [ord("a"), 300, ord("b"), 301]
    assert tokenizer.decode(found, skip_special_tokens=True) == "a<|call|>b"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda text: text.replace("IQ==", "!!!!"), "is no file of tiktoken's"),
        (lambda text: text.replace("IQ== 33\n", ""), "their ranks are not 0 to"),
        (lambda text: text.replace("IQ== 33\n", "ISEhIQ== 33\n"), "has no token for 1 of the 256 bytes"),
    ],
)
def test_a_damaged_file_is_named(damage: Any, reason: str, tmp_path: Path, private_cache: Path) -> None:
    folder = save(tmp_path / "kimi", "TikTokenTokenizer", trained_ranks(KIMI, 280))
    file = folder / "tiktoken.model"
    file.write_text(damage(file.read_text()))
    with pytest.raises(ModelError, match=f"tiktoken.model.*{reason}|tiktoken.model {reason}"):
        load(folder)
