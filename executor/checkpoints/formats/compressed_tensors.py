"""compressed-tensors, the format that llm-compressor writes: groups of modules, each stored by one scheme.

    pack-quantized          weight_packed int32 [n, k * bits / 32], weight_scale [n, groups], weight_zero_point packed
                            along the rows, weight_g_idx [k]
    int-quantized           weight int8 [n, k] of 2 to 8 bits, weight_scale of the whole, rows or groups,
                            weight_zero_point
    float-quantized         weight float8_e4m3fn [n, k], weight_scale of the whole, rows, groups or blocks
    mxfp8-quantized         weight float8_e4m3fn [n, k], weight_scale uint8 [n, k / 32], exponents
    nvfp4-pack-quantized    weight_packed uint8 [n, k / 2], weight_scale float8_e4m3fn [n, k / 16], weight_global_scale,
                            a divisor of the scales
    mxfp4-pack-quantized    weight_packed uint8 [n, k / 2], weight_scale uint8 [n, k / 32], exponents

Inputs with a static scale have input_scale and input_zero_point [1]. Integer weights are pack-quantized if inputs are
not quantised, and since compressed-tensors 0.19 int-quantized if they are.

`targets` and `ignore` are names, the class `Linear`, or regular expressions after `re:`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
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
    number,
    patterns,
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
    keys,
)
from headrace.executor.checkpoints.formats._scaled import (
    floats_of_4_bits,
    floats_of_8_bits,
    input_rounding,
    integers_in_bytes,
    powers_of_two,
)
from headrace.executor.checkpoints.formats.gptq import grouped_order, integers
from headrace.ipc.failure import ModelError
from headrace.kernels.grouped import GroupedWeight, InputRounding

PACKED, INTEGERS = "pack-quantized", ("int-quantized", "naive-quantized")
MXFP8 = "mxfp8-quantized"
IN_FLOATS = ("float-quantized", MXFP8)
NVFP4, MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
KNOWN = (PACKED, *INTEGERS, *IN_FLOATS, NVFP4, MXFP4)
GROUPS = {NVFP4: 16, MXFP4: 32, MXFP8: 32}
"""Weights that share a scale, in layouts that fix it."""
ORDERED = ("group", "dynamic", True)
"""Values of `actorder` with which weight_g_idx gives the group of each input."""
OFFLINE = ("weight_input", "weight_output")
"""Where transforms are part of the stored weights; elsewhere the model's activations are transformed."""
SHOWN_BY_SCALES = "group_size, block_structure and the scales' shapes show it"
OF_WEIGHTS = {
    **keys(READ, "num_bits", "type", "symmetric", "group_size", "block_structure", "actorder"),
    **keys(SHOWN_BY_SCALES, "strategy"),
    **keys(BY_TENSORS, "scale_dtype", "zp_dtype"),
    **keys(SEARCH, "observer", "observer_kwargs", "dynamic"),
}
OF_GROUP = {
    **keys(READ, "targets", "format"),
    "weights": OF_WEIGHTS,
    "input_activations": {
        **keys(READ, "num_bits", "type", "symmetric", "dynamic", "strategy"),
        **keys(OF_INPUTS, "group_size", "block_structure", "actorder", "scale_dtype", "zp_dtype"),
        **keys(SEARCH, "observer", "observer_kwargs"),
    },
    **keys(OF_INPUTS, "output_activations"),
}
SPARSE = "2:4 sparse weights are not supported; a checkpoint of the same scheme that is dense is"


@dataclass(frozen=True)
class GroupScheme:
    """How one group of modules is stored."""

    layout: str
    targets: tuple[str, ...]
    bits: int
    is_float: bool
    group_size: int | None
    block: tuple[int, int] | None
    needs_zeros: bool
    """Whether weights are asymmetric integers, so that zero points are required."""
    is_ordered: bool
    """Whether inputs are in activation order, so that weight_g_idx is required."""
    inputs: Mapping[str, bool] | None
    """For inputs that are rounded to int8: `dynamic` and `symmetric`; None: inputs are not rounded."""

    @classmethod
    def of(cls, name: str, config: Config, layout: str) -> GroupScheme:
        weights = config.get("weights") if isinstance(config, Mapping) else None
        if not isinstance(weights, Mapping):
            raise ModelError(f"the group {name} of the compressed-tensors config says nothing of weights")
        layout = str(config.get("format") or layout)
        bits, is_float = number(weights, ("num_bits",), "compressed-tensors"), weights.get("type", "int") == "float"
        if layout == "dense" or layout not in KNOWN:
            advice = SPARSE if "24" in layout or "sparse" in layout else f"known: {', '.join(KNOWN)}"
            raise ModelError(f"compressed-tensors' layout {layout} is not supported: {advice}")
        has_integers = layout == PACKED or (layout in INTEGERS and not is_float)
        if (has_integers and bits not in range(2, 9)) or (layout in (*INTEGERS, *IN_FLOATS) and is_float and bits != 8):
            raise ModelError(f"weights of {bits} bits are not supported in compressed-tensors' layout {layout}")
        if is_float and weights.get("symmetric") is False:
            raise ModelError(f"compressed-tensors' group {name} has floats with zero points, which are not supported")
        targets = patterns(config.get("targets"), f"the targets of the compressed-tensors group {name}")
        size = GROUPS.get(layout, number(weights, ("group_size",), "compressed-tensors", 0))
        return cls(
            layout=layout,
            targets=targets or ("Linear",),
            bits=bits,
            is_float=is_float,
            group_size=size if size > 0 else None,
            block=_block(weights.get("block_structure")),
            needs_zeros=has_integers and weights.get("symmetric") is False,
            is_ordered=layout == PACKED and weights.get("actorder") in ORDERED,
            inputs=_int8_inputs(config.get("input_activations")),
        )

    @property
    def text(self) -> str:
        return f"compressed-tensors {self.layout} of {self.bits} bits"

    @property
    def is_packed(self) -> bool:
        return self.layout in (PACKED, NVFP4, MXFP4)

    def rounding(self, module: str, tensors: Mapping[str, Tensor]) -> InputRounding | None:
        return None if self.inputs is None else input_rounding(module, self.inputs, tensors)


@dataclass(frozen=True)
class CompressedTensors(Format):
    names = ("compressed-tensors", "compressed_tensors", "sparseml")
    stored = (
        Stored(
            "W4A16 and W8A16 (2 and 3 bits kept in 4, 5 to 7 in 8), in groups or rows, zero points or none, ordered by "
            "activation",
            ("int4", "int8"),
            (
                "compressed W4A16",
                "compressed W4A16 zeros",
                "compressed W4A16 ordered",
                "compressed W8A16",
                "compressed W3A16 zeros",
                "compressed W5A16",
            ),
            ordered=True,
        ),
        Stored(
            "W8A8 int8, and 2 to 7 bits with such inputs (W4A8): activations become int8 too, by a static scale or "
            "each token's own, symmetric or not; those of 4 bits or with scales for groups keep 16 bits",
            ("int4", "int8"),
            ("compressed W8A8", "compressed W4A8", "test_inputs_become_int8_where_the_checkpoint_means_it"),
        ),
        Stored(
            "W8A8 fp8, a scale for the matrix, rows, groups (MXFP8 too) or blocks; activations stay in floats",
            ("e4m3",),
            ("compressed fp8", "compressed mxfp8"),
        ),
        Stored(
            "W8A8 fp8, stacks of experts with stacks of scales (Granite 4)",
            ("e4m3",),
            ("test_a_stack_of_gates_and_ups_in_fp8_has_one_of_scales",),
            made_by="a writer in tests",
        ),
        Stored("NVFP4 and MXFP4; activations stay in floats", ("float4",), ("compressed nvfp4", "compressed mxfp4")),
        Stored(
            "schemes by module, with `targets`, `ignore` and regular expressions",
            (),
            ("test_compressed_tensors_stores_each_module_by_its_target_and_leaves_what_it_ignores",),
        ),
    )
    made_by = "llm-compressor 0.14 (benchmarks/quantised_tools.py), a writer in tests"
    marks = (
        "weight_scale",
        "weight_packed",
        "weight_global_scale",
        "weight_zero_point",
        "weight_g_idx",
        "weight_shape",
    )
    unshifted = ("weight_zero_point",)
    keys: ClassVar[Keys] = {
        **COMMON,
        **keys(READ, "format", "sparsity_config", "transform_config"),
        "config_groups": {ANY: OF_GROUP},
        **keys(BY_TENSORS, "quantization_status", "moe_sparsity_config"),
        **keys(SEARCH, "global_compression_ratio"),
        **keys(OF_CACHE, "kv_cache_scheme"),
    }
    schemes: tuple[GroupScheme, ...]
    expressions: Expressions = field(
        default_factory=lambda: Expressions("the compressed-tensors config"), compare=False, repr=False
    )

    @classmethod
    def is_of_cache(cls, config: Config) -> bool:
        return not config.get("config_groups") and bool(config.get("kv_cache_scheme"))

    @classmethod
    def of(cls, config: Config) -> Self:
        groups = config.get("config_groups")
        _check_transforms(config.get("transform_config"))
        sparse = config.get("sparsity_config")
        if isinstance(sparse, Mapping) and str(sparse.get("format", "dense")) != "dense":
            raise ModelError(f"compressed-tensors' layout {sparse['format']} is not supported: {SPARSE}")
        if not isinstance(groups, Mapping) or not groups:
            raise ModelError("the compressed-tensors config has no config_groups")
        # The list is only validated: a module's tensors show whether it is quantised.
        patterns(config.get("ignore"), "the compressed-tensors config's ignore")
        layout = str(config.get("format", ""))
        return cls(tuple(GroupScheme.of(name, group, layout) for name, group in groups.items()))

    @property
    def rounds_inputs(self) -> bool:
        return any(scheme.inputs is not None for scheme in self.schemes)

    def _scheme(self, module: str) -> GroupScheme:
        """The scheme that has the module's name as a target, else one with an expression for it, else the one of all
        linear layers, as the tool chooses. Whether a module is quantised is judged by its tensors, not by `ignore`,
        which may have the name of the matrix that it is fused into."""
        by_class = [scheme for scheme in self.schemes if "Linear" in scheme.targets]
        for scheme in self.schemes:
            if module in scheme.targets:
                return scheme
        for scheme in self.schemes:
            if any(self._names(target, module) for target in scheme.targets):
                return scheme
        if not by_class:
            raise ModelError(f"no group of the compressed-tensors config has {module} as a target, and it is quantised")
        return by_class[0]

    def _names(self, target: str, module: str) -> bool:
        return target.startswith("re:") and self.expressions.matches(target.removeprefix("re:"), module)

    def scheme(self, module: str) -> str:
        return self._scheme(module).text

    def parts(self, module: str, held: Container[str]) -> Parts:
        scheme = self._scheme(module)
        found = {"weight": f"{module}.{'weight_packed' if scheme.is_packed else 'weight'}"}
        found["scales"] = f"{module}.weight_scale"
        if scheme.layout == NVFP4:
            found["global"] = f"{module}.weight_global_scale"
        zeros, g_idx = f"{module}.weight_zero_point", f"{module}.weight_g_idx"
        if scheme.needs_zeros or (zeros in held and not scheme.is_float):
            found["zeros"] = zeros
        if scheme.is_ordered or (g_idx in held and not scheme.is_float):
            found["g_idx"] = g_idx
        if scheme.inputs is not None and not scheme.inputs["dynamic"]:
            found["input_scale"] = f"{module}.input_scale"
            if not scheme.inputs["symmetric"]:
                found["input_zero"] = f"{module}.input_zero_point"
        return found

    def beside(self, module: str) -> tuple[str, ...]:
        return ("weight_shape", "input_scale", "input_zero_point", "input_global_scale", "weight_zero_point")

    def dtypes(self, module: str) -> Dtypes:
        scheme = self._scheme(module)
        found: dict[str, tuple[torch.dtype, ...]] = {
            "scales": FLOATS,
            "global": FLOATS,
            "g_idx": WHOLE,
            "zeros": WORDS if scheme.layout == PACKED else WHOLE,
            "input_scale": FLOATS,
            "input_zero": WHOLE,
        }
        if scheme.layout == PACKED:
            return found | {"weight": WORDS}
        if scheme.layout == NVFP4:
            return found | {"weight": BYTES, "scales": FLOATS_OF_8_BITS}
        if scheme.layout == MXFP4:
            return found | {"weight": BYTES, "scales": EXPONENTS}
        if scheme.layout == MXFP8:
            return found | {"weight": FLOATS_OF_8_BITS, "scales": EXPONENTS}
        return found | {"weight": FLOATS_OF_8_BITS if scheme.is_float else (torch.int8,)}

    def shape(self, module: str, shapes: Shapes) -> tuple[int, int]:
        (n, stored), scheme = shapes["weight"], self._scheme(module)
        if scheme.layout == PACKED:
            return n, stored * 32 // scheme.bits
        return n, stored * 2 if scheme.is_packed else stored

    def group(self, module: str, columns: int) -> int:
        scheme = self._scheme(module)
        return (scheme.block[1] if scheme.block is not None else scheme.group_size) or columns

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> GroupedWeight:
        scheme, weight, scales = self._scheme(module), tensors["weight"], tensors["scales"]
        if scheme.layout == PACKED:
            return self._packed(module, scheme, tensors)
        if scheme.layout == NVFP4:
            divisor = tensors["global"]
            is_number = divisor.numel() == 1
            expect(is_number, module, f"weight_global_scale is {list(divisor.shape)}; one number is expected")
            return floats_of_4_bits(module, weight, scales.float() / divisor.float(), GROUPS[NVFP4])
        if scheme.layout == MXFP4:
            return floats_of_4_bits(module, weight, powers_of_two(scales), GROUPS[MXFP4])
        size = scheme.group_size
        if scheme.is_float:
            return floats_of_8_bits(module, weight, scales, group=size, block=scheme.block)
        inputs, zeros = scheme.rounding(module, tensors), tensors.get("zeros")
        return integers_in_bytes(module, weight, scales, zeros, inputs=inputs, bits=scheme.bits, group=size)

    def _packed(self, module: str, scheme: GroupScheme, tensors: Mapping[str, Tensor]) -> GroupedWeight:
        weight, scales, bits = tensors["weight"], tensors["scales"], scheme.bits
        n, k = self.shape(module, {"weight": tuple(weight.shape)})
        size = self.group(module, k)
        expect(k % size == 0, module, f"groups of {size} do not divide {k} inputs")
        if scales.numel() == 1:
            scales = scales.reshape(1, 1).expand(n, 1)
        expect(
            tuple(scales.shape) == (n, k // size),
            module,
            f"scales are {list(scales.shape)}, and [{n}, {k}] in groups of {size} needs {[n, k // size]}",
        )
        zeros = None
        if "zeros" in tensors:
            stored, needed = tensors["zeros"], [-(-n * bits // 32), k // size]
            expect(list(stored.shape) == needed, module, f"zero points are {list(stored.shape)}; {needed} is expected")
            zeros = cut_bits(stored.T.contiguous(), bits, n).T.float()
        order = grouped_order(module, tensors.get("g_idx"), k, size)
        codes = cut_bits(weight, bits, k)
        if order is not None:
            codes = codes[:, order.long()]
        found = integers(codes, bits, zeros, scales.contiguous(), size, order)
        return replace(found, inputs=scheme.rounding(module, tensors))


def _block(given: object) -> tuple[int, int] | None:
    """Rows and columns of a block, which older versions write as `128x128`. Raises ModelError."""
    if not given:
        return None
    parts = given.split("x") if isinstance(given, str) else given
    try:
        rows, columns = (int(each) for each in parts)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        rows = columns = 0
    if rows < 1 or columns < 1:
        raise ModelError(
            f"the compressed-tensors config's block_structure is {given!r}; two whole numbers above 0 are expected"
        )
    return rows, columns


def _check_transforms(config: object) -> None:
    """Raises ModelError for transforms of what the model computes."""
    groups = config.get("config_groups", config) if isinstance(config, Mapping) else config
    if not groups:
        return
    if not isinstance(groups, Mapping):
        raise ModelError(f"the compressed-tensors config's transform_config is {groups!r:.80}; an object is expected")
    for name, group in groups.items():
        applied = group.get("apply") if isinstance(group, Mapping) else None
        for each in applied if isinstance(applied, list | tuple) else [applied]:
            location = each.get("location") if isinstance(each, Mapping) else None
            if location not in OFFLINE:
                raise ModelError(
                    f"the compressed-tensors config's transform_config has {name}, which transforms the {location} of "
                    f"modules while the model computes; only transforms of {' and '.join(OFFLINE)} are supported, "
                    "which are part of the stored weights"
                )


def _int8_inputs(config: object) -> Mapping[str, bool] | None:
    """`Scheme.inputs`. None if inputs are not int8, or have a scale per group of a token: these keep 16 bits."""
    if not isinstance(config, Mapping) or config.get("num_bits") != 8 or config.get("type", "int") != "int":
        return None
    if config.get("strategy") not in (None, "token", "tensor"):
        return None
    return {"dynamic": bool(config.get("dynamic", False)), "symmetric": bool(config.get("symmetric", True))}


FORMAT = CompressedTensors
