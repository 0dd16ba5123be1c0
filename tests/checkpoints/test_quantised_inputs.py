"""Quantised checkpoints that mean the inputs of their matrices to be int8 too: the CPU program rounds them so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import quantised_checkpoints as made
import tiny_models
import torch
from model_driver import Driver
from test_quantisation import EXACT_ERROR, kinds_of, opened, relative_to_spread
from thinned import every

from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.checkpoint import open_checkpoint
from headrace.executor.cpu.decoder import CpuDecoder
from headrace.executor.models.decoder import Decoder
from headrace.kernels.cpu import build
from headrace.kernels.cpu.experts.moe import PackedExperts
from headrace.kernels.cpu.linear.linear import PackedLinear
from headrace.kernels.grouped import InputRounding

pytestmark = pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))

ROUNDINGS = {
    "token": InputRounding(),
    "shifted token": InputRounding(shifted=True),
    "static": InputRounding(0.03),
    "static, zero": InputRounding(0.03, -5),
}
CLEAR = 1e-4
"""Codes that an input keeps from the border between two: more than float32 errs by."""
NUM_CLEAR = 5


def check_rounded(decoder: CpuDecoder | Decoder, model: Any, inputs: InputRounding) -> None:
    """Prompts of one token whose inputs are all clear of borders have the logits of the model with rounded inputs."""
    clear, exact, unrounded = [], [], []
    for token in range(model.config.vocab_size):
        with made.inputs_rounded(model, inputs) as clearances, torch.no_grad():
            logits = model(torch.tensor([[token]]), use_cache=False).logits[0, -1]
        if min(clearances) > CLEAR:
            clear.append([token])
            exact.append(logits)
            unrounded.append(model(torch.tensor([[token]]), use_cache=False).logits[0, -1].detach())
        if len(clear) == NUM_CLEAR:
            break
    assert len(clear) == NUM_CLEAR
    _, found = Driver(decoder).greedy(clear, 1, chunk=64)
    for logits, expected, other in zip(found, exact, unrounded, strict=True):
        assert relative_to_spread(logits[0], expected) < EXACT_ERROR
        assert relative_to_spread(other, expected) > 100 * EXACT_ERROR, "rounding is seen"


@pytest.mark.parametrize(
    ("family", "rounding", "scheme"),
    every(
        2,
        [
            *(("llama", each, "W8A8") for each in ROUNDINGS),
            ("qwen3_moe", "token", "W8A8"),
            ("llama", "token", "W4A8"),
            ("qwen3_moe", "token", "W4A8"),
            ("llama", "static, zero", "W4A16"),
            ("llama", "shifted token", "W4A16 zeros"),
        ],
    ),
)
def test_inputs_become_int8_where_the_checkpoint_means_it(
    family: str, rounding: str, scheme: str, tmp_path: Path
) -> None:
    inputs, weights = ROUNDINGS[rounding], made.W8 if scheme == "W8A8" else made.W4
    built = tiny_models.build(family, num_hidden_layers=1)
    model = made.write(tmp_path, built, *made.compressed(scheme, inputs, **weights))
    decoder = opened(tmp_path)
    assert kinds_of(decoder) - {"F32"} == {f"int{weights['num_bits']}"}
    check_rounded(decoder, model, inputs)


@pytest.mark.parametrize(
    ("config", "rounds"),
    [
        (made.compressed("W8A8", InputRounding(), **made.W8), True),
        (made.torchao("Int8DynamicActivationInt8Weight"), True),
        (made.compressed("W4A8", InputRounding(), **made.W4), True),
        (made.compressed("W8A16", **made.W8), False),
        (made.torchao("Int8DynamicActivationIntxWeight"), True),
        (made.torchao("Int8WeightOnly"), False),
        (made.compressed("W4A8", **made.W4), False),
    ],
)
def test_a_format_says_whether_inputs_become_int8(
    config: tuple[dict[str, Any], made.Writer], rounds: bool, tmp_path: Path
) -> None:
    made.write(tmp_path, tiny_models.build("llama"), *config)
    quantisation = open_checkpoint(Options(model=str(tmp_path))).quantisation
    assert quantisation is not None
    assert quantisation.rounds_inputs == rounds


@pytest.mark.parametrize(
    ("weight", "kind", "rounding"), [("Int8Weight", "int8", "token"), ("IntxWeight", "int4", "shifted token")]
)
def test_torchaos_inputs_become_int8_where_its_config_means_it(
    weight: str, kind: str, rounding: str, tmp_path: Path
) -> None:
    built = tiny_models.build("llama", num_hidden_layers=1)
    model = made.write(tmp_path, built, *made.torchao(f"Int8DynamicActivation{weight}"))
    decoder = opened(tmp_path)
    assert kinds_of(decoder) == {kind}
    check_rounded(decoder, model, ROUNDINGS[rounding])


def test_experts_with_a_static_scale_each_keep_finer_inputs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = made.compressed("W8A8", InputRounding(0.03), **made.W8)
    made.write(tmp_path, tiny_models.build("qwen3_moe"), *config)
    decoder = opened(tmp_path)
    assert "inputs of experts keep 16 bits: their static scales are of one expert each" in caplog.text
    assert not any(weight.descriptor.rounding for weight in _experts_of(decoder))


def _experts_of(decoder: CpuDecoder) -> list[PackedLinear]:
    found: list[PackedLinear] = []
    for layer in decoder._model.layers:
        for held in layer.ffn.values():
            if isinstance(held, PackedExperts):
                found += [*held.gate_up, *held.down]
    assert found
    return found
