"""Models that transformers' code computes with our cache, scheduler and attention: its tokens, and what is refused."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from test_dense_families import THREADS, expect_answers
from test_models import reference
from thinned import every
from tiny_families import FOREIGN
from torch import Tensor

from headrace import LLM, HeadraceError, ModelError, SamplingParams

SOME = ("kolibri1", "ernie4_5_moe")
"""Which `make test` runs; the rest are system tests."""
EVERY = [name if name in SOME else pytest.param(name, marks=pytest.mark.system) for name in FOREIGN]
SMALL: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 64, "max_num_seqs": 2, "skip_tokenizer_init": True, "in_process": True,
    "kv_cache_memory_bytes": 1 << 20,
}  # fmt: skip


@pytest.mark.parametrize("name", EVERY)
def test_chunks_preemption_and_the_prefix_cache_give_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    folder = tiny_models.save(name, tmp_path / name)
    slides = getattr(reference(name).config, "sliding_window", None) is not None
    expect_answers(folder, name, slides, model_impl="transformers", num_gpu_blocks_override=60 if slides else 12)


def test_auto_takes_a_family_first_and_says_when_transformers_computes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(max_tokens=2, temperature=0)
    with caplog.at_level(logging.WARNING):
        with LLM(str(tiny_models.save("llama", tmp_path / "llama")), **SMALL) as llm:
            llm.generate([[5]], params, use_tqdm=False)
        assert "transformers' code" not in caplog.text
        foreign = tiny_models.save("kolibri1", tmp_path / "foreign")
        with LLM(str(foreign), **SMALL) as llm:
            llm.generate([[5]], params, use_tqdm=False)
    assert "Kolibri1ForCausalLM is computed by transformers' code with the paged cache" in caplog.text
    assert "the architecture Kolibri1ForCausalLM is not supported" in caplog.text
    with pytest.raises(ModelError, match="the architecture Kolibri1ForCausalLM is not supported"):
        LLM(str(foreign), model_impl="vllm", **SMALL)
    with pytest.raises(HeadraceError, match="tensor_parallel_size=2 does not apply"):
        LLM(str(foreign), tensor_parallel_size=2, distributed_executor_backend=THREADS, **SMALL)


def test_logits_of_prompt_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    folder = tiny_models.save("kolibri1", tmp_path / "foreign")
    prompt = [5, 6, 7, 90, 3]
    with LLM(str(folder), **SMALL) as llm:
        (output,) = llm.generate(
            [prompt], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0), use_tqdm=False
        )
    with torch.inference_mode():
        exact = reference("kolibri1")(torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert isinstance(output.prompt_logprobs, list)
    for place, found in enumerate(output.prompt_logprobs[1:], 1):
        assert found is not None
        assert found[prompt[place]].logprob == pytest.approx(exact[place - 1, prompt[place]].item(), abs=1e-4)


def config_only(folder: Path, **config: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_what_nothing_can_compute_is_named_with_what_was_tried(tmp_path: Path) -> None:
    unknown = config_only(tmp_path / "unknown", architectures=["NobodyForCausalLM"], model_type="nobody")
    with pytest.raises(
        ModelError, match=r"NobodyForCausalLM is not supported.*transformers cannot compute Nobody"
    ) as told:
        LLM(unknown, load_format="dummy", **SMALL)
    assert "docs/models.md" in str(told.value.hint)
    encoder = config_only(tmp_path / "encoder", architectures=["AlbertModel"], model_type="albert")
    with pytest.raises(ModelError, match=r"AlbertModel is not supported.*Unrecognized configuration class") as told:
        LLM(encoder, load_format="dummy", **SMALL)
    assert "GPT2Config" not in str(told.value), "transformers lists all that it knows"
    foreign = {"architectures": ["OwnForCausalLM"], "model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    with pytest.raises(ModelError, match=r"brings code of its own.*trust_remote_code=True lets it run"):
        LLM(config_only(tmp_path / "own", **foreign), load_format="dummy", **SMALL)


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("xglm", {}, "does not go through transformers' table of attention functions"),
        ("doge", {}, "makes a mask of its own"),
        ("kolibri1", {"layer_types": ["full_attention", "linear_attention"]}, "layers of type linear_attention"),
    ],
)
def test_a_model_whose_attention_cannot_be_ours_is_refused_with_the_reason(
    name: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    from tiny_families import foreign
    from transformers import CONFIG_MAPPING

    tiny = foreign(name)
    config = CONFIG_MAPPING[name](**tiny.config).to_dict() | {"architectures": [tiny.model_class]} | changes
    with pytest.raises(ModelError, match=reason):
        LLM(config_only(tmp_path / name, **config), load_format="dummy", **SMALL)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_models.save("kolibri1", tmp_path / "foreign")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    needed = re.escape(str(list(tensors[name].shape)))
    for changed, message in (
        ({key: value for key, value in tensors.items() if key != name}, rf"no weight {name}"),
        (
            tensors | {name: torch.zeros(3, 5)},
            rf"weights have other shapes than the config needs: {name} is \[3, 5\] and {needed} is needed",
        ),
        (tensors | {"model.layers.1.extra.weight": torch.zeros(3)}, r"no place for: model.layers.1.extra.weight"),
    ):
        save_file(changed, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=message):
            LLM(str(folder), **SMALL)


@torch.inference_mode()
def last_states(model: Any, prompts: list[list[int]]) -> Tensor:
    """Of each prompt's last token, scaled to length 1."""
    states = [model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0, -1] for prompt in prompts]
    return torch.nn.functional.normalize(torch.stack(states), dim=1)


@pytest.mark.parametrize("name", every(10, [each for each in FOREIGN if each != "llama"]))
def test_states_of_transformers_code_are_pooled(name: str, tmp_path: Path) -> None:
    """Of a model that generates, and of one that was saved without its head; in chunks, and beside answers."""
    prompts = [[token % 100 + 3 for token in range(length)] for length in (1, 5, 17, 40)]
    whole, bare = tiny_models.save(name, tmp_path / "whole"), tmp_path / "bare"
    base = reference(name).base_model
    base.save_pretrained(bare)
    wanted = last_states(base, prompts)
    tight = SMALL | {"max_num_batched_tokens": 16, "model_impl": "transformers"}
    for folder, options in ((whole, {"runner": "pooling"}), (bare, {})):
        with LLM(str(folder), **tight, **options) as llm:
            assert llm.supported_tasks == ("embed", "token_embed")
            outputs = llm.embed(prompts, use_tqdm=False)
            assert (torch.tensor([each.outputs.embedding for each in outputs]) - wanted).abs().max() < 1e-5
            (tokens,) = llm.encode([prompts[1]], pooling_task="token_embed", use_tqdm=False)
            assert (tokens.outputs.data[-1] - wanted[1]).abs().max() < 1e-5
    with LLM(str(whole), **tight, runner="generate", convert="embed") as llm:
        outputs = llm.embed(prompts, use_tqdm=False)
        assert (torch.tensor([each.outputs.embedding for each in outputs]) - wanted).abs().max() < 1e-5
        (answer,) = llm.generate([prompts[2]], SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)
    with torch.inference_mode():
        ids = list(answer.outputs[0].token_ids)
        logits = reference(name)(torch.tensor([prompts[2] + ids[:-1]]), use_cache=False).logits[0]
    assert ids == logits[len(prompts[2]) - 1 :].argmax(-1).tolist()
