"""AMD Quark: one scheme for all modules, and others by module name or pattern (automatic mixed precision).

fp8_e4m3    weight float8_e4m3fn [n, k], weight_scale of the matrix or of each row
int8        weight int8 [n, k], weight_scale of the matrix or of each row, weight_zero_point
int4, uint4 weight int32 [k, n / 8], codes along the outputs, in AWQ's order (`pack_method` reorder) or in sequence,
            weight_scale [k / group, n], weight_zero_point packed like the weight; int4 is in two's complement
fp4         weight uint8 [n, k / 2] of e2m1, weight_scale uint8 [n, k / 32], exponents (MXFP4)
fp6_*       weight uint8 [n, k * 3 / 4] of e2m3 or e3m2, codes packed without gaps, lowest bits first, weight_scale as
            in fp4 (MXFP6); converted to e4m3, which the kernels support and which has all of these values
"""

from __future__ import annotations

import fnmatch
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from headrace.executor.checkpoints.expressions import Expressions
from headrace.executor.checkpoints.formats import (
    BYTES,
    EXPONENTS,
    FLOATS,
    FLOATS_OF_8_BITS,
    WHOLE,
    WORDS,
    Config,
    Dtypes,
    Format,
    Parts,
    Shapes,
    Stored,
    cut_bits,
    expect,
    patterns,
)
from headrace.executor.checkpoints.formats._keys import (
    ANY,
    BY_TENSORS,
    COMMON,
    OF_CACHE,
    OF_INPUTS,
    OTHERS,
    READ,
    SEARCH,
    Keys,
    RefusedKey,
    keys,
)
from headrace.executor.checkpoints.formats._scaled import (
    floats_of_4_bits,
    floats_of_8_bits,
    integers_in_bytes,
    powers_of_two,
)
from headrace.executor.checkpoints.formats.awq import OUTPUTS, codes_of_words
from headrace.executor.checkpoints.formats.gptq import integers
from headrace.ipc.failure import ModelError
from headrace.kernels.grouped import GroupedWeight

OF_4_BITS = ("int4", "uint4")
OF_6_BITS = {"fp6_e2m3": 3, "fp6_e3m2": 2}
"""From the dtype to its number of mantissa bits."""
WITH_ZEROS = ("int8", *OF_4_BITS)
KNOWN = ("fp8_e4m3", *WITH_ZEROS, "fp4", *OF_6_BITS)
IN_ORDER = tuple(range(8))
OF_WEIGHT = {
    **keys(READ, "dtype", "group_size", "qscheme", "symmetric", "scale_format"),
    **keys(BY_TENSORS, "ch_axis", "block_size", "scale_type", "zero_point_type", "mx_element_dtype", "is_dynamic"),
    **keys(
        SEARCH, *("round_method", "observer_cls", "scale_calculation_mode", "enable_buffer_reuse", "max_input_numel")
    ),
    **keys(RefusedKey("scales that are quantised themselves are not supported"), "is_scale_quant"),
}
OF_LAYER = {
    "weight": OF_WEIGHT,
    **keys(OF_INPUTS, "input_tensors", "output_tensors"),
    **keys(BY_TENSORS, "bias"),
    **keys(OTHERS, "target_device"),
}
ROTATIONS = ("rotation", "quarot")
ONLINE = ("online_r1_rotation", "online_r1", "r3", "r4")
"""Keys of these algorithms for rotations of what the model computes; the others are part of the weights."""
CORRECTED = "svdquant"
"""An algorithm that adds matrices of low rank to the weights."""


@dataclass(frozen=True)
class QuarkScheme:
    """How a module's matrix is stored."""

    dtype: str
    group_size: int | None
    """Inputs that share a scale; None: the row or the matrix has one."""
    needs_zeros: bool
    """Whether weights are asymmetric integers, so that zero points are required."""
    has_exponents: bool
    """Whether `scale_format` is e8m0: then scales are exponents of powers of two; else they may also be floats."""

    @classmethod
    def of(cls, config: object) -> Self:
        """The scheme of a layer's quantisation config. Raises ModelError if it is not supported."""
        weight = config.get("weight") if isinstance(config, Mapping) else None
        found = weight if isinstance(weight, Mapping) else {"dtype": "nothing"}
        dtype, size = str(found.get("dtype")), found.get("group_size")
        if dtype not in KNOWN:
            raise ModelError(f"Quark weights of {dtype} are not supported; {', '.join(KNOWN)} are")
        if size is not None and (not isinstance(size, int) or size < 1):
            raise ModelError(f"the Quark config's group_size is {size!r}; a whole number above 0 is expected")
        if found.get("qscheme") not in (None, "per_group"):
            size = None
        needs_zeros = dtype in WITH_ZEROS and found.get("symmetric") is False
        return cls(dtype, size, needs_zeros, found.get("scale_format") == "e8m0")


@dataclass(frozen=True)
class Quark(Format):
    names = ("quark", "amd-quark")
    stored = (
        Stored("fp8_e4m3, a scale for the matrix or each row; activations stay in floats", ("e4m3",), ("quark fp8",)),
        Stored("int8, a scale for the matrix or each row; activations keep 16 bits", ("int8",), ("quark int8",)),
        Stored("int4 and uint4, in groups or rows, zero points or none", ("int4",), ("quark int4", "quark uint4")),
        Stored("MXFP4; activations stay in floats", ("float4",), ("quark mxfp4",)),
        Stored(
            "MXFP6 (e2m3 and e3m2), kept in 8 bits; activations stay in floats",
            ("e4m3",),
            ("quark mxfp6 e2m3", "quark mxfp6 e3m2"),
            made_by="amd-quark 0.13 for E2M3 (benchmarks/quantised_tools.py), a writer in tests",
        ),
        Stored("schemes by module (`layer_quant_config`)", (), ("test_quark_stores_each_module_by_its_pattern",)),
    )
    made_by = "amd-quark 0.13 (benchmarks/quantised_tools.py), a writer in tests"
    marks = ("weight_scale", "weight_zero_point")
    unshifted = ("weight_zero_point",)
    keys: ClassVar[Keys] = {
        **COMMON,
        "global_quant_config": OF_LAYER,
        "layer_quant_config": {ANY: OF_LAYER},
        "layer_type_quant_config": RefusedKey("schemes by type of layer are not supported; those by name are"),
        "algo_config": READ,
        "export": {
            "pack_method": READ,
            **keys(BY_TENSORS, "weight_format", "weight_merge_groups"),
            **keys(OF_CACHE, "kv_cache_group", "min_kv_scale"),
        },
        **keys(BY_TENSORS, "exclude"),
        **keys(OF_CACHE, "kv_cache_quant_config", "kv_cache_post_rope"),
        **keys(OF_INPUTS, "softmax_quant_spec"),
        **keys(SEARCH, "quant_mode"),
    }
    everywhere: QuarkScheme
    by_pattern: tuple[tuple[str, QuarkScheme], ...]
    """(pattern of module names, scheme); the first match applies."""
    outputs: tuple[int, ...]
    """For 4-bit codes: the output of each code of a word, lowest bits first."""
    expressions: Expressions = field(default_factory=lambda: Expressions("the Quark config"), compare=False, repr=False)

    @classmethod
    def of(cls, config: Config) -> Self:
        by_pattern = config.get("layer_quant_config") or {}
        patterns(list(by_pattern), "the Quark config's layer_quant_config")
        # The list is only validated: a module's tensors show whether it is quantised.
        patterns(config.get("exclude"), "the Quark config's exclude")
        pairs = tuple((pattern, QuarkScheme.of(own)) for pattern, own in by_pattern.items())
        export = config.get("export")
        _check_algorithms(config.get("algo_config"))
        method = export.get("pack_method") if isinstance(export, Mapping) else None
        if method not in (None, "reorder", "order"):
            raise ModelError(f"the Quark config's pack_method is {method!r}; reorder and order are known")
        return cls(QuarkScheme.of(config.get("global_quant_config")), pairs, IN_ORDER if method == "order" else OUTPUTS)

    def _scheme(self, module: str) -> QuarkScheme:
        for pattern, scheme in self.by_pattern:
            if pattern == module or fnmatch.fnmatch(module, pattern):
                return scheme
            if pattern.startswith("re:") and self.expressions.matches(pattern[3:], module):
                return scheme
        return self.everywhere

    def scheme(self, module: str) -> str:
        return f"quark {self._scheme(module).dtype}"

    def parts(self, module: str, held: Container[str]) -> Parts:
        found = {"weight": f"{module}.weight", "scales": f"{module}.weight_scale"}
        zeros, scheme = f"{module}.weight_zero_point", self._scheme(module)
        has_zeros = scheme.needs_zeros or (scheme.dtype in WITH_ZEROS and zeros in held)
        return found | {"zeros": zeros} if has_zeros else found

    def dtypes(self, module: str) -> Dtypes:
        scheme = self._scheme(module)
        dtype = scheme.dtype
        if dtype == "fp8_e4m3":
            return {"weight": FLOATS_OF_8_BITS, "scales": FLOATS}
        if dtype == "int8":
            return {"weight": (torch.int8,), "scales": FLOATS, "zeros": WHOLE}
        if dtype in OF_4_BITS:
            return {"weight": WORDS, "scales": FLOATS, "zeros": WORDS}
        return {"weight": BYTES, "scales": EXPONENTS if scheme.has_exponents else (*EXPONENTS, *FLOATS)}

    def beside(self, module: str) -> tuple[str, ...]:
        return ("input_scale", "input_zero_point", "output_scale", "weight_zero_point")

    def shape(self, module: str, shapes: Shapes) -> tuple[int, int]:
        first, second = shapes["weight"]
        dtype = self._scheme(module).dtype
        if dtype in OF_4_BITS:
            return second * 8, first
        if dtype in OF_6_BITS:
            return first, second // 3 * 4
        return first, second * 2 if dtype == "fp4" else second

    def group(self, module: str, columns: int) -> int:
        scheme = self._scheme(module)
        of_floats = 32 if scheme.dtype == "fp4" or scheme.dtype in OF_6_BITS else columns
        return scheme.group_size or of_floats

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> GroupedWeight:
        dtype, weight, scales = self._scheme(module).dtype, tensors["weight"], tensors["scales"]
        if dtype in OF_4_BITS:
            return self._of_4_bits(module, tensors)
        _, k = self.shape(module, {"weight": tuple(weight.shape)})
        size = self.group(module, k)
        if dtype == "fp4":
            own = powers_of_two(scales) if scales.dtype in EXPONENTS else scales
            return floats_of_4_bits(module, weight, own, size)
        if dtype in OF_6_BITS:
            return floats_of_8_bits(module, _widened(module, weight, OF_6_BITS[dtype]), scales, group=size)
        if dtype == "int8":
            return integers_in_bytes(module, weight, scales, tensors.get("zeros"), group=size)
        return floats_of_8_bits(module, weight, scales, group=size)

    def _of_4_bits(self, module: str, tensors: Mapping[str, Tensor]) -> GroupedWeight:
        weight, scales, zeros = tensors["weight"], tensors["scales"], tensors.get("zeros")
        n, k = self.shape(module, {"weight": tuple(weight.shape)})
        size = self.group(module, k)
        scales = scales.reshape(1, -1) if scales.dim() == 1 else scales
        expect(
            k % size == 0 and tuple(scales.shape) == (k // size, n),
            module,
            f"scales are {list(scales.shape)}, and [{n}, {k}] in groups of {size} needs {[k // size, n]}",
        )
        expect(
            zeros is None or tuple(zeros.shape) == (k // size, n // 8),
            module,
            f"zero points are {None if zeros is None else list(zeros.shape)}; {[k // size, n // 8]} is expected",
        )
        sign = 8 if self._scheme(module).dtype == "int4" else 0  # -8 is code 0
        codes = (codes_of_words(weight, self.outputs) ^ sign).T
        own_zeros = None if zeros is None else (codes_of_words(zeros, self.outputs) ^ sign).T.float()
        return integers(codes, 4, own_zeros, scales.T.contiguous(), size)


def _check_algorithms(listed: object) -> None:
    """Raises ModelError for an algorithm that changes what the model computes besides its weights."""
    for each in listed if isinstance(listed, list | tuple) else [listed]:
        name = str(each.get("name", "")).lower() if isinstance(each, Mapping) else ""
        online = [key for key in ONLINE if isinstance(each, Mapping) and each.get(key)]
        if name in ROTATIONS and online:
            raise ModelError(
                f"the Quark config's algo_config has {name} with {', '.join(online)}: inputs that are rotated while "
                "the model computes are not supported"
            )
        if name == CORRECTED:
            raise ModelError(f"the Quark config's algo_config has {name}: low-rank corrections are not supported")


def _widened(module: str, packed: Tensor, mantissa: int) -> Tensor:
    """Converts 6-bit floats, packed [n, k * 3 / 4] uint8, to the same values in float8_e4m3fn [n, k]."""
    whole_groups = packed.dim() == 2 and packed.shape[1] % 24 == 0
    expect(whole_groups, module, f"they are {list(packed.shape)}, which is no whole number of groups of 32 codes")
    codes = torch.arange(32)
    exponents, fractions = codes >> mantissa, (codes & ((1 << mantissa) - 1)) / (1 << mantissa)
    bias = (1 << (4 - mantissa)) - 1
    powers = torch.ldexp(torch.ones(32), exponents.clamp(min=1) - bias)
    values = powers * torch.where(exponents > 0, 1 + fractions, fractions)
    table = torch.cat([values, -values]).to(torch.float8_e4m3fn).view(torch.uint8)
    found = cut_bits(packed.contiguous().view(torch.int32), 6, packed.shape[1] // 3 * 4)
    return table[found.int()].view(torch.float8_e4m3fn)


FORMAT = Quark
