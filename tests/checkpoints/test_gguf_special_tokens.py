"""The tokens that end the answers of GGUF files: as llama.cpp decides them (src/llama-vocab.cpp)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from test_tokenizer_bundle import bundle_of
from tiny_gguf import save_gguf

from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.checkpoint import open_checkpoint

HARMONY = ("<|return|>", "<|call|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|endoftext|>")
OTHERS = ("[EOS]", "[EOT]", "<EOT>", "_<EOT>", "<end_of_utterance>", "[e~[")
GGML = "tokenizer.ggml."


def metadata(tokens: Sequence[str], kind: str = "gpt2", **more: Any) -> dict[str, Any]:
    """A vocabulary of a few letters and these tokens, which are control tokens from id 20 on."""
    texts = [*"abcdefghijklmnopqrst", *tokens]
    found = {"model": kind, "tokens": texts, "token_type": [1] * 20 + [3] * len(tokens), **more}
    return {GGML + key: value for key, value in found.items()}


def save(folder: Path, metadata: Mapping[str, Any]) -> Path:
    model = tiny_models.build("llama", vocab_size=64, bos_token_id=None, eos_token_id=None)
    return save_gguf(model, folder / "m.gguf", tokenizer=metadata)


@pytest.mark.parametrize(
    ("tokens", "more", "ends"),
    [
        (HARMONY, {"eos_token_id": 20}, {"<|return|>", "<|call|>", "<|endoftext|>"}),
        (HARMONY[1:], {"eos_token_id": 25}, {"<|call|>", "<|end|>", "<|endoftext|>"}),
        (("<|flush|>", "<|calls|>", "<|end|>"), {"eos_token_id": 20}, {"<|flush|>", "<|calls|>"}),
        (("<|endoftext|>", "<|end|>", "<|user|>"), {"eos_token_id": 20}, {"<|endoftext|>", "<|end|>"}),
        (("</s>", "<|im_start|>", "<|im_end|>"), {"eos_token_id": 20}, {"</s>", "<|im_end|>"}),
        (("<s>", "<|im_end|>", "x"), {"eos_token_id": 20, "eot_token_id": 22}, {"<s>", "x", "<|im_end|>"}),
        (
            ("<s>", "<|eom_id|>", "<|eot_id|>", "x"),
            {"eos_token_id": 20, "eom_token_id": 23},
            {"<s>", "x", "<|eom_id|>", "<|eot_id|>"},
        ),
        (
            ("<eos>", "</s>", "<turn|>", "<|tool_response>"),
            {"eos_token_id": 20},
            {"<eos>", "<turn|>", "<|tool_response>"},
        ),
        (
            ("e", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_prefix|>"),
            {"eos_token_id": 20},
            {"e", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"},
        ),
        (("e", "<|fim_pad|>", "y"), {"eos_token_id": 20, "fim_pad_token_id": 22}, {"e", "y"}),
        (OTHERS, {}, set(OTHERS)),
        (("x", "<\uff5cend▁of▁sentence\uff5c>"), {"eos_token_id": 99}, {"<\uff5cend▁of▁sentence\uff5c>"}),
        (("x", "y"), {}, set()),
    ],
)  # fmt: skip
def test_answers_end_where_llama_cpp_ends_them(
    tokens: Sequence[str], more: Mapping[str, Any], ends: set[str], tmp_path: Path
) -> None:
    held = metadata(tokens, **more)
    checkpoint = open_checkpoint(Options(model=str(save(tmp_path, held))))
    assert {held[GGML + "tokens"][each] for each in checkpoint.eos_token_ids} == ends
    if more.get("eos_token_id", 99) < 99:
        assert checkpoint.eos_token_ids[0] == more["eos_token_id"]


def test_a_file_that_names_no_special_tokens_has_those_of_its_kind(tmp_path: Path, private_cache: Path) -> None:
    path = save(tmp_path, metadata(("x",), "llama", scores=[0.0] * 21))
    checkpoint = open_checkpoint(Options(model=str(path)))
    assert checkpoint.eos_token_ids == (2,)
    assert bundle_of(path).special_tokens == {"bos_token": "b", "eos_token": "c", "unk_token": "a"}
    types = [1] * 11 + [3] * 10
    falcon = save(tmp_path, {**metadata(("x",)), GGML + "token_type": types})
    assert open_checkpoint(Options(model=str(falcon))).eos_token_ids == (11,)
    gpt2 = save(tmp_path, metadata(("x",)))
    assert open_checkpoint(Options(model=str(gpt2))).eos_token_ids == (), "token 11 is text here"
