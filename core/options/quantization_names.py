"""Values of the option `quantization`. A misspelt one is refused before anything is imported or downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from headrace.core.options.values import nearest
from headrace.ipc.failure import OptionError

BY_DEVICE = ("int8", "int4", "fp8")
"""Quantisation of float weights while they load, into forms of the device's own kernels."""
TO_FORMS = ("bitsandbytes", "experts_int8")
"""Quantisation of float weights while they load, into forms that the kernels also read from quantised checkpoints: see
executor/checkpoints/formats/as_loaded.py."""
STORED = (
    *("auto-round", "auto_round", "inc", "intel/auto-round"),
    *("awq", "awq_marlin", "gptq", "gptq_marlin", "gptqmodel", "gptq_v2", "moe_wna16"),
    *("bitsandbytes", "compressed-tensors", "compressed_tensors", "sparseml", "fp8", "fbgemm_fp8", "hqq"),
    *("modelopt", "modelopt_fp4", "nvfp4", "mxfp4", "gpt_oss_mxfp4", "quark", "amd-quark", "torchao"),
)
"""Formats of quantised checkpoints, by the names in executor/checkpoints/formats/."""
RETIRED: Mapping[str, str] = MappingProxyType(
    {
        "squeezellm": "vLLM took it out in 0.8; quantise the model anew with AWQ or GPTQ",
        "aqlm": "vLLM took it out in 0.10; quantise the model anew with AWQ or GPTQ",
        "deepspeedfp": "vLLM took it out; an fp8 checkpoint of compressed-tensors takes its place",
        "marlin": "its weights lie in the order of one GPU kernel; use the GPTQ checkpoint that they were made of",
        "gptq_marlin_24": "2:4 sparse weights are not computed; use the GPTQ checkpoint that they were made of",
        "qqq": "vLLM took it out; a W4A16 or W8A8 checkpoint of compressed-tensors takes its place",
        "bitblas": "its weights lie in the order of one GPU kernel; use the GPTQ checkpoint that they were made of",
        "gptq_bitblas": "its weights lie in the order of one GPU kernel; use the GPTQ checkpoint they were made of",
        "hqq_marlin": "it is no format of checkpoints",
        "tpu_int8": "it is for TPUs; quantization=int8 quantises float weights as they are loaded",
        "neuron_quant": "it is for Neuron devices; quantization=int8 quantises float weights as they are loaded",
        "ipex": "AWQ and GPTQ checkpoints are computed without it",
        "rtn": "quantization=int8 or int4 rounds float weights to the nearest as they are loaded",
        "ptpc_fp8": "quantization=fp8 does that: a scale for each token and each row",
    }
)
"""vLLM's names that Headrace does not support, each with the reason or what to use instead."""


def check_name(asked: str | None) -> None:
    """Raises OptionError for an unsupported `quantization`. For a name that vLLM has or had, it says what to use."""
    known = dict.fromkeys(("gguf", *BY_DEVICE, *STORED, *TO_FORMS))
    if asked is None or asked in known:
        return
    if asked in RETIRED:
        raise OptionError(f"quantization={asked} is not supported: {RETIRED[asked]}")
    close = nearest(asked.lower(), known, cutoff=0.5)  # low enough for four letters of which two are swapped
    meant = f"did you mean {close}? " if close else ""
    raise OptionError(f"quantization={asked} is unknown; {meant}known: {', '.join(known)}")
