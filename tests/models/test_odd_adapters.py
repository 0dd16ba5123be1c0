"""Adapters as other tools and other versions of peft write them, against what peft computes of the same files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from model_driver import Driver
from peft_adapters import PeftModels
from safetensors.torch import load_file, save_file
from test_adapters import EXPERTS, PROMPTS, make, reference
from thinned import every
from torch import Tensor

from headrace.executor.adapters.peft_config import config_of
from headrace.executor.adapters.slots import AdapterSlots
from headrace.executor.cpu.decoder import CpuDecoder
from headrace.executor.models.decoder import Decoder
from headrace.ipc.adapters import RowAdapter
from headrace.ipc.failure import ModelError

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Edit = Callable[[Path], object]
BASE = "llama_biases"
TIED = "llama3"


def config(*, keep: tuple[str, ...] = (), **changes: Any) -> Edit:
    """keep: the only keys that stay, if there are any."""

    def edit(folder: Path) -> None:
        before = json.loads((folder / CONFIG).read_text())
        rest = {key: value for key, value in before.items() if key in keep} if keep else before
        (folder / CONFIG).write_text(json.dumps(rest | changes))

    return edit


def each(change: Callable[[str, Tensor], tuple[str, Tensor] | None]) -> Edit:
    """Changes the name and values of each tensor, or leaves it out."""

    def edit(folder: Path) -> None:
        tensors = load_file(folder / TENSORS)
        changed = dict(found for pair in tensors.items() if (found := change(*pair)) is not None)
        assert changed.keys() != tensors.keys() or any(changed[key] is not tensors[key] for key in changed)
        save_file(changed, folder / TENSORS)

    return edit


def renamed(old: str, new: str) -> Edit:
    return each(lambda name, values: (name.replace(old, new), values))


def stored_as(a: torch.dtype, b: torch.dtype) -> Edit:
    return each(lambda name, values: (name, values.to(a if "lora_A" in name else b)))


def as_torch_file(folder: Path) -> None:
    torch.save(load_file(folder / TENSORS), folder / "adapter_model.bin")
    (folder / TENSORS).unlink()


OLD_KEYS = (
    "bias",
    "fan_in_fan_out",
    "inference_mode",
    "lora_alpha",
    "lora_dropout",
    "modules_to_save",
    "peft_type",
    "r",
)
LEAST_KEYS = ("peft_type", "r", "lora_alpha", "target_modules")


@dataclass(frozen=True)
class Odd:
    config: dict[str, Any] = field(default_factory=dict)
    """With which peft makes it."""
    edit: Edit | None = None
    model: str = BASE
    as_made: bool = False
    """peft itself does not read the edited files; what it made is expected."""


CASES: dict[str, Odd] = {
    "keys of peft 0.2": Odd(
        {"target_modules": ["q_proj", "v_proj"]},
        config(keep=OLD_KEYS, target_modules=["q_proj", "v_proj"], enable_lora=None, merge_weights=False),
    ),
    "the least keys": Odd({}, config(keep=LEAST_KEYS)),
    "unset keys of a later peft": Odd({}, config(use_new=False, new_config=None, new_names=[], new_map={})),
    "unsloth": Odd(
        {}, config(auto_mapping={"base_model_class": "Llama", "unsloth_fixed": True}, peft_version="0.18.1")
    ),
    "no task, of training": Odd({}, config(task_type=None, inference_mode=False, lora_dropout=0.5)),
    "one dtype for each factor": Odd({}, stored_as(torch.bfloat16, torch.float32)),
    "float16": Odd({}, stored_as(torch.float16, torch.float16)),
    "float64": Odd({}, stored_as(torch.float64, torch.float64)),
    "a torch file": Odd({}, as_torch_file),
    "an expression of targets": Odd({"target_modules": r".*layers\.1\..*(q|v)_proj"}),
    "whole names of targets": Odd(
        {"target_modules": ["model.layers.0.mlp.up_proj", "model.layers.1.self_attn.o_proj"]}
    ),
    "one layer": Odd({"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}),
    "all but one": Odd({"exclude_modules": ["o_proj"]}),
    "targets that have no tensors": Odd({}, each(lambda name, values: None if "q_proj" in name else (name, values))),
    "only a whole head": Odd(
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "size": 0.1},
        each(lambda name, values: None if "q_proj" in name else (name, values)),
    ),
    "the first pattern of two": Odd({"alpha_pattern": {r"layers\.1\..*_proj": 32, "q_proj": 2}}),
    "the same two reversed": Odd({"alpha_pattern": {"q_proj": 2, r"layers\.1\..*_proj": 32}}),
    "a pattern from the start": Odd({"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 24, "^q_proj": 90}}),
    "ranks by expression": Odd({"rank_pattern": {r".*\.(up|down)_proj": 2}, "use_rslora": True}),
    "an alpha with a fraction": Odd({"lora_alpha": 6.5}),
    "gaussian": Odd({"init_lora_weights": "gaussian"}),
    "orthogonal": Odd({"init_lora_weights": "orthogonal"}),
    "biases of adapted layers": Odd({"bias": "lora_only", "target_modules": ["q_proj", "down_proj"]}),
    "magnitudes as weights": Odd(
        {"use_dora": True, "size": 0.1},
        renamed("lora_magnitude_vector", "lora_magnitude_vector.weight"),
        as_made=True,
    ),
    "names with default": Odd({}, renamed(".weight", ".default.weight"), as_made=True),
    "names without a start": Odd({}, renamed("base_model.model.", ""), as_made=True),
    "a whole head by its wrapper": Odd(
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "size": 0.1},
        renamed("lm_head.weight", "lm_head.modules_to_save.default.weight"),
        as_made=True,
    ),
    "ends saved beside factors": Odd({"target_modules": ["embed_tokens", "lm_head"]}),
    "tied, whole embedding": Odd(
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "size": 0.1}, model=TIED
    ),
    "tied, whole head": Odd({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "size": 0.1}, model=TIED),
    "tied, factors of the head": Odd({"target_modules": ["lm_head", "v_proj"]}, model=TIED),
    "tied whole ends stay tied": Odd(
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True, "size": 0.1},
        model=TIED,
    ),
    "tied factors stay tied": Odd(
        {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}, model=TIED
    ),
    "a scaled embedding": Odd({"target_modules": ["embed_tokens", "q_proj"]}, model="gemma3"),
    "a scaled whole embedding": Odd(
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "size": 0.02}, model="gemma3"
    ),
    "magnitudes of the embedding": Odd({"use_dora": True, "target_modules": ["embed_tokens", "v_proj"], "size": 0.1}),
    "magnitudes of a scaled embedding": Odd(
        {"use_dora": True, "use_rslora": True, "target_modules": ["embed_tokens", "q_proj"], "size": 0.05},
        model="gemma3",
    ),
    "magnitudes and rsLoRA": Odd({"use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 2}, "size": 0.1}),
    "mica": Odd({"init_lora_weights": "mica"}),
    "eva": Odd({"init_lora_weights": "eva", "eva_config": None}),
    "scaled logits": Odd({"target_modules": ["lm_head", "q_proj"]}, model="cohere"),
    "transposed matrices": Odd({"fan_in_fan_out": True, "target_modules": ["c_attn", "c_fc"]}, model="gpt2"),
    "a scale for one tensor of experts": Odd(
        {
            "target_modules": ["o_proj"],
            "target_parameters": EXPERTS,
            "alpha_pattern": {"experts.down_proj": 32, "mlp.experts": 3},
        },
        model="qwen3_moe",
    ),
    "a rank for one tensor of experts": Odd(
        {"target_modules": ["o_proj"], "target_parameters": EXPERTS, "rank_pattern": {"experts.gate_up_proj": 2}},
        model="qwen3_moe",
    ),
}


@cache
def made(model: str) -> tuple[Decoder | CpuDecoder, AdapterSlots]:
    return make(model, "program")


@pytest.mark.parametrize("case", every(3, CASES))
def test_an_odd_adapter_is_computed_as_by_peft(case: str, tmp_path: Path) -> None:
    odd = CASES[case]
    models = PeftModels(reference(odd.model), tmp_path)
    path = models.make("one", **odd.config)
    if odd.edit is not None:
        odd.edit(path)
    if not odd.as_made:
        models.take("one")
    decoder, slots = made(odd.model)
    slots.load(0, str(path))
    uses = ((RowAdapter(0, 1.0),), ())
    answers, logits = Driver(decoder).greedy(PROMPTS[1:2] * 2, 3, chunk=16, adapters=uses)
    check_each(answers, logits, models)


def check_each(answers: list[list[int]], logits: list[Tensor], models: PeftModels) -> None:
    """Of one prompt with the adapter and without."""
    changed = logits[0][0] - logits[1][0]
    assert float(changed.abs().max()) > 1e-3, "the adapter changes nothing"
    for name, answer, rows in zip(("one", ""), answers, logits, strict=True):
        expected = models.logits(name, PROMPTS[1], answer)
        assert answer == expected.argmax(-1).tolist(), name
        assert float((rows - expected).abs().max()) <= 1e-4 * float(expected.abs().max()), name


REFUSED: dict[str, tuple[Odd, str]] = {
    "trained tokens": (Odd({"trainable_token_indices": [5]}), "trainable_token_indices is not supported"),
    "parts of fused matrices": (
        Odd({}, config(enable_lora=[True, False, True])),
        "enable_lora is not supported: it leaves out parts",
    ),
    "a set key of a later peft": (Odd({}, config(use_new=True, new_config=None)), "unknown keys use_new$"),
    "mlx": (
        Odd({}, config(keep=("r",), fine_tune_type="lora", lora_parameters={"rank": 4, "scale": 2.0})),
        "peft_type is None, and LORA is supported",
    ),
    "diffusers": (
        Odd({}, renamed("base_model.model.model.layers", "transformer.blocks")),
        "no matrices that adapters change under the names transformer.blocks.0",
    ),
    "kohya": (Odd({}, renamed(".lora_A.weight", ".lora_down.weight")), "has one of its two factors only"),
    "wrapped twice": (
        Odd({}, renamed("base_model.model.", "base_model.model.base_model.model.")),
        "under the names base_model.model.model.layers.0",
    ),
    "a compiled model": (
        Odd({}, renamed("base_model.model.", "base_model.model._orig_mod.")),
        "under the names _orig_mod.model.layers.0",
    ),
    "norms": (
        Odd({"target_modules": ["q_proj"], "modules_to_save": ["norm"]}),
        r"under the names model\.layers\.0\.input_layernorm",
    ),
    "more tokens": (
        Odd(
            {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
            each(lambda name, values: (name, values if "lora" in name else torch.cat((values, values[:3])))),
        ),
        r"is of a vocabulary of \d+, and the model's has \d+: it was trained with tokens added",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_computed_is_refused_with_the_cause(case: str, tmp_path: Path) -> None:
    odd, message = REFUSED[case]
    path = PeftModels(reference(odd.model), tmp_path).make("one", **odd.config)
    if odd.edit is not None:
        odd.edit(path)
    with pytest.raises(ModelError, match=message) as refusal:
        made(odd.model)[1].load(0, str(path))
    assert str(path) in str(refusal.value)


def test_the_order_of_patterns_is_part_of_an_identity() -> None:
    """The first that matches a module applies."""
    patterns = {"q_proj": 2, ".*_proj": 32}
    one, other, again = (
        config_of({"peft_type": "LORA", "alpha_pattern": dict(given)}, Path("a")).canonical
        for given in (patterns.items(), reversed(patterns.items()), patterns.items())
    )
    assert one == again
    assert one != other
