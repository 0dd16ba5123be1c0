"""torchao, as transformers saves it in safetensors: a tensor subclass is stored by its parts.

    _weight_qdata         int8 [n, k], of 1 to 8 bits, or float8_e4m3fn [n, k]
    _weight_scale         [n, groups], or of blocks
    _weight_zero_point    int8 [n, groups]: w = scale * (code - zero)

Codes that fit 4 bits are kept in 4, though the tool stores a byte for each.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from headrace.executor.checkpoints.quantisation import Config, Format, Parts, Shapes, Stored, expect
from headrace.executor.checkpoints.quantisation._scaled import floats_of_8_bits, integers_of_8_bits
from headrace.executor.checkpoints.quantisation.gptq import integers
from headrace.executor.models.blocks import Role
from headrace.ipc.failure import ModelError
from headrace.kernels.grouped import GroupedWeight, InputRounding

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
            "Int8DynamicActivationInt8Weight: activations become int8 too; Int8DynamicActivationIntxWeight: "
            "activations keep 16 bits",
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
    group_size: int | None
    inputs: InputRounding | None

    @classmethod
    def of(cls, config: Config) -> Self:
        kinds = config.get("quant_type")
        found = _configs(kinds)
        if not found:
            raise ModelError(f"the torchao config's quant_type is {kinds!r}; one of torchao's own configs is expected")
        sizes = {size for each in found for size in _group_sizes(each)}
        rounded = {each["_type"] == "Int8DynamicActivationInt8WeightConfig" for each in found}
        inputs = None
        if rounded == {True}:
            shifted = {each.get("_data", {}).get("act_mapping_type", {}).get("_data") for each in found}
            inputs = InputRounding(shifted="ASYMMETRIC" in shifted)
        return cls(min(sizes, default=None), inputs)

    @property
    def rounds_inputs(self) -> bool:
        return self.inputs is not None

    def parts(self, module: str, role: Role, held: Container[str]) -> Parts | None:
        found = {part: f"{module}.{name}" for part, name in PARTS.items()}
        if found["weight"] not in held:
            return None
        return found if found["zeros"] in held else {part: found[part] for part in ("weight", "scales")}

    def shape(self, module: str, shapes: Shapes) -> tuple[int, int]:
        n, k = shapes["weight"]
        return n, k

    def group(self, module: str, columns: int) -> int:
        return self.group_size or columns

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> GroupedWeight:
        weight, scales, zeros = tensors["weight"], tensors["scales"], tensors.get("zeros")
        if weight.dtype == torch.float8_e4m3fn:
            return floats_of_8_bits(module, weight, scales)
        if zeros is not None and not zeros.any():
            zeros = None
        found = integers_of_8_bits(module, weight, scales, zeros, self.inputs)
        if self.inputs is not None or int(weight.min()) < -8 or int(weight.max()) > 7:
            return found
        expect(weight.shape[1] % 2 == 0, module, f"rows of {weight.shape[1]} codes do not fill bytes")
        narrow = None if found.zeros is None else found.zeros - 120
        return integers((weight + 8).to(torch.uint8), 4, narrow, found.scales, found.group)


def _configs(value: object) -> list[Mapping[str, Any]]:
    """torchao's configs in a `quant_type`: one for all, or those within one that goes by modules' names."""
    if not isinstance(value, Mapping):
        return []
    inner = [found for each in value.values() for found in _configs(each)]
    return inner or ([value] if str(value.get("_type")).endswith("Config") else [])


def _group_sizes(config: object) -> list[int]:
    if not isinstance(config, Mapping):
        return []
    own = [value for name, value in config.items() if name == "group_size" and isinstance(value, int)]
    return own + [size for value in config.values() for size in _group_sizes(value)]


FORMAT = TorchAo
