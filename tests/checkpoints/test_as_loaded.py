"""Float weights that become a format's codes as they are read: `quantization=experts_int8` and `bitsandbytes`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import quantised_checkpoints as made
import tiny_models
import torch
from rank_threads import pool_for_each_rank
from test_packed_engine import started
from test_parallel_model import THREADS, first_logprobs
from test_quantisation import EXACT_ERROR, MOST_ERROR, error_of, kinds_of
from torch import Tensor

from headrace.core.options.engine_options import Options
from headrace.core.options.quantization_names import STORED, TO_FORMS
from headrace.core.options.resolve import check_stored_format
from headrace.executor.checkpoints.checkpoint import open_checkpoint
from headrace.executor.checkpoints.formats import formats, forms_as_loaded
from headrace.executor.checkpoints.sources.sharded_state import save
from headrace.executor.cpu.decoder import CpuDecoder
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.families import spec_from_config
from headrace.ipc.failure import ModelError, OptionError
from headrace.kernels.cpu import build

__all__ = ["pool_for_each_rank"]  # a fixture

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 320}


def nf4_values(weight: Tensor) -> Tensor:
    """By the definition: of each block of 64 the nearest of the table's values, times the largest magnitude."""
    blocks = weight.float().reshape(-1, 64)
    most = blocks.abs().amax(-1, keepdim=True)
    codes = ((blocks / most)[..., None] - made.NF4).abs().argmin(-1)
    return (made.NF4[codes] * most).view(weight.shape)


def int8_values(weight: Tensor) -> Tensor:
    return made.in_int8(weight.float())[2]


def saved(family: str, folder: Path, values: Any, parts: tuple[str, ...], **changes: Any) -> Any:
    """Writes a float checkpoint; returns transformers' model of what its matrices are to become, in float64."""
    tiny_models.save(family, folder, **changes)
    model = tiny_models.build(family, **changes)
    state = model.state_dict()
    for name, tensor in state.items():
        if not any(part in name for part in parts):
            continue
        rows = tensor.flatten(0, -2)
        state[name] = values(rows).view(tensor.shape)
    model.load_state_dict(state)
    model.config._experts_implementation = "eager"
    return model.double()


def decoder_of(folder: Path, quantization: str) -> CpuDecoder:
    executor, plan, _ = started(folder, quantization=quantization, dtype="float32")
    assert isinstance(executor._model, CpuDecoder)
    assert plan.model.stored_as == quantization
    return executor._model


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen3_moe"])
def test_matrices_become_nf4_as_they_are_loaded(family: str, tmp_path: Path) -> None:
    sizes = SIZES | ({"moe_intermediate_size": 64} if family == "qwen3_moe" else {})
    model = saved(family, tmp_path, nf4_values, ("_proj",), **sizes)
    decoder = decoder_of(tmp_path, "bitsandbytes")
    assert kinds_of(decoder) == {"float4", *(["F32"] if family == "qwen3_moe" else [])}, "a router stays in floats"
    assert error_of(decoder, model) < EXACT_ERROR


def test_experts_become_8_bits_as_they_are_loaded(tmp_path: Path) -> None:
    model = saved("qwen3_moe", tmp_path, int8_values, (".experts.",))
    decoder = decoder_of(tmp_path, "experts_int8")
    assert kinds_of(decoder) == {"int8", "F32"}
    assert {weight.type_name for layer in decoder._model.layers for weight in layer.mixer["qkv"].weights} == {"F32"}
    assert error_of(decoder, model) < MOST_ERROR


def test_op_by_op_the_same_values_are_floats(tmp_path: Path) -> None:
    model = saved("llama", tmp_path, nf4_values, ("_proj",), **SIZES)
    checkpoint = open_checkpoint(Options(model=str(tmp_path), quantization="bitsandbytes"))
    decoder = Decoder(spec_from_config(checkpoint.config), checkpoint.weights(), torch.float32, "cpu")
    assert error_of(decoder, model) < EXACT_ERROR


def test_the_plan_and_the_memory_are_those_of_packed_weights(tmp_path: Path) -> None:
    tiny_models.save("llama", tmp_path, **SIZES)
    executor, plan, reading = started(tmp_path, quantization="bitsandbytes")
    reasons = {decision.name: decision.reason for decision in plan.decisions}
    assert reasons["quantization"] == "asked for; the float32 weights become so as they are loaded"
    assert plan.weights_stay_packed
    kept = open_checkpoint(Options(model=str(tmp_path), quantization="bitsandbytes")).kept_bytes(executor.found.spec)
    assert kept is not None
    assert abs(reading.weights_bytes / kept - 1) < 0.05


def test_rows_that_are_no_whole_blocks_stay_floats_which_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_models.save("llama", tmp_path, hidden_size=64, intermediate_size=96)
    with caplog.at_level(logging.WARNING):
        decoder = decoder_of(tmp_path, "bitsandbytes")
    assert kinds_of(decoder) == {"float4", "F32"}
    assert "matrices with rows of 96 weights are not quantised, as groups of 64 do not divide them" in caplog.text


@pytest.mark.parametrize(("family", "name"), [("llama", "bitsandbytes"), ("qwen3_moe", "experts_int8")])
def test_ranks_divide_what_becomes_packed(family: str, name: str, tmp_path: Path) -> None:
    tiny_models.save(family, tmp_path, **SIZES)
    one = first_logprobs(tmp_path, dtype="float32", quantization=name)
    two = first_logprobs(
        tmp_path, dtype="float32", quantization=name, distributed_executor_backend=THREADS, tensor_parallel_size=2
    )
    assert two == pytest.approx(one, abs=0.06)


def test_what_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    tiny_models.save("llama", tmp_path / "dense", hidden_size=48, intermediate_size=96)
    with pytest.raises(OptionError, match="experts_int8 quantises experts of LlamaForCausalLM, and it has none"):
        started(tmp_path / "dense", quantization="experts_int8")
    said = "bitsandbytes quantises .* of LlamaForCausalLM, and groups of 64 divide none of its rows"
    with pytest.raises(OptionError, match=said):
        started(tmp_path / "dense", quantization="bitsandbytes")
    made.write(tmp_path / "stored", tiny_models.build("llama"), *made.gptq())
    with pytest.raises(OptionError, match=r"quantization=bitsandbytes does not fit this checkpoint.* stored as gptq"):
        started(tmp_path / "stored", quantization="bitsandbytes")
    with pytest.raises(OptionError, match="quantization=experts_int8 makes none"):
        save(Options(model=str(tmp_path / "dense"), quantization="experts_int8"), tmp_path / "state")


def test_weights_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tiny_models.save("llama", tmp_path, **SIZES)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = torch.nan
    save_file(tensors, file)
    with pytest.raises(ModelError, match=f"the weight {name} holds infinities or NaN"):
        started(folder, quantization="bitsandbytes")


def test_the_core_knows_the_names_before_any_framework_does(tmp_path: Path) -> None:
    assert set(TO_FORMS) == forms_as_loaded().keys()
    assert set(STORED) == formats().keys()
    folder = tiny_models.save("llama", tmp_path, **SIZES)
    for name in TO_FORMS:
        check_stored_format(Options(model=str(folder), quantization=name))
    with pytest.raises(OptionError, match="asks for a checkpoint that is stored so"):
        check_stored_format(Options(model=str(folder), quantization="awq"))
    with pytest.raises(OptionError, match="the demo model is a GGUF file"):
        check_stored_format(Options(quantization="bitsandbytes"))
