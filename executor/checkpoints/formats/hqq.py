"""HQQ, half-quadratic quantisation, as its linear layers store their weights.

W_q      uint8: codes [n * k / group, group], divided by rows into as many slabs as a byte has codes; a byte holds one
         code of each slab, that of the first in the highest bits
scale    [n * k / group, 1]
zero     [n * k / group, 1]: w = scale * (code - zero)
shape    [2]; further scalars repeat the config (nbits, group_size, axis), with which they must agree
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from headrace.executor.checkpoints.formats import (
    BYTES,
    FLOATS,
    WHOLE,
    Config,
    Dtypes,
    Format,
    Parts,
    Shapes,
    Stored,
    expect,
    number,
)
from headrace.executor.checkpoints.formats._keys import BY_TENSORS, COMMON, OTHERS, READ, SEARCH, Keys, RefusedKey, keys
from headrace.executor.checkpoints.formats.gptq import integers
from headrace.ipc.failure import ModelError
from headrace.kernels.grouped import GroupedWeight

BITS = (1, 2, 4, 8)
OF_WEIGHTS = {
    **keys(READ, "nbits", "group_size", "axis"),
    **keys(SEARCH, "optimize", "round_zero"),
    **keys(BY_TENSORS, "channel_wise", "view_as_float", "bitpack"),
}
QUANTISED_SCALES = RefusedKey("scales and zero points that are quantised themselves are not supported")
OF_LAYER = {
    "weight_quant_params": OF_WEIGHTS,
    **keys(QUANTISED_SCALES, "scale_quant_params", "zero_quant_params"),
    **keys(OTHERS, "offload_meta"),
}
REPEATED = ("nbits", "group_size", "axis")
"""Scalars of a layer that say what the config says of all layers."""
SCALARS = (
    "packing", "unpack_view_dtype", "view_as_float", "quant_scale", "quant_zero", "compute_dtype", "offload_meta",
    "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip
"""Further tensors of a layer, which are not read: the shapes and types of its codes and scales show the same."""


@dataclass(frozen=True)
class Hqq(Format):
    names = ("hqq",)
    stored = (
        Stored(
            "1, 2, 4 and 8 bits (1 and 2 kept in 4), in groups along the inputs (axis 1), zero points that are floats",
            ("int4", "int8"),
            ("hqq 8 bits", "hqq 4 bits", "hqq 2 bits"),
        ),
    )
    made_by = "hqq 0.2 (benchmarks/quantised_tools.py), a writer in tests"
    marks = ("W_q", "scale", "zero")
    keys: ClassVar[Keys] = {
        **COMMON,
        **OF_WEIGHTS,
        **keys(QUANTISED_SCALES, "quant_scale", "quant_zero"),
        **keys(BY_TENSORS, "skip_modules"),
        "quant_config": OF_LAYER,
    }
    bits: int
    group_size: int

    @classmethod
    def of(cls, config: Config) -> Self:
        own = config.get("quant_config")
        weights = own.get("weight_quant_params") if isinstance(own, Mapping) else config
        if not isinstance(weights, Mapping):
            raise ModelError("the HQQ config has no weight_quant_params")
        bits, axis = number(weights, ("nbits",), "HQQ"), number(weights, ("axis",), "HQQ", 1)
        if bits not in BITS:
            raise ModelError(f"HQQ weights of {bits} bits are not supported; 1, 2, 4 and 8 bits are")
        if axis != 1:
            raise ModelError("HQQ weights in groups along the outputs (axis 0) are not supported; axis 1 is")
        if (size := number(weights, ("group_size",), "HQQ")) < 1:
            raise ModelError(f"the HQQ config's group_size is {size}; a number of inputs is expected")
        return cls(bits, size)

    def scheme(self, module: str) -> str:
        return f"hqq of {self.bits} bits"

    def parts(self, module: str, held: Container[str]) -> Parts:
        repeated = (name for name in REPEATED if f"{module}.{name}" in held)
        return {name: f"{module}.{name}" for name in (*self.marks, "shape", *repeated)}

    def dtypes(self, module: str) -> Dtypes:
        whole = dict.fromkeys(("shape", *REPEATED), WHOLE)
        return {"W_q": BYTES, "scale": FLOATS, "zero": FLOATS, **whole}

    def beside(self, module: str) -> tuple[str, ...]:
        return SCALARS

    def shape(self, module: str, shapes: Shapes) -> tuple[int, int] | None:
        return None  # stored codes are flat

    def group(self, module: str, columns: int) -> int:
        return self.group_size

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> GroupedWeight:
        stored = tensors["shape"].tolist()
        expect(isinstance(stored, list) and len(stored) == 2, module, f"its shape is {stored}; rows and columns are")
        (n, k), size, in_byte = stored, self.group_size, 8 // self.bits
        for name, known in zip(REPEATED, (self.bits, size, 1), strict=True):
            own = tensors[name].tolist() if name in tensors else known
            expect(own == known, module, f"its own {name} is {own}, and the config's is {known}")
        expect(k % size == 0, module, f"groups of {size} do not divide {k} inputs")
        packed, groups = tensors["W_q"], n * k // size
        expect(
            tuple(packed.shape) == (groups // in_byte, size),
            module,
            f"W_q is {list(packed.shape)}, and [{n}, {k}] of {self.bits} bits in groups of {size} needs "
            f"{[groups // in_byte, size]}",
        )
        for name in ("scale", "zero"):
            count = tensors[name].numel()
            expect(count == groups, module, f"{name} has {count} numbers, and there are {groups} groups")
        shifts = [self.bits * (in_byte - 1 - index) for index in range(in_byte)]
        codes = torch.cat([packed >> shift & ((1 << self.bits) - 1) for shift in shifts]).view(n, k)
        scales, zeros = (tensors[name].view(n, k // size).contiguous() for name in ("scale", "zero"))
        found = integers(codes, max(self.bits, 4), None, scales, size)
        return GroupedWeight(found.kind, found.codes, scales, size, zeros.float())


FORMAT = Hqq
