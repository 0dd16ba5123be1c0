"""Quantisation configs with the keys that tools write, each with a writer of the checkpoint that it describes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import quantised_checkpoints as made
import torch
from torch import Tensor

from headrace.kernels.grouped import InputRounding

Described = tuple[dict[str, Any], made.Writer]

META = {"quantizer": ["gptqmodel:7.7.0"], "uri": "https://github.com/modelcloud/gptqmodel", "damp_percent": 0.05}


def described(made_of: Described, **others: Any) -> Callable[[], Described]:
    config, writer = made_of
    return lambda: (config | others, writer)


def zero_points_as_they_are(bits: int) -> Described:
    """A symmetric GPTQ checkpoint whose config names the layout of zero points minus 1, and that stores them whole."""
    config, writer = made.gptq(bits, v2=True)
    return config | {"checkpoint_format": "gptq"}, writer


def without(suffix: str, made_of: Described, **others: Any) -> Callable[[], Described]:
    """As `described`, without the tensors that end so."""
    config, writer = made_of

    def fewer(module: str, weight: Tensor) -> made.Written:
        tensors, values = writer(module, weight)
        return {name: each for name, each in tensors.items() if name != suffix}, values

    return lambda: (config | others, fewer)


def symmetric_awq() -> Described:
    def writer(module: str, weight: Tensor) -> made.Written:
        codes, scales, _, values = made.affine(weight, 4, 32, symmetric=True)
        return {".qweight": made.awq_words(codes.T), ".scales": scales.T}, values

    return {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, writer


def mxfp4_with_float_scales() -> Described:
    config, writer = quark("fp4")()
    config["global_quant_config"]["weight"]["scale_format"] = "float32"
    config["layer_quant_config"]["*k_proj"]["weight"]["scale_format"] = "float32"

    def widened(module: str, weight: Tensor) -> made.Written:
        tensors, values = writer(module, weight)
        return tensors | {".weight_scale": torch.exp2(tensors[".weight_scale"].float() - 127)}, values

    return config, widened


def compressed(scheme: str, inputs: InputRounding | None = None, **weights: Any) -> Callable[[], Described]:
    observed = {"observer": "minmax", "observer_kwargs": {}, "dynamic": False, "block_structure": None}
    config, writer = made.compressed(scheme, inputs, **(weights | observed | {"scale_dtype": None, "zp_dtype": None}))
    group = config["config_groups"]["group_0"] | {"output_activations": None}
    group |= {} if "ordered" in scheme else {"format": config["format"]}  # versions before 0.12 do not write it
    if group["input_activations"] is not None:
        group["input_activations"] |= observed | {"strategy": "token", "group_size": None, "actorder": None}
        group["input_activations"]["dynamic"] = inputs is not None and inputs.scale is None
    config |= {"config_groups": {"group_0": group}, "kv_cache_scheme": None, "sparsity_config": {"format": "dense"}}
    transforms = {"R1": {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_input"}]}}
    config |= {"quantization_status": "compressed", "global_compression_ratio": None, "version": "0.20.0"}
    return lambda: (config | {"transform_config": {"config_groups": transforms}}, writer)


def quark(dtype: str, **others: Any) -> Callable[[], Described]:
    config, writer = made.quark(dtype)
    group = config["global_quant_config"]["weight"]["group_size"]
    weight = config["global_quant_config"]["weight"] | {
        "is_dynamic": False, "qscheme": "per_group" if group else "per_channel", "ch_axis": 1, "block_size": None,
        "round_method": "half_even", "scale_type": "float", "zero_point_type": "int32", "mx_element_dtype": None,
        "observer_cls": "PerGroupMinMaxObserver", "is_scale_quant": False, "scale_calculation_mode": "even",
    }  # fmt: skip
    layer = {"input_tensors": None, "output_tensors": None, "weight": weight, "bias": None, "target_device": None}
    export = {"kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder", "weight_format": "real_quantized"}
    config |= {
        "global_quant_config": layer, "export": export | others, "layer_type_quant_config": {},
        "quant_mode": "eager_mode", "layer_quant_config": {"*k_proj": layer}, "kv_cache_quant_config": {},
        "kv_cache_post_rope": False,
        "algo_config": [{"name": "awq", "scaling_layers": []}], "softmax_quant_spec": None, "version": "0.13",
    }  # fmt: skip
    return lambda: (config, writer)


def modelopt(algorithm: str, weights: dict[str, Any]) -> Callable[[], Described]:
    group = {"input_activations": {"dynamic": False, "num_bits": 8}, "weights": weights, "targets": ["Linear"]}
    config, writer = made.modelopt(algorithm)
    config |= {
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.47.0"}, "kv_cache_quant_algo": "FP8", "exclude_modules": [],
    }  # fmt: skip
    return lambda: (config | ({"group_size": 16} if algorithm == "NVFP4" else {}), writer)


def torchao(kind: str, **data: Any) -> Callable[[], Described]:
    config, writer = made.torchao(kind)
    chosen = config["quant_type"]["default"]
    chosen["_data"] |= {"set_inductor_config": True} | data
    others = {"modules_to_not_convert": None, "include_input_output_embeddings": False}
    return lambda: (config | others | {"untie_embedding_weights": False}, writer)


def hqq() -> Described:
    config, writer = made.hqq(4)
    config["quant_config"]["weight_quant_params"] |= {"optimize": True, "round_zero": True, "view_as_float": False}
    config["quant_config"] |= {"scale_quant_params": None, "zero_quant_params": None, "offload_meta": False}
    return config | {"skip_modules": ["lm_head"]}, writer


ROUND = {
    "act_bits": 16, "act_data_type": "int", "act_dynamic": True, "act_group_size": 32, "act_sym": True, "amp": True,
    "autoround_version": "0.16.1", "batch_size": 8, "iters": 200, "lr": 0.005, "nsamples": 512, "seqlen": 2048,
    "block_name_to_quantize": "model.layers", "data_type": "int", "low_gpu_mem_usage": True, "sym": False,
}  # fmt: skip
TRANSFORMERS = {
    "batch_size": 1, "block_name_to_quantize": None, "cache_block_outputs": True, "damp_percent": 0.01,
    "dataset": None, "exllama_config": {"version": 1}, "max_input_length": None, "model_seqlen": None,
    "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None, "pad_token_id": None,
    "tokenizer": None, "true_sequential": True, "use_cuda_fp16": False, "use_exllama": True, "backend": "auto",
}  # fmt: skip
FUSED = "fp8 of MiMo V2.5"
"""A case for a model whose queries, keys and values are one matrix."""
CONFIGS: dict[str, Callable[[], Described]] = {
    "gptq of AutoGPTQ": described(
        made.gptq(4, symmetric=False),
        damp_percent=0.1,
        true_sequential=True,
        model_name_or_path=None,
        model_file_base_name="model",
        static_groups=False,
    ),
    "gptq of transformers": described(zero_points_as_they_are(4), **TRANSFORMERS),
    "gptq of GPTQModel": described(
        made.gptq(4, symmetric=False, v2=True),
        format="gptq_v2",
        method="gptq",
        pack_dtype="int32",
        lm_head=False,
        meta=META,
        dynamic={".*k_proj": {"bits": 4, "group_size": 32, "sym": False, "desc_act": False}},
    ),
    "gptq in order": described(made.gptq(4, desc_act=True)),
    "gptq of AutoRound": without(
        ".g_idx",
        zero_points_as_they_are(4),
        dynamic={".*k_proj": {"bits": 4, "group_size": 32, "sym": True, "desc_act": False}},
        autoround_version="0.16.1",
        provider="auto-round",
    ),
    "awq without zero points": described(symmetric_awq(), zero_point=False),
    "awq, symmetric": described(symmetric_awq(), sym=True),
    "awq of AutoAWQ": described(made.awq(), modules_to_not_convert=None),
    "awq of llm-awq's names": lambda: (
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"},
        made.awq()[1],
    ),
    "awq of transformers": described(made.awq(), backend="auto", do_fuse=False, format="gemm", fuse_max_seq_len=None),
    "awq of AutoRound": described(made.awq(), **(ROUND | {"checkpoint_format": "gemm"})),
    "auto-round": lambda: (
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round"}
        | ROUND
        | {"extra_config": {"model.layers.0.self_attn.k_proj": {"bits": 4, "group_size": 32, "sym": False}}},
        made.gptq(4, symmetric=False, v2=True)[1],
    ),
    "auto-round, whole zero points": lambda: (
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_gptq"}
        | ROUND
        | {"sym": True, "extra_config": {".*k_proj": {"sym": True}}},
        made.gptq(4, v2=True)[1],
    ),
    "fp8 of DeepSeek": described(made.fp8("blocks"), fmt="e4m3", scale_fmt="ue8m0", expert_dtype="fp8"),
    FUSED: described(made.fp8("chunks"), num_key_value_heads=4),
    "fp8 of GPTQModel": described(
        made.fp8("divisors"), format="float8_e4m3fn", checkpoint_format="float8_e4m3fn", bits=8, group_size=-1
    ),
    "fbgemm_fp8": described(made.fp8("rows"), activation_scale_ub=1200.0, modules_to_not_convert=["lm_head"]),
    "bitsandbytes 4 bits": described(
        made.bitsandbytes("nf4 double"),
        _load_in_4bit=True,
        _load_in_8bit=False,
        bnb_4bit_compute_dtype="bfloat16",
        bnb_4bit_quant_storage="uint8",
        bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=None,
        llm_int8_threshold=6.0,
        llm_int8_has_fp16_weight=False,
    ),
    "bitsandbytes 8 bits": described(made.bitsandbytes("int8"), llm_int8_threshold=6.0),
    "compressed-tensors W4A16": compressed("W4A16 zeros", **made.W4),
    "compressed-tensors W4A16 ordered": compressed("W4A16 ordered", **made.W4),
    "compressed-tensors W8A8": compressed("W8A8", InputRounding(), **made.W8),
    "compressed-tensors W8A8 static": compressed("W8A8", InputRounding(0.03), **made.W8),
    "compressed-tensors fp8": compressed("fp8", **(made.W8 | {"type": "float"})),
    "modelopt FP8": modelopt("FP8", {"dynamic": False, "num_bits": 8, "type": "float"}),
    "modelopt NVFP4": modelopt("NVFP4", {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}),
    "modelopt, of several algorithms": lambda: made.modelopt_mixed(1),
    "modelopt, as in its own file": lambda: (
        {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": []}},
        made.modelopt("NVFP4")[1],
    ),
    "quark uint4": quark("uint4"),
    "quark int8": quark("int8"),
    "quark mxfp4": quark("fp4"),
    "quark mxfp4, float scales": mxfp4_with_float_scales,
    "hqq": hqq,
    "hqq, without nesting": lambda: (
        {"quant_method": "hqq", "nbits": 4, "group_size": 32, "axis": 1, "channel_wise": True},
        made.hqq(4)[1],
    ),
    "torchao IntxWeightOnly": torchao("IntxWeightOnly", mapping_type={"_type": "MappingType", "_data": "ASYMMETRIC"}),
    "torchao Int8DynamicActivationInt8Weight": torchao(
        "Int8DynamicActivationInt8Weight", act_mapping_type={"_type": "MappingType", "_data": "SYMMETRIC"}
    ),
    "torchao Float8WeightOnly": torchao("Float8WeightOnly"),
}
