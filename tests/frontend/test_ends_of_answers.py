"""Answers end at the tokenizer's own eos and at the configs', as in vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models

from headrace import LLM, SamplingParams

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose config and generation config both end at a token that it does not write."""
    path = tiny_models.save("llama", tmp_path_factory.mktemp("model"), tokenizer=True)
    for name in ("config.json", "generation_config.json"):
        held = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps({**held, "eos_token_id": 0}))
    return path


def answer(folder: Path, **options: Any) -> Any:
    with LLM(str(folder), in_process=True, dtype="float32", max_model_len=64, **options) as llm:
        params = SamplingParams(max_tokens=12, temperature=0)
        return llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0]


def test_an_answer_ends_at_the_tokenizers_own_eos(folder: Path) -> None:
    whole = answer(folder)
    assert (len(whole.token_ids), whole.finish_reason) == (12, "length")
    end = next(each for each in whole.token_ids[2:] if each not in whole.token_ids[:2])
    length = whole.token_ids.index(end) + 1
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    text = next(token for token, token_id in tokenizer["model"]["vocab"].items() if token_id == end)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": text}))
    ended = answer(folder)
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == (whole.token_ids[:length], "stop", None)
    assert answer(folder, skip_tokenizer_init=True).token_ids == whole.token_ids
    replaced = answer(folder, override_generation_config={"eos_token_id": whole.token_ids[0]})
    assert replaced.token_ids == whole.token_ids[:1], "asked for in their place"
