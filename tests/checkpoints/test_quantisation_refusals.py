"""Quantisation configs that cannot be served are refused, and what they say is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import quantised_checkpoints as made
import tiny_models
import torch
from torch import Tensor

from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints import expressions
from headrace.executor.checkpoints.checkpoint import open_checkpoint
from headrace.executor.checkpoints.formats import format_of
from headrace.executor.checkpoints.formats._scaled import scales_of_rows
from headrace.executor.checkpoints.formats.bitsandbytes import BitsAndBytes
from headrace.ipc.failure import ModelError


@pytest.fixture(scope="module")
def gptq_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gptq")
    made.write(folder, tiny_models.build("llama", num_hidden_layers=1), *made.gptq())
    return folder


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "AWQ weights in the layout gemv"),
        (made.gptq()[0] | {"checkpoint_format": "marlin"}, "in the layout marlin, which is one kernel's own"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "ModelOpt's W4A8_AWQ is not supported; FP8, "),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int3"}}},
            "Quark weights of int3 are not supported",
        ),
        (
            made.quark("int4")[0] | {"export": {"pack_method": "shuffled"}},
            "Quark config's pack_method is 'shuffled'; reorder and order are known",
        ),
        ({"quant_method": "compressed-tensors"}, "the compressed-tensors config has no config_groups"),
        (made.compressed("W4A16", **made.W4)[0] | {"format": "marlin-24"}, "layout marlin-24 .*: 2:4 sparse weights"),
        (
            {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:fp8"},
            "AutoRound's layout auto_round:fp8",
        ),
        ({"quant_method": "torchao", "quant_type": "int4"}, "quant_type is 'int4'; one of torchao's own configs"),
        ({"quant_method": "hqq", "nbits": 3, "group_size": 32}, "HQQ weights of 3 bits are not supported; 1, 2, 4 and"),
        ({"quant_method": "hqq", "nbits": 4, "group_size": 32, "axis": 0}, "in groups along the outputs"),
        (
            made.compressed("W4A16", **made.W4)[0] | {"ignore": ["lm_head", "re:("]},
            r"the compressed-tensors config's ignore has 're:\(', which is no regular expression: missing \)",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"targets": ["Linear", "re:*v"], "weights": made.W4}},
            },
            r"the targets of the compressed-tensors group group_0 has 're:\*v', which is no regular",
        ),
        (
            made.compressed("NVFP4", **(made.F4 | {"symmetric": False}))[0],
            "group_0 has floats with zero points",
        ),
        (made.compressed("W4A16", **made.W4)[0] | {"ignore": "lm_head"}, "ignore is 'lm_head'; a list of modules'"),
        (made.gptq()[0] | {"dynamic": {r"-:[": {}}}, r"the GPTQ config's dynamic has '-:\[', which is no regular"),
        (made.quark("int4")[0] | {"exclude": ["re:)"]}, r"the Quark config's exclude has 're:\)', which is no regular"),
        (
            made.quark("int4")[0] | {"layer_quant_config": {"re:+": made.quark("int4")[0]["global_quant_config"]}},
            r"the Quark config's layer_quant_config has 're:\+', which is no regular expression",
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "extra_config": {"(": {"bits": 16}}},
            r"the AutoRound config's extra_config has '\(', which is no regular expression",
        ),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "AConfig", "_data": {"re:?": {}}}}},
            r"the torchao config's quant_type has 're:\?', which is no regular expression",
        ),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size is 128; two whole numbers are expected"),
        ({"quant_method": "fp8", "weight_scale_semantics": "log"}, "weight_scale_semantics is 'log'; inverse is known"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "the fp8 config's fmt is 'e5m2'; e4m3 is known"),
        (
            {"quant_method": "fp8", "expert_dtype": "fp6"},
            "the fp8 config's expert_dtype is 'fp6'; fp4 and fp8 are known",
        ),
        ({"quant_method": "mxfp4", "scale_bias": 3}, "the mxfp4 config has scale_bias=3, which is not known"),
        (made.gptq()[0] | {"rotation": "hadamard"}, "rotation='hadamard': inputs of some layers are rotated while"),
        (made.gptq()[0] | {"adapter": {"name": "lora"}}, "adapter={'name': 'lora'}: low-rank corrections beside"),
        (made.gptq()[0] | {"is_marlin_format": True}, "is_marlin_format=True: the weights lie in the order of one GPU"),
        (made.gptq()[0] | {"scale_of_tomorrow": 2}, "the gptq config has scale_of_tomorrow=2, which is not known"),
        (
            {"quant_method": "auto-round", "bits": 4, "rotation_config": {"hadamard_type": "random"}},
            "rotation_config={'hadamard_type': 'random'}: inputs of some layers are rotated",
        ),
        *(
            (
                made.compressed("W4A16", **made.W4)[0]
                | {
                    "transform_config": {
                        "config_groups": {
                            "R4": {
                                "type": "hadamard",
                                "apply": [
                                    {"targets": ["re:.*down_proj"], "location": "weight_input", "inverse": True},
                                    {"targets": ["re:.*down_proj"], "location": location},
                                ],
                            }
                        }
                    }
                },
                f"transform_config has R4, which transforms the {location} of modules while the model computes",
            )
            for location in ("input", "output", "k_cache", "q_attn")
        ),
        (
            made.compressed("W4A16", **made.W4)[0] | {"transform_config": ["R1"]},
            r"transform_config is \['R1'\]; an obj",
        ),
        (
            made.compressed("fp8", **(made.W8 | {"type": "float", "block_structure": "128"}))[0],
            "block_structure is '128'; two whole numbers above 0",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"W4A16": ["Linear"]}},
            "W4A16 of .* says nothing of w",
        ),
        (
            made.quark("fp4")[0] | {"algo_config": [{"name": "rotation", "r1": True, "r4": True}]},
            "algo_config has rotation with r4: inputs that are rotated while the model computes",
        ),
        (made.quark("fp4")[0] | {"algo_config": [{"name": "svdquant"}]}, "svdquant: low-rank corrections are not"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32},
            "ModelOpt's NVFP4 in groups of 32 is not supported; groups of 16 are",
        ),
        (
            {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "pre_quant_scale": True}},
            "the modelopt config's quantization has pre_quant_scale=True: inputs that are scaled before they",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {}},
            "MIXED_PRECISION needs quantized_layers, with the algorithm of each module",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": 4}}},
            "ModelOpt's 4 is not supported; FP8, ",
        ),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "AWQConfig", "_data": {"step": "load"}}}},
            "torchao's AWQConfig is not supported; Int8WeightOnlyConfig, ",
        ),
        (
            {"quant_method": "hqq", "quant_config": {"scale_quant_params": {"nbits": 8}, "weight_quant_params": {}}},
            "scale_quant_params={'nbits': 8}: scales and zero points that are quantised themselves",
        ),
    ],
)
def test_each_format_names_a_config_that_it_cannot_serve(
    gptq_folder: Path, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    whole = json.loads((gptq_folder / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    (tmp_path / "model.safetensors").write_bytes((gptq_folder / "model.safetensors").read_bytes())
    with pytest.raises(ModelError, match=message):
        open_checkpoint(Options(model=str(tmp_path)))


ENDLESS = r"(\w|\.|[a-z])+$(?<!j)"
"""It is tried in exponentially many ways on a module's name."""


@pytest.mark.parametrize(
    "config",
    [
        made.gptq()[0] | {"dynamic": {ENDLESS: {"bits": 8}}},
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": [f"re:{ENDLESS}"], "weights": made.W4}},
        },
        made.quark("int4")[0] | {"layer_quant_config": {f"re:{ENDLESS}": made.quark("int4")[0]["global_quant_config"]}},
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "extra_config": {ENDLESS: {"bits": 8}}},
    ],
    ids=lambda config: str(config["quant_method"]),
)
def test_an_expression_that_never_ends_is_given_up(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "MOST_S", 0.05)
    format_ = format_of({"quantization_config": config}, None)
    assert format_ is not None
    with pytest.raises(ModelError, match="config: its regular expressions for modules' names take too long to match"):
        format_.scheme("model.layers.0.self_attn.q_proj")


def state_of(**state: Any) -> Tensor:
    text = json.dumps({"shape": [2, 64], "blocksize": 32, **state})
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def in_4_bits(state: Tensor, absmax: Tensor) -> dict[str, Tensor]:
    codes = torch.arange(64, dtype=torch.uint8)
    nested = {"nested_absmax": torch.ones(1), "nested_quant_map": torch.linspace(-1, 1, 256)}
    return {
        **{"weight": codes, "state": state, "absmax": absmax, "quant_map": torch.linspace(-1, 1, 16)},
        **(nested if absmax.dtype == torch.uint8 else {}),
    }


def test_sizes_of_blocks_beyond_the_matrix_take_no_memory() -> None:
    """A file may say any: they are compared with what it stores."""
    read = BitsAndBytes("nf4").read
    beyond = read("m", in_4_bits(state_of(blocksize=64 << 40), torch.ones(1)))
    whole = read("m", in_4_bits(state_of(blocksize=64), torch.ones(2)))
    assert torch.equal(beyond.scales, whole.scales)
    bytes_ = torch.zeros(4, dtype=torch.uint8)
    first, second = (
        read("m", in_4_bits(state_of(nested_blocksize=size, nested_offset=0.5), bytes_)) for size in (1 << 50, 4)
    )
    assert torch.equal(first.scales, second.scales)
    scales, size = scales_of_rows("m", (2, 64), torch.ones(1, 1), None, (1 << 50, 1 << 50))
    assert (scales.tolist(), size) == ([[1.0], [1.0]], 64)


@pytest.mark.parametrize(
    "state",
    [
        state_of(nested_blocksize=4, nested_offset=10**400),
        state_of(nested_blocksize=4, nested_offset=1e300),
        torch.full((100_000,), ord("["), dtype=torch.uint8),
    ],
    ids=["an integer beyond all floats", "a number beyond float32", "no end"],
)
def test_a_state_that_is_no_sound_one_is_refused(state: Tensor) -> None:
    with pytest.raises(ModelError, match="the quantised weights of m do not fit their config: the quant_state"):
        BitsAndBytes("nf4").read("m", in_4_bits(state, torch.zeros(4, dtype=torch.uint8)))
