"""AMD Quark's checkpoints: a scheme for all modules, and others by module or pattern (automatic mixed precision).

fp8_e4m3    weight float8_e4m3fn [n, k], weight_scale of the matrix or of each row
int8        weight int8 [n, k], weight_scale of the matrix or of each row, weight_zero_point
fp4         weight uint8 [n, k / 2] of e2m1, weight_scale uint8 [n, k / 32], exponents (MXFP4)
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from headrace.executor.checkpoints.quantisation import Config, Format, Parts, Shapes
from headrace.executor.checkpoints.quantisation._scaled import (
    floats_of_4_bits,
    floats_of_8_bits,
    integers_of_8_bits,
    powers_of_two,
)
from headrace.executor.models.blocks import Role
from headrace.ipc.failure import ModelError
from headrace.kernels.grouped import GroupedWeight

KNOWN = ("fp8_e4m3", "int8", "fp4")


@dataclass(frozen=True)
class Quark(Format):
    names = ("quark", "amd-quark")
    stored = (
        "fp8_e4m3, a scale for the matrix or each row; activations stay in floats",
        "int8, a scale for the matrix or each row; activations keep 16 bits",
        "MXFP4; activations stay in floats",
        "schemes by module (`layer_quant_config`)",
    )
    made_by = "a writer in tests"
    everywhere: str
    by_pattern: tuple[tuple[str, str], ...]
    """Patterns of module names with their dtypes, the first that fits counts."""

    @classmethod
    def of(cls, config: Config) -> Self:
        by_pattern = config.get("layer_quant_config") or {}
        pairs = tuple((pattern, _dtype(own)) for pattern, own in by_pattern.items())
        return cls(_dtype(config.get("global_quant_config")), pairs)

    def _dtype(self, module: str) -> str:
        for pattern, dtype in self.by_pattern:
            if pattern == module or fnmatch.fnmatch(module, pattern):
                return dtype
            if pattern.startswith("re:") and re.match(pattern[3:], module):
                return dtype
        return self.everywhere

    def parts(self, module: str, role: Role, held: Container[str]) -> Parts | None:
        if f"{module}.weight_scale" not in held:
            return None
        found = {"weight": f"{module}.weight", "scales": f"{module}.weight_scale"}
        zeros = f"{module}.weight_zero_point"
        return found | {"zeros": zeros} if self._dtype(module) == "int8" and zeros in held else found

    def beside(self, module: str) -> tuple[str, ...]:
        return ("input_scale", "input_zero_point", "output_scale", "weight_zero_point")

    def shape(self, module: str, shapes: Shapes) -> tuple[int, int]:
        n, stored = shapes["weight"]
        return n, stored * 2 if self._dtype(module) == "fp4" else stored

    def group(self, module: str, columns: int) -> int:
        return 32 if self._dtype(module) == "fp4" else columns

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> GroupedWeight:
        dtype, weight, scales = self._dtype(module), tensors["weight"], tensors["scales"]
        if dtype == "fp4":
            return floats_of_4_bits(
                module, weight, powers_of_two(scales) if scales.dtype == torch.uint8 else scales.float()
            )
        if dtype == "int8":
            return integers_of_8_bits(module, weight, scales, tensors.get("zeros"))
        return floats_of_8_bits(module, weight, scales)


def _dtype(scheme: object) -> str:
    weight = scheme.get("weight") if isinstance(scheme, Mapping) else None
    found = str(weight.get("dtype")) if isinstance(weight, Mapping) else "nothing"
    if found not in KNOWN:
        raise ModelError(f"Quark weights of {found} are not supported; {', '.join(KNOWN)} are")
    return found


FORMAT = Quark
