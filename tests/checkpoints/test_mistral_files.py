"""Folders as Mistral publishes them: params.json and consolidated files."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiny_models
from published_models import MISTRAL_NAMES, mistral_params, with_neighbouring_pairs
from safetensors.torch import save_file
from test_mistral_sentencepiece import train
from test_models import reference_logits
from test_tekken import HAS_LIBRARY, NUM_SPECIAL, PATTERN, SIZE, save_tekken
from test_tiktoken_files import TEXTS, by_rank
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


def test_a_folder_of_the_time_before_tekken_answers_texts(tmp_path: Path, private_cache: Path) -> None:
    trained = train(tmp_path)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(trained))
    model = tiny_models.build("mistral", vocab_size=len(theirs))
    own = save_as_mistral(model, tmp_path / "own")
    trained.rename(own / "tokenizer.model.v3")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(own), **{**ENGINE, "skip_tokenizer_init": False}) as llm:
        answer = llm.generate(["the mill's wheel"], params, use_tqdm=False)[0]
    prompt, tokens = [1, *theirs.encode("the mill's wheel")], list(answer.outputs[0].token_ids)
    assert answer.prompt_token_ids == prompt
    assert tokens == reference_logits(model, prompt, tokens).argmax(-1).tolist()


@pytest.mark.parametrize("mode", ["auto", "mistral"])
def test_mistrals_files_with_their_tokenizer_answer_as_the_same_weights_in_hugging_faces_files(
    mode: str, tmp_path: Path, private_cache: Path
) -> None:
    if mode == "mistral" and not HAS_LIBRARY:
        pytest.skip("mistral_common is not installed")
    model = tiny_models.build("mistral", vocab_size=SIZE + NUM_SPECIAL)
    own = save_as_mistral(model, tmp_path / "own")
    ranks = save_tekken(own)
    published = tmp_path / "published"
    model.save_pretrained(published)
    text, params = TEXTS[0], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    token_ids = [1, *(NUM_SPECIAL + rank for rank in by_rank(PATTERN, ranks, text))]
    with LLM(str(published), **ENGINE) as llm:
        expected = llm.generate([token_ids], params, use_tqdm=False)[0].outputs[0].token_ids
    formats = {"config_format": "mistral", "load_format": "mistral", "tokenizer_mode": mode}
    with LLM(str(own), **{**ENGINE, "skip_tokenizer_init": False}, **formats) as llm:
        answer = llm.generate([text], params, use_tqdm=False)[0]
        assert (answer.prompt_token_ids, answer.outputs[0].token_ids) == (token_ids, expected)
        assert answer.outputs[0].text == llm.get_tokenizer().decode(expected, skip_special_tokens=True)
        if mode == "mistral":
            chat = llm.chat([{"role": "user", "content": "Hello"}], params, use_tqdm=False)[0].prompt_token_ids
            assert chat is not None
            assert (chat[:2], chat[-1]) == ([1, 3], 4)


def test_where_both_lie_the_format_asked_for_is_read(tmp_path: Path) -> None:
    published = tiny_models.save("mistral", tmp_path / "published")
    own = save_as_mistral(tiny_models.build("mistral", seed=1), tmp_path / "own")
    for file in own.iterdir():
        shutil.copy(file, published)
    params, answers = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), {}
    asked: list[dict[str, Any]] = [
        {},
        {"load_format": "safetensors"},
        {"config_format": "hf"},
        {"load_format": "mistral"},
        {"config_format": "mistral"},
        {"config_format": "mistral", "load_format": "mistral"},
    ]
    for formats in asked:
        with LLM(str(published), **formats, **ENGINE) as llm:
            answers[str(formats)] = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].token_ids
    first, second = list(answers.values())[:3], list(answers.values())[3:]
    assert first == [first[0]] * 3
    assert second == [second[0]] * 3
    assert first[0] != second[0]


def test_folders_without_these_files_or_with_what_is_not_supported_are_refused(tmp_path: Path) -> None:
    plain = tiny_models.save("mistral", tmp_path / "plain")
    with pytest.raises((ModelError, OptionError), match=r"holds no params\.json with consolidated"):
        LLM(str(plain), load_format="mistral", **ENGINE)
    for formats in (
        {"config_format": "mistral", "load_format": "pt"},
        {"config_format": "hf", "load_format": "mistral"},
    ):
        with pytest.raises(OptionError, match=r"config_format=\w+ does not describe the weights of load_format=\w+"):
            LLM(str(plain), **formats, **ENGINE)
    own = save_as_mistral(tiny_models.build("mistral"), tmp_path / "own")
    with pytest.raises(OptionError, match=r"config_format=hf: .* has Mistral's own files alone"):
        LLM(str(own), config_format="hf", **ENGINE)
    shutil.copy(plain / "config.json", own)
    with LLM(str(own), **ENGINE) as llm:
        assert llm.generate([[5, 6]], SamplingParams(max_tokens=1), use_tqdm=False), "what fits the weights is read"
    quantised = save_as_mistral(tiny_models.build("mistral"), tmp_path / "fp8", quantization={"qformat_weight": "fp8"})
    with pytest.raises(ModelError, match=r"the quantization of this params\.json is not supported"):
        LLM(str(quantised), **ENGINE)


def test_of_a_hub_model_consolidated_files_are_fetched_when_asked_for_or_alone() -> None:
    own = ["consolidated.safetensors", "params.json", "tekken.json", "tokenizer.model.v3"]
    both = ["config.json", "model.safetensors", *own]
    assert set(_patterns(own, HubChoice())) == set(own)
    assert set(_patterns(both, HubChoice(load_format="mistral"))) == {"config.json", *own}
    assert "consolidated.safetensors" not in _patterns(both, HubChoice())
