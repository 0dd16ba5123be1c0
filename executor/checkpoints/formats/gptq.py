"""GPTQ (Frantar et al. 2022) as AutoGPTQ and GPTQModel store it: codes in int32 words along the input axis.

    qweight [k * bits / 32, n] int32, scales [k / group, n], qzeros [k / group, n * bits / 32] int32, g_idx [k] int32

The stored zero point is the zero point minus 1, except in the layouts gptq_v2 and gptq_p. GPTQModel subtracts the 1 of
all codes of 2, 4 and 8 bits from whole words, so that a zero point of 0 borrows from its neighbour. Symmetric weights
(`sym`) have the middle of the codes' range as their zero point, and tools store either form of it under either layout.

With `desc_act` the inputs were quantised in order of their importance, and g_idx gives the group of each.

In the layout gptq_p, GPTQModel's planar one, 32 codes of b bits take b words. Their bits are divided into planes of 4,
2 and 1 bits, lowest first, and each plane has its own words.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from headrace.executor.checkpoints.expressions import Expressions, check_expression
from headrace.executor.checkpoints.formats import (
    FLOATS,
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
)
from headrace.executor.checkpoints.formats._keys import ANY, COMMON, OF_TOOLS, READ, SEARCH, Keys, RefusedKey, keys
from headrace.ipc.failure import ModelError
from headrace.kernels.grouped import GroupedWeight, two_in_a_byte

METHOD = "GPTQ"
PLANAR = "gptq_p"
PLANES: Mapping[int, tuple[int, ...]] = MappingProxyType(
    {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
)
"""From the bits of a code to the bits of each of its planes."""


LAYOUTS = ("gptq", "gptq_v2", PLANAR)
IN_WORDS: Mapping[int, int] = MappingProxyType({2: 0x55555555, 4: 0x11111111, 8: 0x01010101})
"""From the bits of a code to a word that has 1 in each code."""


@dataclass(frozen=True)
class Gptq(Format):
    names = ("gptq", "gptq_marlin", "gptqmodel", "gptq_v2", "moe_wna16")
    stored = (
        Stored(
            "4 and 8 bits, in groups or rows, zero points or none, `desc_act`, both layouts of zero points, `dynamic`",
            ("int4", "int8"),
            (
                "gptq 4 bits",
                "gptq 4 bits, zeros",
                "gptq 8 bits",
                "gptq desc_act",
                "gptq rows, v2",
                "test_what_a_gptq_config_says_of_single_modules_counts",
            ),
            ordered=True,
        ),
        Stored("2 and 3 bits, kept in 4", ("int4",), ("gptq 3 bits", "gptq 2 bits, zeros"), ordered=True),
        Stored(
            "GPTQModel's planar layout (`gptq_p`): 2 to 8 bits (2 and 3 kept in 4, 5 to 7 in 8), else as above",
            ("int4", "int8"),
            ("gptq planar 3 bits", "gptq planar 5 bits", "gptq planar 6 bits, desc_act", "gptq planar 7 bits, zeros"),
            ordered=True,
        ),
    )
    made_by = "GPTQModel 7.6 and auto-round 0.16 (benchmarks/quantised_tools.py), a writer in tests"
    marks = ("qweight", "scales", "qzeros", "g_idx")
    keys: ClassVar[Keys] = {
        **COMMON,
        **OF_TOOLS,
        **keys(READ, "bits", "group_size", "sym", "desc_act", "checkpoint_format", "format"),
        **keys(SEARCH, "method", "data_type"),
        "dynamic": {ANY: {**OF_TOOLS, **keys(READ, "bits", "group_size", "sym", "desc_act")}},
        "is_marlin_format": RefusedKey(
            "the weights lie in the order of one GPU kernel; use the checkpoint they were made of"
        ),
    }
    bits: int
    group_size: int
    """Inputs that share a scale; -1: each row has one scale."""
    adds_one: bool
    """Whether 1 is added to each stored zero point."""
    is_symmetric: bool
    """Whether the config says so. Then one zero point for all groups, however it is stored, is the middle."""
    is_planar: bool
    is_ordered: bool
    """Whether inputs are in activation order (`desc_act`) with groups, so that g_idx is required."""
    dynamic: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings that differ for some modules, by regular expressions of module names; the first match applies."""
    expressions: Expressions = field(default_factory=lambda: Expressions("the GPTQ config"), compare=False, repr=False)

    @classmethod
    def of(cls, config: Config) -> Self:
        is_symmetric = bool(config.get("sym", True))
        layout = _layout(config, is_symmetric)
        dynamic, is_planar = config.get("dynamic") or {}, layout == PLANAR
        for each in dynamic:
            check_expression(each.removeprefix("+:").removeprefix("-:"), each, "the GPTQ config's dynamic")
        bits, size = number(config, ("bits",), METHOD), number(config, ("group_size",), METHOD, 128)
        is_ordered = bool(config.get("desc_act", False)) and size > 0
        return cls(_checked(bits), size, layout == "gptq", is_symmetric, is_planar, is_ordered, dynamic)

    def _of(self, module: str) -> Gptq:
        """The format with the settings of a module."""
        for pattern, differs in self.dynamic.items():
            if pattern.startswith("-:"):
                continue
            if self.expressions.matches(pattern.removeprefix("+:"), module):
                bits = _checked(number(differs, ("bits",), METHOD, self.bits))
                size = number(differs, ("group_size",), METHOD, self.group_size)
                is_ordered = bool(differs.get("desc_act", self.is_ordered)) and size > 0
                is_symmetric = bool(differs.get("sym", self.is_symmetric))
                return replace(self, bits=bits, group_size=size, is_symmetric=is_symmetric, is_ordered=is_ordered)
        return self

    def scheme(self, module: str) -> str:
        own = self._of(module)
        return f"gptq of {own.bits} bits" + (" with desc_act" if own.is_ordered else "")

    def parts(self, module: str, held: Container[str]) -> Parts:
        found = {part: f"{module}.{part}" for part in self.marks}
        if found["g_idx"] not in held and not self._of(module).is_ordered:
            del found["g_idx"]
        return found

    def dtypes(self, module: str) -> Dtypes:
        return {"qweight": WORDS, "qzeros": WORDS, "scales": FLOATS, "g_idx": WHOLE}

    def shape(self, module: str, shapes: Shapes) -> tuple[int, int]:
        words, n = shapes["qweight"]
        return n, words * 32 // self._of(module).bits

    def group(self, module: str, columns: int) -> int:
        size = self._of(module).group_size
        return columns if size <= 0 else size

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> GroupedWeight:
        own = self._of(module)
        qweight, scales = tensors["qweight"], tensors["scales"]
        (n, k), size = own.shape(module, {"qweight": tuple(qweight.shape)}), own.group(module, qweight.shape[0])
        size = k if own.group_size <= 0 else size
        expect(k % size == 0, module, f"groups of {size} do not divide {k} inputs")
        groups = k // size
        expect(
            tuple(scales.shape) == (groups, n),
            module,
            f"scales are {list(scales.shape)}, and [{n}, {k}] of {own.bits} bits in groups of {size} needs "
            f"{[groups, n]}",
        )
        cut = cut_planes if own.is_planar else cut_bits
        if own.is_planar:
            expect(k % 32 == 0 and n % 32 == 0, module, f"[{n}, {k}] is no whole number of 32 codes either way")
        codes = cut(qweight.T.contiguous(), own.bits, k)  # [n, k]
        zeros = own._zeros(module, tensors["qzeros"], n, groups)
        g_idx = tensors.get("g_idx")
        if own.is_ordered and groups > 1:
            assert g_idx is not None, "it is a part"
            expect(bool(g_idx.any()), module, "its config says desc_act, and g_idx is all zeros")
        order = grouped_order(module, g_idx, k, size)
        if order is not None:
            codes = codes[:, order.long()]
        return integers(codes, own.bits, zeros, scales.T.contiguous(), size, order)

    def _zeros(self, module: str, stored: Tensor, n: int, groups: int) -> Tensor | None:
        """The zero points [n, groups] float32; None: the middle of the codes' range."""
        needed = [groups, n * self.bits // 32]
        expect(list(stored.shape) == needed, module, f"zero points are {list(stored.shape)}; {needed} is expected")
        codes = (cut_planes if self.is_planar else cut_bits)(stored, self.bits, n).T
        if self.is_symmetric and bool((codes == codes[0, 0]).all()):
            return None
        if self.adds_one and self.bits in IN_WORDS:
            codes = cut_bits(stored + IN_WORDS[self.bits], self.bits, n).T
        elif self.adds_one:
            codes = codes + 1 & (1 << self.bits) - 1
        return codes.float()


def _layout(config: Config, is_symmetric: bool) -> str:
    """gptq, gptq_v2 or gptq_p, under each of the keys that tools write it to. Raises ModelError for another, and for
    two that store zero points differently."""
    given = {key: str(config[key]) for key in ("checkpoint_format", "format") if config.get(key)}
    if config.get("quant_method") == "gptq_v2":
        given["quant_method"] = "gptq_v2"
    if unknown := [name for name in given.values() if name not in LAYOUTS]:
        raise ModelError(
            f"the GPTQ checkpoint is in the layout {unknown[0]}, which is one kernel's own; use one in the layout gptq"
        )
    named = set(given.values())
    if PLANAR in named or not is_symmetric:
        said = ", ".join(f"{key} {name}" for key, name in given.items())
        if len(named) > 1:
            raise ModelError(f"the GPTQ config names two layouts: {said}")
    return PLANAR if PLANAR in named else "gptq_v2" if "gptq_v2" in named else "gptq"


def cut_planes(packed: Tensor, bits: int, count: int) -> Tensor:
    """As `cut_bits`, for codes in planes: [n, words] int32 -> [n, count] uint8, where 32 divides count."""
    blocks, found, first = packed.unflatten(1, (-1, bits)), None, 0
    for width in PLANES[bits]:
        plane = cut_bits(blocks[..., first : first + width].flatten(1), width, count) << first
        found = plane if found is None else found | plane
        first += width
    assert found is not None, "there is a plane"
    return found


def integers(
    codes: Tensor, bits: int, zeros: Tensor | None, scales: Tensor, size: int, order: Tensor | None = None
) -> GroupedWeight:
    """Packs codes [n, k] uint8 of up to 8 bits, with zeros (None: the middle of the codes' range) and scales, both
    [n, k / size]. order: of `grouped_order`.

    Codes of fewer than 4 bits are kept in 4, and those of 5 to 7 in 8.
    """
    wide = 4 if bits <= 4 else 8
    middle, wide_middle = 1 << (bits - 1), 1 << (wide - 1)
    if zeros is None or bool((zeros == middle).all()):
        zeros = None
        if wide != bits:
            codes = codes + (wide_middle - middle)
    stored = two_in_a_byte(codes) if wide == 4 else codes.contiguous()
    kept = None if zeros is None else zeros.to(torch.float16).contiguous()
    return GroupedWeight("int4" if wide == 4 else "int8", stored, scales, size, kept, order)


def grouped_order(module: str, g_idx: Tensor | None, k: int, size: int) -> Tensor | None:
    """[k] int32: the inputs in order of their groups; None if they are in this order already. Raises ModelError if
    groups differ in size."""
    if g_idx is None:
        return None
    expect(tuple(g_idx.shape) == (k,), module, f"g_idx has {list(g_idx.shape)} entries, and there are {k} inputs")
    by_place = torch.arange(k) // size
    if torch.equal(g_idx.long(), by_place) or not bool(g_idx.any()):
        return None
    order = torch.argsort(g_idx, stable=True)
    is_even = torch.equal(g_idx[order].long(), by_place)
    expect(is_even, module, f"g_idx does not have {size} inputs in each of {k // size} groups")
    return order.to(torch.int32)


def _checked(bits: int) -> int:
    if bits not in PLANES:
        raise ModelError(f"GPTQ weights of {bits} bits are not supported; 2 to 8 bits are")
    return bits


FORMAT = Gptq
