"""torchao, as transformers saves it in safetensors: each part of a tensor subclass is a tensor.

    _weight_qdata         int8 [n, k], of 1 to 8 bits, or float8_e4m3fn [n, k]
    _weight_scale         [n, groups], or of blocks
    _weight_zero_point    int8 [n, groups]: w = scale * (code - zero)

The tool stores a byte for each code; codes that fit in 4 bits are kept in 4.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from headrace.executor.checkpoints.formats import (
    FLOATS,
    FLOATS_OF_8_BITS,
    WHOLE,
    Config,
    Dtypes,
    Format,
    Parts,
    Shapes,
    Stored,
    expect,
    patterns,
)
from headrace.executor.checkpoints.formats._keys import (
    BY_TENSORS,
    COMMON,
    OF_INPUTS,
    OTHERS,
    READ,
    SEARCH,
    Keys,
    check_keys,
    keys,
)
from headrace.executor.checkpoints.formats._scaled import floats_of_8_bits, integers_in_bytes
from headrace.ipc.failure import ModelError
from headrace.kernels.grouped import GroupedWeight, InputRounding

KINDS = (
    "Int8WeightOnlyConfig",
    "IntxWeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "Int8DynamicActivationIntxWeightConfig",
    "Float8WeightOnlyConfig",
    "Float8DynamicActivationFloat8WeightConfig",
)
OF_KIND = {
    **keys(READ, "group_size", "granularity", "weight_granularity", "act_mapping_type"),
    **keys(
        BY_TENSORS,
        *("mapping_type", "weight_mapping_type", "weight_dtype", "scale_dtype", "weight_scale_dtype", "layout"),
        *("intx_packing_format", "packing_format"),
    ),
    **keys(SEARCH, "intx_choose_qparams_algorithm", "reduce_range"),
    **keys(OF_INPUTS, "activation_dtype", "activation_value_lb", "activation_value_ub"),
    **keys(OTHERS, "set_inductor_config", "kernel_preference", "mm_config", "alg_id", "weight_only_decode", "version"),
}
"""Keys of `_data` in each of these configs."""
PARTS = {"weight": "_weight_qdata", "scales": "_weight_scale", "zeros": "_weight_zero_point"}


@dataclass(frozen=True)
class TorchAo(Format):
    names = ("torchao",)
    stored = (
        Stored(
            "Int8WeightOnly and IntxWeightOnly: 1 to 8 bits (up to 4 kept in 4), in groups or rows, zero "
            "points or none",
            ("int4", "int8"),
            ("torchao int8", "torchao 4 bits, zeros"),
        ),
        Stored(
            "Int8DynamicActivationInt8Weight and Int8DynamicActivationIntxWeight (1 to 8 bits, up to 4 kept in 4): "
            "activations become int8 too",
            ("int4", "int8"),
            ("test_torchaos_inputs_become_int8_where_its_config_means_it",),
        ),
        Stored(
            "Float8WeightOnly and Float8DynamicActivationFloat8Weight; activations stay in floats",
            ("e4m3",),
            ("torchao fp8",),
        ),
    )
    made_by = "torchao 0.18 (benchmarks/quantised_tools.py), a writer in tests"
    marks = tuple(PARTS.values())
    keys: ClassVar[Keys] = {
        **COMMON,
        "quant_type": READ,  # the keys inside are checked by `_configs`
        **keys(BY_TENSORS, "include_input_output_embeddings", "untie_embedding_weights"),
        **keys(OTHERS, "quant_type_kwargs"),
    }
    group_sizes: tuple[int | None, ...]
    """Group sizes of all configs in `quant_type`; None: each row has one scale."""
    types: tuple[torch.dtype, ...]
    """Dtypes of codes that these configs allow."""
    has_zeros: bool
    """Whether all of these configs store zero points, as Intx configs (1 to 8 bits) do."""
    inputs: InputRounding | None

    @classmethod
    def of(cls, config: Config) -> Self:
        kinds = config.get("quant_type")
        found = _configs(kinds)
        if not found:
            raise ModelError(f"the torchao config's quant_type is {kinds!r}; one of torchao's own configs is expected")
        for each in found:
            if each["_type"] not in KINDS:
                raise ModelError(f"torchao's {each['_type']} is not supported; {', '.join(KINDS)} are")
            check_keys(each.get("_data") or {}, OF_KIND, f"torchao's {each['_type']}")
        sizes = tuple(dict.fromkeys(size for each in found for size in _group_sizes(each) or (None,)))
        roundings = {_rounding(each) for each in found}
        types = tuple(dict.fromkeys(dtype for each in found for dtype in _types(each["_type"])))
        has_zeros = all("Intx" in each["_type"] for each in found)
        return cls(sizes, types, has_zeros, roundings.pop() if len(roundings) == 1 else None)

    @property
    def rounds_inputs(self) -> bool:
        return self.inputs is not None

    def parts(self, module: str, held: Container[str]) -> Parts:
        found = {part: f"{module}.{name}" for part, name in PARTS.items()}
        if self.has_zeros or found["zeros"] in held:
            return found
        return {part: found[part] for part in ("weight", "scales")}

    def dtypes(self, module: str) -> Dtypes:
        return {"weight": self.types, "scales": FLOATS, "zeros": (*WHOLE, *FLOATS)}

    def shape(self, module: str, shapes: Shapes) -> tuple[int, int]:
        n, k = shapes["weight"]
        return n, k

    def group(self, module: str, columns: int) -> int:
        return min((size for size in self.group_sizes if size is not None), default=columns)

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> GroupedWeight:
        weight, scales, zeros = tensors["weight"], tensors["scales"], tensors.get("zeros")
        if weight.dtype == torch.float8_e4m3fn:
            return floats_of_8_bits(module, weight, scales)
        k = weight.shape[1]
        groups = scales.shape[1] if scales.dim() == 2 else 1
        size = k // groups if groups > 1 else None
        expect(
            size in self.group_sizes or (k in self.group_sizes and groups == 1),
            module,
            f"scales are {list(scales.shape)} of {list(weight.shape)} weights, and the config's groups are of "
            + ", ".join("a row" if each is None else str(each) for each in self.group_sizes),
        )
        if zeros is not None:
            stored = f"zero points are {list(zeros.shape)}, and scales {list(scales.shape)}; the same is expected"
            expect(zeros.shape == scales.shape, module, stored)
            zeros = zeros if zeros.any() else None
        fits = weight.dtype == torch.int8 and int(weight.min()) >= -8 and int(weight.max()) <= 7
        return integers_in_bytes(module, weight, scales, zeros, inputs=self.inputs, bits=4 if fits else 8, group=size)


def _configs(value: object) -> list[Mapping[str, Any]]:
    """torchao's configs in a `quant_type`: one for all modules, or those nested in a mapping by module names."""
    if not isinstance(value, Mapping):
        return []
    patterns(list(value), "the torchao config's quant_type")
    inner = [found for each in value.values() for found in _configs(each)]
    return inner or ([value] if str(value.get("_type")).endswith("Config") else [])


def _types(kind: str) -> tuple[torch.dtype, ...]:
    """Dtypes in which a torchao config stores codes."""
    if "Float8Weight" in kind:
        return FLOATS_OF_8_BITS
    return (torch.int8, *FLOATS_OF_8_BITS) if "Float8" in kind else (torch.int8,)


def _rounding(config: Mapping[str, Any]) -> InputRounding | None:
    """How a torchao config rounds inputs to int8; None: not at all."""
    if config["_type"] == "Int8DynamicActivationIntxWeightConfig":
        return InputRounding(shifted=True)  # torchao's tensors always do so, whatever act_mapping_type says
    if config["_type"] == "Int8DynamicActivationInt8WeightConfig":
        kind = config.get("_data", {}).get("act_mapping_type", {}).get("_data")
        return InputRounding(shifted=kind == "ASYMMETRIC")
    return None


def _group_sizes(config: object) -> list[int]:
    if not isinstance(config, Mapping):
        return []
    own = [value for name, value in config.items() if name == "group_size" and isinstance(value, int)]
    return own + [size for value in config.values() for size in _group_sizes(value)]


FORMAT = TorchAo
