"""NVIDIA ModelOpt, whose config is in hf_quant_config.json or config.json.

FP8      weight float8_e4m3fn [n, k], weight_scale of the matrix or of each row
NVFP4    weight uint8 [n, k / 2] of e2m1, weight_scale float8_e4m3fn [n, k / 16], weight_scale_2 of the matrix

With MIXED_PRECISION, `quantized_layers` names the algorithm of each module.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

from torch import Tensor

from headrace.executor.checkpoints.formats import (
    BYTES,
    FLOATS,
    FLOATS_OF_8_BITS,
    Config,
    Dtypes,
    Format,
    Parts,
    Shapes,
    Stored,
    expect,
)
from headrace.executor.checkpoints.formats._keys import (
    ANY,
    BY_TENSORS,
    COMMON,
    OF_CACHE,
    OF_INPUTS,
    READ,
    SEARCH,
    Keys,
    RefusedKey,
    keys,
)
from headrace.executor.checkpoints.formats._scaled import floats_of_4_bits, floats_of_8_bits
from headrace.ipc.failure import ModelError
from headrace.kernels.grouped import GroupedWeight

GROUP = 16
"""Weights that share a scale in NVFP4."""
BESIDE_ALGORITHM = "quant_algo says it"
NOT_COMPUTED = {
    **keys(RefusedKey("weights with zero points are not supported in ModelOpt's formats"), "has_zero_point"),
    **keys(RefusedKey("inputs that are scaled before they are multiplied are not supported"), "pre_quant_scale"),
}
OF_ALGORITHM = {
    **keys(READ, "quant_algo", "group_size"),
    **keys(OF_CACHE, "kv_cache_quant_algo", "kv_cache_scheme"),
    **keys(BY_TENSORS, "exclude_modules"),
    **NOT_COMPUTED,
    "quantized_layers": {ANY: {**keys(READ, "quant_algo", "group_size"), **NOT_COMPUTED}},
}
MIXED = "MIXED_PRECISION"
FP8, NVFP4 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"), ("NVFP4", "W4A16_NVFP4")


@dataclass(frozen=True)
class ModelOpt(Format):
    names = ("modelopt", "modelopt_fp4", "nvfp4")
    stored = (
        Stored(
            "FP8: float8_e4m3fn, a scale for the matrix or each row; activations stay in floats",
            ("e4m3",),
            ("modelopt fp8",),
        ),
        Stored("NVFP4: 4-bit floats in groups of 16; activations stay in floats", ("float4",), ("modelopt nvfp4",)),
        Stored("MIXED_PRECISION: FP8 and NVFP4, by module", ("e4m3", "float4"), ("modelopt mixed",)),
    )
    made_by = (
        "nvidia-modelopt 0.47 (benchmarks/quantised_tools.py; its NVFP4 stops on a CPU: 'amax must be a CUDA tensor "
        "for dynamic block quantization'), a writer in tests"
    )
    marks = ("weight_scale", "weight_scale_2")
    keys: ClassVar[Keys] = {
        **COMMON,
        **OF_ALGORITHM,
        "quantization": OF_ALGORITHM,
        "config_groups": {
            ANY: {
                **keys(BY_TENSORS, "targets"),
                **keys(OF_INPUTS, "input_activations", "output_activations"),
                **keys(BESIDE_ALGORITHM, "weights", "format"),
                **NOT_COMPUTED,
            }
        },
        **keys(SEARCH, "quant_library", "quant_type"),
    }
    fp4: Mapping[str, bool] = field(default_factory=dict)
    """Whether a module is NVFP4, and not FP8; "" is the name of all that are not named."""

    @classmethod
    def of(cls, config: Config) -> Self:
        own = _settings(config)
        if str(own.get("quant_algo")).upper() != MIXED:
            return cls({"": _is_fp4(own)})
        layers = own.get("quantized_layers")
        if not isinstance(layers, Mapping) or not layers:
            raise ModelError(f"ModelOpt's {MIXED} needs quantized_layers, with the algorithm of each module")
        return cls({name: _is_fp4(each if isinstance(each, Mapping) else {}) for name, each in layers.items()})

    @classmethod
    def is_of_cache(cls, config: Config) -> bool:
        own = _settings(config)
        return not own.get("quant_algo") and bool(own.get("kv_cache_quant_algo") or own.get("kv_cache_scheme"))

    def _is_fp4(self, module: str) -> bool:
        """As the config says of the module, or of one that it is a part of."""
        name = module
        while name not in self.fp4:
            if not name:
                raise ModelError(f"{module} is quantised, and the config's quantized_layers does not name it")
            name = name.rpartition(".")[0]
        return self.fp4[name]

    def scheme(self, module: str) -> str:
        return "modelopt NVFP4" if self._is_fp4(module) else "modelopt FP8"

    def parts(self, module: str, held: Container[str]) -> Parts:
        names = ("weight", "weight_scale", "weight_scale_2") if self._is_fp4(module) else ("weight", "weight_scale")
        return {name: f"{module}.{name}" for name in names}

    def dtypes(self, module: str) -> Dtypes:
        if self._is_fp4(module):
            return {"weight": BYTES, "weight_scale": FLOATS_OF_8_BITS, "weight_scale_2": FLOATS}
        return {"weight": FLOATS_OF_8_BITS, "weight_scale": FLOATS}

    def beside(self, module: str) -> tuple[str, ...]:
        return ("input_scale",)

    def shape(self, module: str, shapes: Shapes) -> tuple[int, int]:
        n, stored = shapes["weight"]
        return n, stored * 2 if self._is_fp4(module) else stored

    def group(self, module: str, columns: int) -> int:
        return GROUP if self._is_fp4(module) else columns

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> GroupedWeight:
        scales = tensors["weight_scale"]
        if not self._is_fp4(module):
            return floats_of_8_bits(module, tensors["weight"], scales)
        whole = tensors["weight_scale_2"]
        expect(whole.numel() == 1, module, f"weight_scale_2 is {list(whole.shape)}; one number is expected")
        return floats_of_4_bits(module, tensors["weight"], scales.float() * whole.float(), GROUP)


def _is_fp4(settings: Config) -> bool:
    algorithm, size = str(settings.get("quant_algo")).upper(), settings.get("group_size")
    if algorithm not in (*FP8, *NVFP4):
        raise ModelError(f"ModelOpt's {algorithm} is not supported; {', '.join((*FP8, *NVFP4, MIXED))} are")
    if algorithm in NVFP4 and size not in (None, GROUP):
        raise ModelError(f"ModelOpt's NVFP4 in groups of {size} is not supported; groups of {GROUP} are")
    return algorithm in NVFP4


def _settings(config: Config) -> Config:
    own = config.get("quantization", config)
    return own if isinstance(own, Mapping) else {}


FORMAT = ModelOpt
