"""compressed-tensors, what llm-compressor writes: groups of modules that are stored in the same way.

    pack-quantized          weight_packed int32 [n, k * bits / 32], weight_scale [n, groups], weight_zero_point packed
                            along the rows, weight_g_idx [k]
    int-quantized           weight int8 [n, k] of 2 to 8 bits, weight_scale of the whole, rows or groups,
                            weight_zero_point
    float-quantized         weight float8_e4m3fn [n, k], weight_scale of the whole, rows, groups or blocks
    mxfp8-quantized         weight float8_e4m3fn [n, k], weight_scale uint8 [n, k / 32], exponents
    nvfp4-pack-quantized    weight_packed uint8 [n, k / 2], weight_scale float8_e4m3fn [n, k / 16], weight_global_scale,
                            by which scales are divided
    mxfp4-pack-quantized    weight_packed uint8 [n, k / 2], weight_scale uint8 [n, k / 32], exponents

Of inputs with a static scale there are input_scale and input_zero_point [1]. What has integers is pack-quantized where
only weights are quantised, and since compressed-tensors 0.19 int-quantized where inputs are too.

`targets` and `ignore` are names, the class `Linear`, or regular expressions after `re:`.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from headrace.executor.checkpoints.quantisation import (
    Config,
    Format,
    Parts,
    Shapes,
    Stored,
    cut_bits,
    expect,
    number,
    patterns,
)
from headrace.executor.checkpoints.quantisation._scaled import (
    floats_of_4_bits,
    floats_of_8_bits,
    input_rounding,
    integers_in_bytes,
    powers_of_two,
)
from headrace.executor.checkpoints.quantisation.gptq import grouped_order, integers
from headrace.executor.models.blocks import Role
from headrace.ipc.failure import ModelError
from headrace.kernels.grouped import GroupedWeight, InputRounding

PACKED, INTEGERS = "pack-quantized", ("int-quantized", "naive-quantized")
FLOATS = ("float-quantized", "mxfp8-quantized")
NVFP4, MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
KNOWN = (PACKED, *INTEGERS, *FLOATS, NVFP4, MXFP4)
SPARSE = "2:4 sparse weights are not supported; a checkpoint of the same scheme that is dense is"


@dataclass(frozen=True)
class Scheme:
    """How one group of modules is stored."""

    layout: str
    targets: tuple[str, ...]
    bits: int
    is_float: bool
    group_size: int | None
    block: tuple[int, int] | None
    inputs: Mapping[str, bool] | None
    """Of inputs that become int8: whether `dynamic`, and `symmetric`."""

    @classmethod
    def of(cls, name: str, config: Config, layout: str) -> Scheme:
        weights = config.get("weights")
        if not isinstance(weights, Mapping):
            raise ModelError(f"the group {name} of the compressed-tensors config says nothing of weights")
        layout = str(config.get("format") or layout)
        bits, is_float = number(weights, ("num_bits",), "compressed-tensors"), weights.get("type", "int") == "float"
        if layout == "dense" or layout not in KNOWN:
            advice = SPARSE if "24" in layout or "sparse" in layout else f"known are {', '.join(KNOWN)}"
            raise ModelError(f"compressed-tensors' layout {layout} is not supported: {advice}")
        has_integers = layout == PACKED or (layout in INTEGERS and not is_float)
        if (has_integers and bits not in range(2, 9)) or (layout in (*INTEGERS, *FLOATS) and is_float and bits != 8):
            raise ModelError(f"weights of {bits} bits are not supported in compressed-tensors' layout {layout}")
        targets = patterns(config.get("targets"), f"the targets of the compressed-tensors group {name}")
        block = weights.get("block_structure")
        if isinstance(block, str):
            block = [int(each) for each in block.split("x")]
        return cls(
            layout=layout,
            targets=targets or ("Linear",),
            bits=bits,
            is_float=is_float,
            group_size=weights.get("group_size"),
            block=None if not block else (int(block[0]), int(block[1])),
            inputs=_int8_inputs(config.get("input_activations")),
        )

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
            (
                "compressed W8A8",
                "compressed W4A8",
                "test_inputs_become_int8_where_the_checkpoint_means_it",
            ),
        ),
        Stored(
            "W8A8 fp8, a scale for the matrix, rows, groups (MXFP8 too) or blocks; activations stay in floats",
            ("e4m3",),
            ("compressed fp8", "compressed mxfp8"),
        ),
        Stored("NVFP4 and MXFP4; activations stay in floats", ("float4",), ("compressed nvfp4", "compressed mxfp4")),
        Stored(
            "schemes by module, with `targets`, `ignore` and regular expressions",
            (),
            ("test_compressed_tensors_stores_each_module_by_its_target_and_leaves_what_it_ignores",),
        ),
    )
    made_by = "llm-compressor 0.14 (benchmarks/quantised_tools.py), a writer in tests"
    schemes: tuple[Scheme, ...]

    @classmethod
    def of(cls, config: Config) -> Self:
        groups = config.get("config_groups")
        sparse = config.get("sparsity_config")
        if isinstance(sparse, Mapping) and str(sparse.get("format", "dense")) != "dense":
            raise ModelError(f"compressed-tensors' layout {sparse['format']} is not supported: {SPARSE}")
        if not isinstance(groups, Mapping) or not groups:
            raise ModelError("the compressed-tensors config has no config_groups")
        patterns(config.get("ignore"), "the compressed-tensors config's ignore")  # what it names, the tensors tell
        layout = str(config.get("format", ""))
        return cls(tuple(Scheme.of(name, group, layout) for name, group in groups.items()))

    @property
    def rounds_inputs(self) -> bool:
        return any(scheme.inputs is not None for scheme in self.schemes)

    def _scheme(self, module: str) -> Scheme:
        """The one whose target names the module, else the one of all linear layers. Whether it is quantised at all its
        tensors tell, as `ignore` lists may name a module by what it is fused into."""
        by_class = [scheme for scheme in self.schemes if "Linear" in scheme.targets]
        for scheme in self.schemes:
            if any(_names(target, module) for target in scheme.targets):
                return scheme
        if not by_class:
            raise ModelError(f"no group of the compressed-tensors config has {module} as a target, and it is quantised")
        return by_class[0]

    def parts(self, module: str, role: Role, held: Container[str]) -> Parts | None:
        if f"{module}.weight_scale" not in held:
            return None
        scheme = self._scheme(module)
        found = {"weight": f"{module}.{'weight_packed' if scheme.is_packed else 'weight'}"}
        found["scales"] = f"{module}.weight_scale"
        if scheme.layout == NVFP4:
            found["global"] = f"{module}.weight_global_scale"
        optional = {"zeros": f"{module}.weight_zero_point", "g_idx": f"{module}.weight_g_idx"}
        if not scheme.is_float:
            found |= {part: name for part, name in optional.items() if name in held}
        if scheme.inputs is not None and not scheme.inputs["dynamic"]:
            found["input_scale"] = f"{module}.input_scale"
            if not scheme.inputs["symmetric"]:
                found["input_zero"] = f"{module}.input_zero_point"
        return found

    def beside(self, module: str) -> tuple[str, ...]:
        return ("weight_shape", "input_scale", "input_zero_point", "input_global_scale", "weight_zero_point")

    def shape(self, module: str, shapes: Shapes) -> tuple[int, int]:
        (n, stored), scheme = shapes["weight"], self._scheme(module)
        if scheme.layout == PACKED:
            return n, stored * 32 // scheme.bits
        return n, stored * 2 if scheme.is_packed else stored

    def group(self, module: str, columns: int) -> int:
        scheme = self._scheme(module)
        if scheme.layout in (NVFP4, MXFP4):
            return 16 if scheme.layout == NVFP4 else 32
        size = scheme.block[1] if scheme.block is not None else scheme.group_size
        return size if size and size > 0 else columns

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> GroupedWeight:
        scheme, weight, scales = self._scheme(module), tensors["weight"], tensors["scales"]
        if scheme.layout == PACKED:
            return self._packed(module, scheme, tensors)
        if scheme.layout == NVFP4:
            return floats_of_4_bits(module, weight, scales.float() / tensors["global"].float())
        if scheme.layout == MXFP4:
            return floats_of_4_bits(module, weight, powers_of_two(scales))
        if scheme.is_float:
            return floats_of_8_bits(module, weight, scales, scheme.block)
        return integers_in_bytes(
            module, weight, scales, tensors.get("zeros"), scheme.rounding(module, tensors), scheme.bits
        )

    def _packed(self, module: str, scheme: Scheme, tensors: Mapping[str, Tensor]) -> GroupedWeight:
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
            zeros = cut_bits(tensors["zeros"].T.contiguous(), bits, n).T.float()
            expect(tuple(zeros.shape) == (n, k // size), module, f"there are zero points of {list(zeros.shape)}")
        order = grouped_order(module, tensors.get("g_idx"), k, size)
        codes = cut_bits(weight, bits, k)
        if order is not None:
            codes = codes[:, order.long()]
        found = integers(codes, bits, zeros, scales.contiguous(), size, order)
        return replace(found, inputs=scheme.rounding(module, tensors))


def _int8_inputs(config: object) -> Mapping[str, bool] | None:
    """None where they are none, and where they have scales for groups of a token: such keep 16 bits."""
    if not isinstance(config, Mapping) or config.get("num_bits") != 8 or config.get("type", "int") != "int":
        return None
    if config.get("strategy") not in (None, "token", "tensor"):
        return None
    return {"dynamic": bool(config.get("dynamic", False)), "symmetric": bool(config.get("symmetric", True))}


def _names(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module


FORMAT = CompressedTensors
