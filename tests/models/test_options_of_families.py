"""Options of families that few checkpoints use, against transformers: each changes the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from model_driver import DictSource, Driver
from test_models import config_of, reference_logits
from tiny_gguf import convert, saved_state
from tiny_models import state_of
from torch import Tensor

from headrace import kernels
from headrace.executor.checkpoints.sources.gguf.file import GGUFFile
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.ipc.failure import ModelError

PROMPT = [5, 9, 100, 31, 7]
OPTIONS: list[tuple[str, dict[str, Any], Any]] = [
    ("olmo", {"clip_qkv": 0.3}, None),
    ("olmoe", {"clip_qkv": 0.3}, None),
    ("mpt", {"attn_config": {"clip_qkv": 0.3}}, {"clip_qkv": None}),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, False),
    ("gpt2", {"scale_attn_weights": False}, True),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, False),
    ("gemma", {"hidden_act": "relu"}, "gelu"),
]


def logits_of(spec: ArchSpec, weights: Any) -> tuple[list[int], Tensor]:
    decoder = Decoder(spec, weights, torch.float32, choose=kernels.choose_reference)
    answers, logits = Driver(decoder).greedy([PROMPT], 3, 16, 40)
    return answers[0], logits[0]


@pytest.mark.parametrize(("name", "changed", "usual"), OPTIONS)
def test_an_option_is_computed_as_transformers_computes_it(name: str, changed: dict[str, Any], usual: Any) -> None:
    model = tiny_models.build(name, **changed)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    answer, logits = logits_of(spec_from_config(config), DictSource(state_of(model)))
    torch.testing.assert_close(logits, reference_logits(model, PROMPT, answer), atol=1e-4, rtol=1e-4)
    (key,) = changed
    _, others = logits_of(spec_from_config(config | {key: usual}), DictSource(state_of(model)))
    assert (others[0] - logits[0]).abs().max() > 1e-2  # after the same prompt


@pytest.mark.parametrize("name", ["olmo", "mpt"])
def test_a_gguf_files_clamp_is_computed(name: str, tmp_path: Path) -> None:
    model = tiny_models.build(name, **next(changed for each, changed, _ in OPTIONS if each == name))
    path = convert(type(model).__name__, model.config.to_dict(), saved_state(model), tmp_path / "model.gguf")
    file = GGUFFile(path)
    file.header.metadata[f"{name}.attention.clamp_kqv"] = 0.3
    answer, logits = logits_of(spec_from_config(file.config), file.weights())
    torch.testing.assert_close(logits, reference_logits(model, PROMPT, answer), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "value"), [("olmo", -1.0), ("olmo", 0.0), ("olmoe", "8")])
def test_a_clip_that_is_no_magnitude_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ModelError, match="clip_qkv must be"):
        spec_from_config(config_of(name) | {"clip_qkv": value})
