"""The ways in which tools store the zero points of integer weights: each gives the matrix that the tool computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import quantised_checkpoints as made
import tiny_models
import torch
from safetensors.torch import save_file
from thinned import pairs
from torch import Tensor

from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.checkpoint import open_checkpoint
from headrace.ipc.failure import ModelError

MODULE = "model.layers.0.self_attn.q_proj"
SIZES = {"num_hidden_layers": 1}
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


def read(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor:
    """The matrix of MODULE in a checkpoint in which it alone is quantised."""
    model = tiny_models.build("llama", **SIZES)
    state = {name: tensor.clone() for name, tensor in tiny_models.state_of(model).items()}
    del state[f"{MODULE}.weight"]
    state |= {f"{MODULE}{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    whole = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "quantization_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    return open_checkpoint(Options(model=str(folder))).weights().get(f"{MODULE}.weight")


def gptq_tensors(bits: int, group: int, stored: Tensor, codes: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """stored: the zero points [n, groups] as they are in the checkpoint."""
    return {
        ".qweight": made.packed(codes, bits).T,
        ".qzeros": made.packed(stored.T, bits),
        ".scales": scales.T,
    }


WEIGHT = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("bits", "group"), pairs((2, 3, 4, 8), (32, -1)))
@pytest.mark.parametrize("less", [0, 1], ids=["as it is", "minus 1"])
@pytest.mark.parametrize(
    "named",
    [
        {"checkpoint_format": "gptq"},
        {"checkpoint_format": "gptq_v2"},
        {"format": "gptq_v2"},
        {"checkpoint_format": "gptq", "format": "gptq"},
        {"checkpoint_format": "gptq", "format": "gptq_v2"},
        {},
    ],
    ids=str,
)
def test_symmetric_weights_have_the_middle_as_their_zero_point_however_it_is_stored(
    bits: int, group: int, less: int, named: dict[str, Any], tmp_path: Path
) -> None:
    codes, scales, zeros, values = made.affine(WEIGHT, bits, group, symmetric=True)
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": True, **named}
    found = read(tmp_path, config, gptq_tensors(bits, group, zeros - less, codes, scales))
    assert torch.allclose(found, values, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("bits", "group"), pairs((2, 3, 4, 8), (32, -1)))
@pytest.mark.parametrize("sym", [False, True, None], ids=["sym false", "sym true", "no sym"])
@pytest.mark.parametrize(
    ("named", "less"),
    [
        ({"checkpoint_format": "gptq"}, 1),
        ({}, 1),
        ({"format": "gptq"}, 1),
        ({"checkpoint_format": "gptq_v2"}, 0),
        ({"format": "gptq_v2"}, 0),
        ({"checkpoint_format": "gptq_v2", "format": "gptq_v2"}, 0),
    ],
    ids=str,
)
def test_zero_points_that_differ_are_read_in_the_layout_that_the_config_names(
    bits: int, group: int, sym: bool | None, named: dict[str, Any], less: int, tmp_path: Path
) -> None:
    codes, scales, zeros, values = made.affine(WEIGHT, bits, group, symmetric=False)
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, **named}
    config |= {} if sym is None else {"sym": sym}
    found = read(tmp_path, config, gptq_tensors(bits, group, zeros - less, codes, scales))
    assert torch.allclose(found, values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_zero_point_of_0_minus_1_is_read_as_gptqmodel_stores_it(bits: int, tmp_path: Path) -> None:
    """GPTQModel subtracts a word with 1 in each code, so that 0 borrows from its neighbour; of 3 bits each code is
    subtracted alone and wraps around."""
    generator, top = torch.Generator().manual_seed(0), (1 << bits) - 1
    codes = torch.randint(0, top + 1, (64, 64), generator=generator)
    zeros = torch.randint(0, top + 1, (64, 2), generator=generator)
    assert (zeros == 0).any()
    scales = torch.rand(64, 2, generator=generator).half() + 0.5
    tensors = gptq_tensors(bits, 32, zeros, codes, scales)
    if bits == 3:
        tensors[".qzeros"] = made.packed((zeros.T - 1) & top, bits)
    else:
        tensors[".qzeros"] = tensors[".qzeros"] - ONES[bits]
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": False, "checkpoint_format": "gptq"}
    expected = (codes.view(64, 2, 32) - zeros[..., None]) * scales.float()[..., None]
    assert torch.equal(read(tmp_path, config, tensors), expected.view(64, 64))


def test_two_layouts_of_zero_points_in_one_config_are_named(tmp_path: Path) -> None:
    codes, scales, zeros, _ = made.affine(WEIGHT, 4, 32, symmetric=False)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    config |= {"checkpoint_format": "gptq", "format": "gptq_v2"}
    tensors = gptq_tensors(4, 32, zeros, codes, scales)
    with pytest.raises(ModelError, match="names two layouts: checkpoint_format gptq, format gptq_v2"):
        read(tmp_path, config, tensors)


def test_what_a_gptq_config_says_of_the_symmetry_of_single_modules_counts(tmp_path: Path) -> None:
    codes, scales, zeros, values = made.affine(WEIGHT, 4, 32, symmetric=True)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq"}
    config |= {"dynamic": {".*q_proj": {"sym": True}}}
    found = read(tmp_path, config, gptq_tensors(4, 32, zeros, codes, scales))
    assert torch.allclose(found, values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("layout", ["auto_round", "auto_round:auto_gptq", "auto_round:gptqmodel"])
@pytest.mark.parametrize("less", [0, 1], ids=["as it is", "minus 1"])
def test_autorounds_symmetric_weights_have_the_middle_in_each_layout(layout: str, less: int, tmp_path: Path) -> None:
    codes, scales, zeros, values = made.affine(WEIGHT, 4, 32, symmetric=True)
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "packing_format": layout}
    found = read(tmp_path, config, gptq_tensors(4, 32, zeros - less, codes, scales))
    assert torch.allclose(found, values, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "extra",
    [
        {MODULE: {"group_size": 16}},
        {"q_proj": {"group_size": 16}},
        {"q_pro(j)": {"group_size": 16}},
        {"layers.0.*": {"group_size": 32}, MODULE: {"group_size": 16}},
    ],
    ids=str,
)
def test_autorounds_extra_config_has_what_differs_alone(extra: dict[str, Any], tmp_path: Path) -> None:
    codes, scales, zeros, values = made.affine(WEIGHT, 4, 16, symmetric=False)
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "packing_format": "auto_round"}
    found = read(tmp_path, config | {"extra_config": extra}, gptq_tensors(4, 16, zeros, codes, scales))
    assert torch.allclose(found, values, rtol=1e-6, atol=0)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32}


def awq_tensors(symmetric: bool, group: int = 32) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros, values = made.affine(WEIGHT, 4, group, symmetric=symmetric)
    return {".qweight": made.awq_words(codes.T), ".qzeros": made.awq_words(zeros.T), ".scales": scales.T}, values


@pytest.mark.parametrize(
    ("config", "symmetric"),
    [
        ({"zero_point": True}, False),
        ({}, False),
        ({"zero_point": False}, False),  # kernels read those that are stored
        ({"zero_point": True}, True),
        ({"zero_point": False}, True),
        ({"zero_point": False, "sym": True}, True),
        ({"sym": True}, True),
        ({"sym": False}, False),
    ],
    ids=str,
)
def test_awqs_zero_points_are_those_that_are_stored(config: dict[str, Any], symmetric: bool, tmp_path: Path) -> None:
    tensors, values = awq_tensors(symmetric)
    assert torch.allclose(read(tmp_path, AWQ | config, tensors), values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("stored", ["none", "zeros"])
def test_awqs_symmetric_weights_have_the_middle_as_their_zero_point(stored: str, tmp_path: Path) -> None:
    tensors, values = awq_tensors(symmetric=True)
    qzeros = tensors.pop(".qzeros")
    if stored == "zeros":
        tensors[".qzeros"] = torch.zeros_like(qzeros)
    assert torch.allclose(read(tmp_path, AWQ | {"zero_point": False}, tensors), values, rtol=1e-6, atol=0)
