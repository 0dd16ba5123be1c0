"""Heads that a config ties to the embedding: a head of the checkpoint's own is used, and nothing of a head is lost."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import quantised_checkpoints as made
import tiny_models
import torch
from model_driver import DictSource
from safetensors.torch import load_file, save_file
from test_cpu_decoder import LIMITS
from test_models import config_of, random_prompts, reference, reference_logits, state_of
from test_quantisation import MOST_ERROR, Driver, error_of, opened
from thinned import every
from tiny_families import FAMILIES
from torch import Tensor

from headrace.executor.checkpoints import declared_weights
from headrace.executor.cpu.decoder import CpuDecoder
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.executor.models.sizes import weight_shapes
from headrace.ipc.failure import ModelError
from headrace.kernels.cpu import build

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
Tensors = dict[str, Tensor]


def eager(spec: ArchSpec, tensors: Tensors) -> Decoder:
    return Decoder(spec, DictSource(tensors), torch.float32)


def compiled(spec: ArchSpec, tensors: Tensors) -> CpuDecoder:
    return CpuDecoder(spec, DictSource(tensors), torch.float32, LIMITS)


def checked_against(model: Any, decoder: Decoder | CpuDecoder) -> None:
    """Compares the decoder's logits with the model's."""
    (prompt,) = random_prompts((17,))
    (answer,), (logits,) = Driver(decoder).greedy([prompt], 4, chunk=16)
    expected = reference_logits(model, prompt, answer)
    assert torch.allclose(logits, expected, atol=1e-4, rtol=1e-4)


def with_head(head: Tensor) -> Any:
    """The tied model with a head of its own."""
    model = copy.deepcopy(reference("llama3"))
    model.lm_head.weight = torch.nn.Parameter(head)
    return model


def one_row_apart(table: Tensor) -> Tensor:
    found = table.clone()
    found[7] += 0.5
    return found


@pytest.mark.parametrize("make", [eager, compiled])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda table: table + 0.2 * table.std() * torch.randn_like(table), id="near"),
        pytest.param(torch.randn_like, id="unrelated"),
        pytest.param(one_row_apart, id="one row"),
    ],
)
def test_a_head_of_its_own_is_used_where_the_config_ties_it(
    change: Callable[[Tensor], Tensor], make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    state = state_of(reference("llama3"))
    torch.manual_seed(0)
    head = change(state[TABLE])
    decoder = make(spec_from_config(config_of("llama3")), state | {HEAD: head})
    checked_against(with_head(head), decoder)
    assert f"{HEAD} is no copy of {TABLE}: {HEAD} is used" in caplog.text


@pytest.mark.parametrize("tied", every(2, [True, False, None]))
@pytest.mark.parametrize("own", ["equal", "other", None])
@pytest.mark.parametrize("num_rows", [320, declared_weights.ROWS_COMPARED + 320])
def test_a_folders_own_head_is_used_whatever_the_config_says(
    tmp_path: Path, tied: bool | None, own: str | None, num_rows: int
) -> None:
    model = tiny_models.build("llama3", vocab_size=num_rows)
    state = {name: each.contiguous().clone() for name, each in state_of(model).items() if name != HEAD}
    torch.manual_seed(0)
    heads = {"equal": state[TABLE].clone(), "other": torch.randn_like(state[TABLE])}
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    config.pop("tie_word_embeddings")
    config |= {} if tied is None else {"tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(state if own is None else state | {HEAD: heads[own]}, tmp_path / "model.safetensors")
    if own is None and not tied:
        with pytest.raises(ModelError, match=r"no weight lm_head\.weight"):
            opened(tmp_path)
        return
    model.lm_head.weight = torch.nn.Parameter(heads[own or "equal"])
    checked_against(model, opened(tmp_path))


def test_a_head_of_another_shape_is_named() -> None:
    tensors = state_of(reference("llama3")) | {HEAD: torch.randn(320, 32)}
    with pytest.raises(
        ModelError, match=r"weight lm_head\.weight has shape \[320, 32\], but the config needs \[320, 64"
    ):
        eager(spec_from_config(config_of("llama3")), tensors)


@pytest.mark.parametrize("make", [eager, compiled])
@pytest.mark.parametrize("family", ["phi", "gptj"])
def test_a_tied_head_keeps_its_bias(family: str, make: Callable[..., Any]) -> None:
    model = tiny_models.make(FAMILIES[family], tie_word_embeddings=True, vocab_size=tiny_models.VOCAB_SIZE)
    torch.manual_seed(0)
    with torch.no_grad():
        model.lm_head.bias.normal_()
    spec = spec_from_config(model.config.to_dict() | {"architectures": [type(model).__name__]})
    assert spec.tied_head
    assert "lm_head.bias" in weight_shapes(spec)
    checked_against(model, make(spec, state_of(model)))


def test_a_bias_that_the_architecture_has_no_place_for_is_named_where_the_head_is_tied() -> None:
    tensors = state_of(reference("llama3")) | {"lm_head.bias": torch.ones(320)}
    with pytest.raises(ModelError, match=r"no place for: lm_head\.bias"):
        eager(spec_from_config(config_of("llama3")), tensors)


@pytest.mark.parametrize("make", [eager, compiled])
def test_the_rows_of_a_tied_head_are_divided_by_their_norms_and_the_embeddings_are_not(
    make: Callable[..., Any],
) -> None:
    state, spec = state_of(reference("llama3")), spec_from_config(config_of("llama3"))
    decoder = make(replace(spec, unit_head=True), state)
    checked_against(with_head(torch.nn.functional.normalize(state[TABLE])), decoder)


def test_a_quantised_head_is_used_where_the_config_ties_it(tmp_path: Path) -> None:
    config, writer = made.gptq()
    model = made.write(tmp_path, copy.deepcopy(reference("llama3")), config | {"lm_head": True}, writer)
    torch.manual_seed(0)
    tensors, values = writer("lm_head", torch.randn(320, 64))
    stored = load_file(tmp_path / "model.safetensors")
    stored |= {f"lm_head{name}": each.contiguous() for name, each in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"]
    model.lm_head.weight = torch.nn.Parameter(values.double())
    assert error_of(opened(tmp_path), model) < MOST_ERROR
