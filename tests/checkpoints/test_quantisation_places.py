"""Where a checkpoint says how it is quantised: in its config, in that of its text model, or in a file beside it; and
what it says of its KV cache alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import quantised_checkpoints as made
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from test_cache_scales import OWN, named
from torch import Tensor

from headrace.core.options.engine_options import Options
from headrace.executor.checkpoints.checkpoint import open_checkpoint
from headrace.executor.models.families import spec_from_config
from headrace.ipc.failure import ModelError

DOWN = "model.layers.0.mlp.down_proj.weight"


def written(folder: Path, described: tuple[dict[str, Any], made.Writer], beside: str = "", **config: Any) -> Tensor:
    """Writes a checkpoint whose quantization_config is in another file, or in text_config; returns the values of a
    matrix."""
    model = made.write(folder, tiny_models.build("llama"), *described)
    whole = json.loads((folder / "config.json").read_text())
    own = whole.pop("quantization_config") | config
    own = {key: value for key, value in own.items() if value is not None}
    if beside:
        (folder / beside).write_text(json.dumps(own))
    (folder / "config.json").write_text(json.dumps(whole))
    return dict(model.state_dict())[DOWN].float()


GPTQ, AWQ = made.gptq(symmetric=False), made.awq()


@pytest.mark.parametrize(
    ("described", "beside", "config"),
    [
        pytest.param(GPTQ, "quantize_config.json", {}, id="gptq"),
        pytest.param(GPTQ, "quantize_config.json", {"quant_method": None}, id="gptq without its name"),
        pytest.param(AWQ, "quant_config.json", {"quant_method": None}, id="awq without its name"),
        pytest.param(
            AWQ,
            "quant_config.json",
            {"quant_method": None, "bits": None, "w_bit": 4, "group_size": None, "q_group_size": 32, "version": "GEMM"},
            id="awq by the names of AutoAWQ",
        ),
        pytest.param(AWQ, "quantize_config.json", {}, id="awq"),
    ],
)
def test_a_config_in_another_place_counts(
    described: tuple[dict[str, Any], made.Writer], beside: str, config: dict[str, Any], tmp_path: Path
) -> None:
    values = written(tmp_path, described, beside, **config)
    found = open_checkpoint(Options(model=str(tmp_path))).weights().get(DOWN)
    assert torch.allclose(found.float(), values, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("described", [GPTQ, made.fp8("blocks")], ids=["gptq", "fp8"])
def test_the_config_of_the_text_model_counts(described: tuple[dict[str, Any], made.Writer], tmp_path: Path) -> None:
    written(tmp_path / "outer", described)
    made.write(tmp_path / "whole", tiny_models.build("llama"), *described)
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    within = {"architectures": config["architectures"], "text_config": config}
    (tmp_path / "outer" / "config.json").write_text(json.dumps(within))
    outer, whole = (open_checkpoint(Options(model=str(tmp_path / name))) for name in ("outer", "whole"))
    assert outer.quantisation is not None
    assert outer.quantisation == whole.quantisation


def test_the_config_itself_takes_precedence(tmp_path: Path) -> None:
    made.write(tmp_path, tiny_models.build("llama"), *GPTQ)
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 8, "group_size": 64, "quant_method": "gptq"}))
    assert open_checkpoint(Options(model=str(tmp_path))).weights().get(DOWN).shape == (64, 96)


OF_CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "compressed-tensors": (
        "config.json",
        {
            "quant_method": "compressed-tensors",
            "config_groups": {},
            "ignore": [],
            "format": "dense",
            "quantization_status": "frozen",
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"},
        },
    ),
    "modelopt": (
        "config.json",
        {
            "quant_method": "modelopt",
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
            "config_groups": {},
            "producer": {"name": "modelopt", "version": "0.47.0"},
        },
    ),
    "modelopt's own file": (
        "hf_quant_config.json",
        {
            "producer": {"name": "modelopt", "version": "0.47.0"},
            "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8", "exclude_modules": None},
        },
    ),
}


def of_cache(folder: Path, file: str, config: dict[str, Any]) -> dict[str, Tensor]:
    """A checkpoint of floats with scales of an fp8 cache. Returns its weights."""
    tiny_models.save("llama", folder)
    floats = load_file(folder / "model.safetensors")
    save_file(floats | named(), folder / "model.safetensors", metadata={"format": "pt"})
    whole = json.loads((folder / "config.json").read_text())
    whole |= {"quantization_config": config} if file == "config.json" else {}
    (folder / "config.json").write_text(json.dumps(whole))
    if file != "config.json":
        (folder / file).write_text(json.dumps(config))
    return floats


@pytest.mark.parametrize("case", OF_CACHES)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_config_of_the_cache_alone_leaves_weights_floats_and_gives_scales(
    case: str, quantization: str | None, tmp_path: Path
) -> None:
    floats = of_cache(tmp_path, *OF_CACHES[case])
    checkpoint = open_checkpoint(Options(model=str(tmp_path), quantization=quantization))
    assert checkpoint.dtype_name == "float32"
    source = checkpoint.weights()
    assert source.names() == floats.keys()
    assert torch.equal(source.get(DOWN), floats[DOWN])
    found = checkpoint.cache_scales(spec_from_config(checkpoint.config))
    assert found == tuple(tuple((float(torch.tensor(scale)),) for scale in pair) for pair in OWN)


def test_scales_of_a_cache_of_4_bits_are_not_those_of_an_fp8_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, config = OF_CACHES["modelopt's own file"]
    quantization = config["quantization"] | {"kv_cache_quant_algo": "NVFP4"}
    of_cache(tmp_path, file, config | {"quantization": quantization})
    checkpoint = open_checkpoint(Options(model=str(tmp_path)))
    assert checkpoint.cache_scales(spec_from_config(checkpoint.config)) == ()
    assert "scales of a NVFP4 cache have no effect" in caplog.text


def test_a_config_that_quantises_nothing_is_refused(tmp_path: Path) -> None:
    of_cache(tmp_path, "config.json", {"quant_method": "compressed-tensors", "config_groups": {}})
    with pytest.raises(ModelError, match="the compressed-tensors config has no config_groups"):
        open_checkpoint(Options(model=str(tmp_path)))
