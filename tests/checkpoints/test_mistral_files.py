"""Folders as Mistral publishes them: params.json and consolidated files."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from published_models import MISTRAL_NAMES, mistral_params, with_neighbouring_pairs
from safetensors.torch import save_file
from test_models import reference_logits
from tiny_models import state_of

from headrace import LLM, SamplingParams
from headrace.executor.checkpoints.hub import HubChoice, _patterns
from headrace.ipc.failure import ModelError, OptionError

ENGINE: dict[str, Any] = {"in_process": True, "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 128}


def save_as_mistral(model: Any, folder: Path, **more: Any) -> Path:
    config, state = model.config.to_dict(), {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for name, tensor in with_neighbouring_pairs(state_of(model), head_dim).items():
        for theirs, own in MISTRAL_NAMES.items():
            name = name.replace(theirs, own)
        state[name] = tensor.contiguous()
    folder.mkdir()
    names = sorted(state)
    for number, part in enumerate((names[::2], names[1::2]), 1):
        save_file({name: state[name] for name in part}, folder / f"consolidated-0000{number}-of-00002.safetensors")
    (folder / "params.json").write_text(json.dumps(mistral_params(config) | {"head_dim": head_dim} | more))
    return folder


@pytest.mark.parametrize("name", ["mistral", "mixtral"])
def test_consolidated_files_give_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    model = tiny_models.build(name)
    moe = {"moe": {"num_experts": 5, "num_experts_per_tok": 2}} if name == "mixtral" else {}
    folder = save_as_mistral(model, tmp_path / name, **moe)
    numbers = random.Random(3)
    prompt = [numbers.randrange(3, tiny_models.VOCAB_SIZE) for _ in range(30)]
    with LLM(str(folder), **ENGINE) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        answer = list(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)
        ended = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=4, logit_bias={2: 100}), use_tqdm=False)
    assert answer == reference_logits(model, prompt, answer).argmax(-1).tolist()
    assert len(set(answer)) > 3
    assert ended[0].outputs[0].finish_reason == "stop", "the tokenizers' end of an answer is known"


def test_where_both_lie_the_format_asked_for_is_read(tmp_path: Path) -> None:
    published = tiny_models.save("mistral", tmp_path / "published")
    own = save_as_mistral(tiny_models.build("mistral", seed=1), tmp_path / "own")
    for file in own.iterdir():
        shutil.copy(file, published)
    params, answers = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), {}
    for load_format in ("auto", "safetensors", "mistral"):
        with LLM(str(published), load_format=load_format, **ENGINE) as llm:
            answers[load_format] = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids
    assert answers["auto"] == answers["safetensors"] != answers["mistral"]


def test_folders_without_these_files_or_with_what_is_not_supported_are_refused(tmp_path: Path) -> None:
    plain = tiny_models.save("mistral", tmp_path / "plain")
    with pytest.raises((ModelError, OptionError), match=r"holds no params\.json with consolidated"):
        LLM(str(plain), load_format="mistral", **ENGINE)
    quantised = save_as_mistral(tiny_models.build("mistral"), tmp_path / "fp8", quantization={"qformat_weight": "fp8"})
    with pytest.raises(ModelError, match=r"the quantization of this params\.json is not supported"):
        LLM(str(quantised), **ENGINE)


def test_of_a_hub_model_consolidated_files_are_fetched_when_asked_for_or_alone() -> None:
    own = ["consolidated.safetensors", "params.json", "tekken.json"]
    both = ["config.json", "model.safetensors", *own]
    assert set(_patterns(own, HubChoice())) == set(own)
    assert set(_patterns(both, HubChoice(load_format="mistral"))) == {"config.json", *own}
    assert "consolidated.safetensors" not in _patterns(both, HubChoice())
