"""Quantises a model with a real tool, inside that tool's virtual environment; run by quantised_tools.py.

    python quantised_maker.py TOOL SCHEME MODEL INTO

INTO/model is the checkpoint as the tool saves it, INTO/dequantised.safetensors the values that the tool computes for
it. For schemes with int8 inputs, INTO/own.safetensors has the logits of the tool's own model, which rounds inputs.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

ROUNDED = ("W8A8", "W4A8", "Int8DynamicActivationInt8Weight", "Int8DynamicActivationIntxWeight")
"""Schemes with int8 inputs."""


def bitsandbytes(scheme: str, model_path: str) -> tuple[Any, dict[str, Any]]:
    import bitsandbytes
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    if scheme == "int8":
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        kind, _, double = scheme.partition(" ")
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=kind,
            bnb_4bit_use_double_quant=bool(double),
            bnb_4bit_compute_dtype=torch.float32,
        )
    model = AutoModelForCausalLM.from_pretrained(
        model_path, quantization_config=config, device_map={"": "cpu"}, dtype=torch.float32
    )
    values = {}
    for name, module in model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            weight = module.weight
            values[f"{name}.weight"] = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
        elif isinstance(module, bitsandbytes.nn.Linear8bitLt):
            scales = module.state.SCB if module.state.SCB is not None else module.weight.SCB
            codes = module.state.CB if module.state.CB is not None else module.weight.data
            values[f"{name}.weight"] = codes.float() * scales.float()[:, None] / 127
    return model, values


def llmcompressor(scheme: str, model_path: str) -> tuple[Any, dict[str, Any]]:
    from compressed_tensors.quantization import forward
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
    oneshot(model=model, recipe=recipe)
    values = {}
    for name, module in model.named_modules():
        scheme_of = getattr(module, "quantization_scheme", None)
        if scheme_of is not None and getattr(module, "weight", None) is not None:
            extra = {}
            if getattr(module, "weight_global_scale", None) is not None:
                extra["global_scale"] = module.weight_global_scale
            zeros = getattr(module, "weight_zero_point", None)
            arguments = (module.weight.data, module.weight_scale, zeros, scheme_of.weights)
            values[f"{name}.weight"] = forward.fake_quantize(*arguments, **extra)
    return model, values


def torchao(scheme: str, model_path: str) -> tuple[Any, dict[str, Any]]:
    import torchao.quantization as tool
    from transformers import AutoModelForCausalLM, TorchAoConfig

    by_group = {
        "weight_dtype": getattr(torch, "int4"),  # noqa: B009 - its types do not list it
        "granularity": tool.PerGroup(32),
    }
    if scheme == "Int8DynamicActivationIntxWeight":
        by_group = {f"weight_{name.removeprefix('weight_')}": value for name, value in by_group.items()}
    chosen = getattr(tool, f"{scheme}Config")(**(by_group if "Intx" in scheme else {}))
    model = AutoModelForCausalLM.from_pretrained(
        model_path, quantization_config=TorchAoConfig(chosen), device_map={"": "cpu"}, dtype=torch.float32
    )
    weights = {name: each.weight for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)}
    return model, {f"{name}.weight": each.dequantize() for name, each in weights.items() if hasattr(each, "qdata")}


def hqq(scheme: str, model_path: str) -> tuple[Any, dict[str, Any]]:
    """Uses the tool's own layers, since transformers no longer saves such models."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    config = BaseQuantizeConfig(nbits=int(scheme.split(maxsplit=1)[0]), group_size=64, axis=1)
    values: dict[str, Any] = {}
    state: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            layer = HQQLinear(module, config, compute_dtype=torch.float32, device="cpu", del_orig=False)
            values[f"{name}.weight"] = layer.dequantize()
            state |= {f"{name}.{part}": each for part, each in layer.state_dict().items() if each is not None}
    kept = {name: each for name, each in model.state_dict().items() if name not in values}
    model.config.quantization_config = {"quant_method": "hqq", "quant_config": config}
    return _Saved(model.config, kept | {name: torch.as_tensor(each) for name, each in state.items()}), values


def modelopt(scheme: str, model_path: str) -> tuple[Any, dict[str, Any]]:
    import modelopt.torch.quantization as tool
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    ids = torch.tensor([text["input_ids"] for text in _texts()])
    model = tool.quantize(model, getattr(tool, f"{scheme}_CFG"), lambda own: own(ids))
    values = {}
    for name, module in model.named_modules():
        quantizer: Any = getattr(module, "weight_quantizer", None)
        if not getattr(quantizer, "is_enabled", False):
            continue
        if scheme == "FP8_DEFAULT":
            # As the tool exports them: its quantiser multiplies by a reciprocal, which rounds values midway between two
            # codes to the other one.
            scale = quantizer.amax.float() / 448
            packed, _ = FP8QTensor.quantize(module.weight.detach(), scale)
            values[f"{name}.weight"] = packed.dequantize(torch.float32, scale=scale)
        else:
            values[f"{name}.weight"] = quantizer(module.weight).detach().clone()
    return _Exported(lambda folder: export_hf_checkpoint(model, export_dir=str(folder))), values


def quark(scheme: str, model_path: str) -> tuple[Any, dict[str, Any]]:
    import quark.torch.quantization.config.config as tool
    from quark.torch import ModelQuantizer, export_safetensors
    from transformers import AutoModelForCausalLM

    rounded = {"round_method": "half_even", "scale_type": "float", "symmetric": True, "is_dynamic": False}
    chosen = {
        "fp8": lambda: tool.FP8E4M3PerTensorSpec(observer_method="min_max", is_dynamic=False),
        "int8": lambda: tool.Int8PerChannelSpec(ch_axis=0, **rounded),
        "int4": lambda: tool.Int4PerGroupSpec(ch_axis=-1, group_size=32, **rounded),
        "uint4": lambda: tool.Uint4PerGroupSpec(ch_axis=-1, group_size=32, **(rounded | {"symmetric": False})),
        "mxfp4": lambda: tool.OCP_MXFP4Spec(ch_axis=-1, is_dynamic=False),
        "mxfp6 e2m3": lambda: tool.OCP_MXFP6E2M3Spec(ch_axis=-1, is_dynamic=False),
        "mxfp6 e3m2": lambda: tool.OCP_MXFP6E3M2Spec(ch_axis=-1, is_dynamic=False),
    }[scheme]()
    layer = tool.QLayerConfig(weight=chosen.to_quantization_spec())
    quantizer = ModelQuantizer(tool.QConfig(global_quant_config=layer, exclude=["lm_head"]))
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    texts = [torch.tensor([text["input_ids"]]) for text in _texts()]
    model = quantizer.freeze(quantizer.quantize_model(model, texts))  # replaces the weights by the rounded ones
    values = {
        f"{name}.weight": module.weight.detach().clone()
        for name, module in model.named_modules()
        if getattr(module, "weight_qspec", None) is not None
    }
    return _Exported(lambda folder: export_safetensors(model, str(folder))), values


def gptqmodel(scheme: str, model_path: str) -> tuple[Any, dict[str, Any]]:
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its minimum, and it would take one of two cores otherwise
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
    from gptqmodel.quantization.config import FP8Config

    # torch packs the codes: the tool's own extension takes minutes to compile.
    options: dict[str, dict[str, Any]] = {
        "4 bits": {"bits": 4},
        "4 bits asymmetric": {"bits": 4, "sym": False},
        "4 bits desc_act": {"bits": 4, "desc_act": True},
        "8 bits": {"bits": 8},
        "3 bits": {"bits": 3},
        "2 bits": {"bits": 2},
        "2 bits asymmetric": {"bits": 2, "sym": False},
        "3 bits planar": {"bits": 3, "format": "gptq_p"},
        "5 bits": {"bits": 5},
        "6 bits desc_act": {"bits": 6, "desc_act": True},
        "7 bits asymmetric": {"bits": 7, "sym": False},
        "awq 4 bits": {"bits": 4, "sym": False, "method": "awq", "format": "gemm"},
        "fp8 matrix": {"weight_scale_method": "tensor"},
        "fp8 rows": {"weight_scale_method": "row"},
        "fp8 blocks": {"weight_scale_method": "block", "weight_block_size": [128, 128]},
    }
    shaped = options[scheme]
    in_groups = {"group_size": 32, "pack_impl": "original"}
    config: Any = FP8Config(**shaped) if "fp8" in scheme else QuantizeConfig(**in_groups, **shaped)
    model = GPTQModel.load(model_path, config, device="cpu")
    model.quantize(None if "fp8" in scheme else _texts(), batch_size=1)
    folder = Path(tempfile.mkdtemp())
    model.save(str(folder))
    backend = BACKEND.FP8_TORCH if "fp8" in scheme else BACKEND.AWQ_TORCH if "awq" in scheme else BACKEND.TORCH
    dtype = torch.float32 if "fp8" in scheme else torch.float16  # the type to which it rounds fp8 scales
    stored = GPTQModel.load(str(folder), device="cpu", backend=backend, dtype=dtype)
    values = {}
    for name, module in stored.model.named_modules():
        # Uses scales as stored, without rounding the product to their type.
        if "awq" in scheme and hasattr(module, "qweight"):
            tensors = (module.qweight, module.qzeros, module.scales.float(), module.bits, module.group_size)
            values[f"{name}.weight"] = dequantize_gemm(*tensors).T
        elif "fp8" in scheme and hasattr(module, "dequantize_weight"):
            values[f"{name}.weight"] = module.dequantize_weight(dtype=torch.float32).T
        elif hasattr(module, "dequantize_weight"):
            module.scales = module.scales.float()
            values[f"{name}.weight"] = module.dequantize_weight().T.detach().clone()
    modules = {name.removesuffix(".weight") for name in values}
    for file in folder.glob("*.safetensors"):  # the other weights, which it rounds to bfloat16
        values |= {name: each for name, each in load_file(file).items() if name.rpartition(".")[0] not in modules}
    return _Exported(lambda into: shutil.copytree(folder, into)), values


def autoround(scheme: str, model_path: str) -> tuple[Any, dict[str, Any]]:
    """The dequantised values come from the tool's own functions applied to the stored tensors, since it does not have a
    CPU layer for every layout. Schemes of gptq and awq are checkpoints of those formats."""
    from auto_round import AutoRound
    from auto_round.export.export_to_awq.utils import dequantize_gemm
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp
    from transformers import AutoModelForCausalLM, AutoTokenizer

    layout, changes = {
        "4 bits": ("auto_round", {"bits": 4}),
        "4 bits asymmetric": ("auto_round:auto_gptq", {"bits": 4, "sym": False}),
        "4 bits awq": ("auto_round:auto_awq", {"bits": 4, "sym": False}),
        "3 bits": ("auto_round", {"bits": 3}),
        "2 bits asymmetric": ("auto_round", {"bits": 2, "sym": False}),
        "5 bits asymmetric": ("auto_round", {"bits": 5, "sym": False}),
        "8 bits": ("auto_round", {"bits": 8}),
        "awq 4 bits": ("auto_awq", {"bits": 4, "sym": False}),
        "gptq 3 bits": ("auto_gptq", {"bits": 3}),
        "gptq 2 bits asymmetric": ("auto_gptq", {"bits": 2, "sym": False}),
    }[scheme]
    folder = tempfile.mkdtemp()
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    tool = AutoRound(
        model, tokenizer, scheme="W4A16", group_size=32, iters=0, disable_opt_rtn=True, device_map="cpu", **changes
    )
    _, folders = tool.quantize_and_save(folder, format=layout)
    stored = Path(folders[0] if isinstance(folders, list | tuple) else folders)
    config = json.loads((stored / "config.json").read_text())["quantization_config"]
    packing = config.get("packing_format", config["quant_method"])
    bits, size = config["bits"], config["group_size"]
    layers = qlinear_torch if packing == "auto_round" else qlinear_torch_zp
    tensors: dict[str, Any] = {}
    for file in stored.glob("*.safetensors"):
        tensors |= load_file(file)
    values = {}
    for name in (each.removesuffix(".qweight") for each in tensors if each.endswith(".qweight")):
        words, zeros, scales = (tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
        if "awq" in packing:
            values[f"{name}.weight"] = dequantize_gemm(words, zeros, scales.float(), bits, size).T
            continue
        width = words.shape[0] * 32 // bits
        layer = layers.QuantLinear(bits, size, width, words.shape[1], bias=False)
        layer.qweight, layer.qzeros, layer.scales = words, zeros, scales.float()
        values[f"{name}.weight"] = layer(torch.eye(width)).T
    return _Exported(lambda into: shutil.copytree(stored, into)), values


def own_logits(tool: str, model: Any) -> dict[str, Any]:
    """Logits of a text by the tool's own model; `decided`: the same with the borderline cases below decided one way.

    compressed-tensors divides a token by its largest magnitude / 127.5. If that value is negative, the quotient is
    -127.5, and the last bit of two divisions determines whether it becomes -128 or -127. A scale smaller by 2^-22
    always makes it -128.
    """
    ids = torch.tensor([_texts()[0]["input_ids"]])
    with torch.no_grad():
        found = {"ids": ids[0], "logits": model(ids, use_cache=False).logits[0].float()}
        if tool == "llmcompressor":
            from compressed_tensors.quantization.lifecycle import forward

            compute = forward.compute_dynamic_scales_and_zp

            def smaller(**arguments: Any) -> tuple[Any, Any]:
                scales, zeros = compute(**arguments)
                return scales * (1 - 2**-22), zeros

            with mock.patch.object(forward, "compute_dynamic_scales_and_zp", smaller):
                found["decided"] = model(ids, use_cache=False).logits[0].float()
    return found


def _texts() -> list[dict[str, list[int]]]:
    """Random token ids for calibration."""
    ids = torch.randint(0, 300, (16, 64), generator=torch.Generator().manual_seed(1)).tolist()
    return [{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids]


class _Exported:
    """A model that a function of its tool saves."""

    def __init__(self, write: Callable[[Path], object]) -> None:
        self._write = write

    def save_pretrained(self, folder: Path) -> None:
        self._write(folder)


class _Saved:
    """A model of which only the tensors are saved."""

    def __init__(self, config: Any, state: dict[str, Any]) -> None:
        self.config, self.state = config, state

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir()
        self.config.save_pretrained(folder)
        save_file({name: each.contiguous() for name, each in self.state.items()}, folder / "model.safetensors")


TOOLS = {
    "bitsandbytes": bitsandbytes, "llmcompressor": llmcompressor, "torchao": torchao, "hqq": hqq,
    "modelopt": modelopt, "quark": quark, "gptqmodel": gptqmodel,
    "auto_round": autoround,
}  # fmt: skip


def main(tool: str, scheme: str, model_path: str, into: str) -> None:
    torch.manual_seed(0)
    model, values = TOOLS[tool](scheme, model_path)
    if not values:
        raise SystemExit(f"{tool} quantised nothing")
    folder = Path(into)
    folder.mkdir(parents=True, exist_ok=True)
    floats = {name: each.detach().float().contiguous() for name, each in values.items()}
    save_file(floats, folder / "dequantised.safetensors")
    if scheme in ROUNDED:
        save_file(own_logits(tool, model), folder / "own.safetensors")
    model.save_pretrained(folder / "model", **({"save_compressed": True} if tool == "llmcompressor" else {}))


if __name__ == "__main__":
    main(*sys.argv[1:])
