"""Checkpoints that others serve although something about them is odd: no architectures, a weight twice, a broken
generation_config.json, or a language model beside towers of other media."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from model_driver import Driver
from multimodal_models import MULTIMODAL
from safetensors.torch import load_file, save_file
from test_checkpoint import assert_holds, in_two, open_folder, stored_state, write_index
from thinned import every
from tiny_recurrent import FAMILIES as RECURRENT
from torch import Tensor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from headrace import LLM, SamplingParams, kernels
from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.checkpoint import config_at_hand, open_checkpoint
from headrace.executor.checkpoints.declared_weights import as_declared
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import families, named_architecture, spec_from_config
from headrace.executor.models.families._model_types import COMPUTED_BY, MODEL_TYPES
from headrace.ipc.failure import ModelError

PROMPT = [5, 9, 200, 31, 7]


def altered(folder: Path, **changes: Any) -> Path:
    """A tiny Llama whose config.json has these values; ... leaves a key out."""
    tiny_models.save("llama", folder, tokenizer=True)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: each for key, each in config.items() if each is not ...}))
    return folder


@pytest.mark.parametrize("named", [..., [], None, ["SomethingElse", "LlamaForCausalLM"]])
def test_a_model_is_known_by_its_type_or_by_the_architecture_that_a_family_has(named: Any, tmp_path: Path) -> None:
    model = str(altered(tmp_path, architectures=named))
    with LLM(model, in_process=True, max_model_len=32, num_gpu_blocks_override=8) as llm:
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(max_tokens=2), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2


@pytest.mark.parametrize("named", ["LlamaForSequenceClassification", 5, True, {}, [["LlamaForCausalLM"]], [None]])
@pytest.mark.parametrize("is_given", [False, True], ids=["stored", "given"])
def test_architectures_that_are_no_list_of_names_are_refused(named: Any, is_given: bool, tmp_path: Path) -> None:
    """Since the model type alone would name a model with another head, or none."""
    folder = altered(tmp_path, **({} if is_given else {"architectures": named}))
    options = Options(model=str(folder), hf_overrides={"architectures": named} if is_given else {})
    for reading in (open_checkpoint, config_at_hand):
        with pytest.raises(ModelError, match=r"the config's architectures are .*; a list of names is expected"):
            reading(options)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("in_section", [False, True], ids=["", "of a text config"])
def test_a_key_that_nobody_knows_is_named_once(
    load_format: str, in_section: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Although an engine reads its config in several places."""
    folder = altered(tmp_path, my_note="x")
    if in_section:
        text = json.loads((folder / "config.json").read_text())
        config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text}
        (folder / "config.json").write_text(json.dumps(config))
    options: dict[str, Any] = {"max_model_len": 32, "num_gpu_blocks_override": 8, "load_format": load_format}
    with LLM(str(folder), in_process=True, **options):
        pass
    assert caplog.text.count("my_note") == 1


def test_what_names_no_model_is_refused_with_what_is_known() -> None:
    with pytest.raises(ModelError, match=r'no "architectures", and its model_type is squid; known: .*llama'):
        spec_from_config({"model_type": "squid"})
    with pytest.raises(ModelError, match="SomethingElse is not supported"):
        spec_from_config({"architectures": ["SomethingElse", "AnotherThing"]})


def test_every_model_type_has_the_architecture_that_transformers_gives_it() -> None:
    named = {
        kind: name if isinstance(name, str) else name[0] for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    }
    named |= dict(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    named.pop("internlm3")  # of which transformers has no class of its own
    assert {kind: named.pop(kind) for kind in COMPUTED_BY} == COMPUTED_BY
    encoders = (
        *("bert", "camembert", "distilbert", "electra", "ernie", "gte", "modernbert", "mpnet", "nomic_bert", "roberta"),
        "xlm-roberta",
    )
    named |= {kind: MODEL_MAPPING_NAMES[kind] for kind in encoders}
    assert set(MODEL_TYPES.values()) <= families().keys()
    assert {kind: name for kind, name in MODEL_TYPES.items() if named.get(kind, name) != name} == {}
    assert named_architecture({"model_type": "qwen3"}) == "Qwen3ForCausalLM"


def test_the_index_says_which_of_two_files_has_a_weight(tmp_path: Path) -> None:
    state = stored_state(tiny_models.build("llama"))
    first, second = in_two(state)
    name = next(iter(second))
    other = {name: torch.zeros_like(second[name])}
    for kind, index, write in (
        ("safetensors", "model.safetensors.index.json", save_file),
        ("bin", "pytorch_model.bin.index.json", torch.save),
    ):
        folder = tiny_models.save("llama", tmp_path / kind)
        (folder / "model.safetensors").unlink()
        stem = "model" if kind == "safetensors" else "pytorch_model"
        parts = {f"{stem}-0000{i}-of-00002.{kind}": part for i, part in enumerate((first, second), 1)}
        write_index(folder, index, parts)
        for (file, part), more in zip(parts.items(), (other, {}), strict=True):
            write(part | more, folder / file)
        assert torch.equal(open_folder(folder).weights().get(name), state[name])


def test_a_weight_that_the_index_leaves_out_is_read(tmp_path: Path) -> None:
    folder = tiny_models.save("llama", tmp_path)
    state = load_file(folder / "model.safetensors")
    listed = {name: each for name, each in state.items() if name != "lm_head.weight"}
    write_index(folder, "model.safetensors.index.json", {"model.safetensors": listed})
    assert "lm_head.weight" in open_folder(folder).weights().names()


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_folder_that_was_written_twice_has_an_index_of_other_files(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a model that was saved in parts is saved in one file, too. The index holds where its files are there."""
    folder, write = tiny_models.save("llama", tmp_path), save_file if kind == "safetensors" else torch.save
    (folder / "model.safetensors").unlink()
    name = "model" if kind == "safetensors" else "pytorch_model"
    state, whole = stored_state(tiny_models.build("llama")), folder / f"{name}.{kind}"
    parts = {f"{name}-0000{i}-of-00002.{kind}": part for i, part in enumerate(in_two(state), 1)}
    write_index(folder, f"{name}.{kind}.index.json", parts)
    write(state, whole)
    assert_holds(open_folder(folder).weights(), state)
    assert caplog.text.count(f"lists 2 files, none of which is there; {whole.name} is read") == 1
    for file, part in parts.items():
        write(part, folder / file)
    write({key: torch.zeros_like(each) for key, each in state.items()}, whole)
    assert_holds(open_folder(folder).weights(), state)
    assert caplog.text.count(f"does not list {whole.name}, which is not read") == 1
    next(folder.glob(f"{name}-00002*")).unlink()
    with pytest.raises(ModelError, match=rf"lacks {name}-00002-of-00002\.{kind}"):
        open_folder(folder).weights()


@pytest.mark.parametrize(
    ("family", "whole", "part"),
    [
        ("phi3", "self_attn.qkv_proj.weight", "self_attn.k_proj.weight"),
        ("qwen3_5_moe", "mlp.experts.gate_up_proj", "mlp.experts.3.up_proj.weight"),
    ],
)
def test_a_matrix_that_is_there_by_itself_and_in_another_is_refused(
    family: str, whole: str, part: str, tmp_path: Path
) -> None:
    """Nothing says which one is meant, as where two checkpoints were merged."""
    model = tiny_models.make(RECURRENT[family]) if family in RECURRENT else tiny_models.build(family)
    state = {name: each.contiguous() for name, each in model.state_dict().items() if "rotary" not in name}
    start = "model.layers.1."
    assert start + whole in state
    model.config.save_pretrained(tmp_path)
    for more in ({}, {start + part: torch.zeros(4, 4)}):
        save_file(state | more, tmp_path / "model.safetensors")
        checkpoint = open_folder(tmp_path, dtype="float32")
        spec = spec_from_config(checkpoint.config | {"architectures": [type(model).__name__]})
        if not more:
            assert start + part in as_declared(spec, checkpoint.weights()).names()
            continue
        with pytest.raises(ModelError, match=rf"holds {re.escape(start + part)} twice, once .*{re.escape(whole)}"):
            as_declared(spec, checkpoint.weights())


@pytest.mark.parametrize("ids", [-1, [-1], [-1, 7]])
def test_an_end_token_of_minus_one_is_none(ids: Any, tmp_path: Path) -> None:
    found = open_folder(altered(tmp_path, eos_token_id=ids)).eos_token_ids
    assert found == ((7,) if ids == [-1, 7] else ())


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_a_broken_generation_config_costs_its_defaults_alone(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    altered(tmp_path)
    (tmp_path / "generation_config.json").write_text(text)
    assert open_folder(tmp_path).generation_config == {}
    assert "generation_config.json" in caplog.text
    assert "served without its defaults" in caplog.text
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        open_folder(tmp_path, generation_config=str(tmp_path))


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["abc", "int8", 16, ["float32"]])
def test_a_dtype_that_is_none_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"the config's dtype is .*; bfloat16, double, float, float16"):
        open_folder(altered(tmp_path, **({"dtype": ...} | {key: value})))


@pytest.mark.parametrize(
    ("value", "expected"), [("torch.half", "float16"), ("float64", "float32"), ("auto", "float32")]
)
def test_names_of_float_types_are_understood(value: str, expected: str, tmp_path: Path) -> None:
    assert open_folder(altered(tmp_path, dtype=value)).dtype_name == expected


def as_saved(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return state


def as_in_memory(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of transformers' modules, which newer checkpoints have."""
    found = {name.replace("language_model.model.", "model.language_model."): each for name, each in state.items()}
    return {re.sub(r"^(model\.)?language_model\.lm_head", "lm_head", name): each for name, each in found.items()}


def as_published(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names that HyperCLOVA X Think's own code gives the language model, which is a whole one within the model."""
    return {name.replace("language_model.", "language_model.model.", 1) if "lm_head" not in name else name: each
            for name, each in state.items()}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layout"),
    every(3, [*itertools.product(MULTIMODAL, (as_saved, as_in_memory)), ("hyperclova x think", as_published)]),
)
def test_the_language_model_of_a_multimodal_checkpoint_is_served(
    name: str, layout: Callable[[dict[str, Tensor]], dict[str, Tensor]], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = MULTIMODAL[name]().eval().float()
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(std=0.2)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    # transformers saves the layers of Kimi K2.5's language model under a name of its tower's; published files do not.
    saved = {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): saved[name] for name in saved
    }
    save_file(layout(saved), tmp_path / "model.safetensors")
    checkpoint = open_folder(tmp_path)
    spec = spec_from_config(checkpoint.config).for_context(64)
    decoder = Decoder(spec, checkpoint.weights(), torch.float32, choose=kernels.choose_reference)
    answers, logits = Driver(decoder).greedy([PROMPT], 3, 16, 40)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([PROMPT + answers[0][:-1]])).logits[0, len(PROMPT) - 1 :]
    # transformers' class leaves out the factor of Cohere's logits, which its class of the language model alone applies.
    factor = spec.logit_scale if name in {"aya vision", "cohere 2 vision"} else 1.0
    torch.testing.assert_close(logits[0], expected * factor, atol=2e-4, rtol=2e-4)


def test_a_section_under_its_older_name_is_read() -> None:
    """As InternVL's own code has it."""
    text = tiny_models.build("qwen2").config.to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
    config = {"architectures": ["InternVLChatModel"], "llm_config": text, "vision_config": {}, "select_layer": -1}
    assert spec_from_config(config).layers == spec_from_config(text).layers


def test_a_multimodal_config_without_a_language_model_is_refused() -> None:
    with pytest.raises(ModelError, match="LlavaForConditionalGeneration has no text_config"):
        spec_from_config({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}})


def test_a_text_config_without_sizes_has_those_of_its_class() -> None:
    """As LLaVA 1.5's has."""
    text = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5, "vocab_size": 32064}
    config = {"architectures": ["LlavaForConditionalGeneration"], "text_config": text, "image_token_index": 32000}
    spec, full = spec_from_config(config), transformers.LlamaConfig(**text)
    assert (spec.hidden_size, spec.num_layers, spec.num_heads) == (
        full.hidden_size, full.num_hidden_layers, full.num_attention_heads,
    )  # fmt: skip
    assert (spec.intermediate_size, spec.max_positions) == (full.intermediate_size, full.max_position_embeddings)
