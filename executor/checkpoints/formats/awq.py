"""AWQ (Lin et al. 2023) in AutoAWQ's GEMM layout: 4-bit codes in int32 words along the output axis.

    qweight [k, n / 8] int32, qzeros [k / group, n / 8] int32, scales [k / group, n]

The eight codes of a word belong to the outputs 0, 2, 4, 6, 1, 3, 5, 7, lowest bits first.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from headrace.executor.checkpoints.formats import (
    FLOATS,
    WORDS,
    Config,
    Dtypes,
    Format,
    Parts,
    Shapes,
    Stored,
    expect,
    number,
)
from headrace.executor.checkpoints.formats._keys import COMMON, OF_TOOLS, READ, SEARCH, Keys, RefusedKey, keys
from headrace.executor.checkpoints.formats.gptq import integers
from headrace.ipc.failure import ModelError
from headrace.kernels.grouped import GroupedWeight

METHOD = "AWQ"
LAYOUTS = ("gemm", "exllama", "ipex")
"""Versions whose weights have the GEMM layout; the others are kernels that read it."""
LLM_AWQ = "llm-awq"
"""A tool with a layout of its own, which configs name as a backend."""
OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Awq(Format):
    names = ("awq", "awq_marlin", "moe_wna16")
    stored = (Stored("4 bits in the GEMM layout, in groups or rows, zero points or none", ("int4",), ("awq",)),)
    made_by = "auto-round 0.16 (benchmarks/quantised_tools.py), as AutoAWQ is not developed any more; a writer in tests"
    marks = ("qweight", "scales", "qzeros")
    keys: ClassVar[Keys] = {
        **COMMON,
        **OF_TOOLS,
        **keys(READ, "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "format", "backend"),
        **keys(READ, "checkpoint_format", "sym"),
        **keys(SEARCH, "method", "data_type", "desc_act"),
        "dynamic": RefusedKey("AWQ weights whose settings differ between modules are not supported"),
    }
    group_size: int
    """Inputs that share a scale; -1: each row has one scale."""
    has_zeros: bool
    """Whether each matrix must have zero points. Without them, and where the config says that there are none and one
    value stands for all, it is the middle of the codes' range."""

    @classmethod
    def of(cls, config: Config) -> Self:
        bits = number(config, ("bits", "w_bit"), METHOD)
        if bits != 4:
            raise ModelError(f"AWQ weights of {bits} bits are not supported; 4 bits are")
        named = [config.get(key) for key in ("version", "format", "checkpoint_format")]
        named += [LLM_AWQ] if config.get("backend") == LLM_AWQ else []
        for layout in (str(each).lower() for each in named if each):
            if layout not in LAYOUTS:
                raise ModelError(f"AWQ weights in the layout {layout} are not supported; those in the layout gemm are")
        has_zeros = bool(config.get("zero_point", not config.get("sym", False)))
        return cls(number(config, ("group_size", "q_group_size"), METHOD), has_zeros)

    def parts(self, module: str, held: Container[str]) -> Parts:
        found = {part: f"{module}.{part}" for part in self.marks}
        return {part: name for part, name in found.items() if part != "qzeros" or self.has_zeros or name in held}

    def dtypes(self, module: str) -> Dtypes:
        return {"qweight": WORDS, "qzeros": WORDS, "scales": FLOATS}

    def shape(self, module: str, shapes: Shapes) -> tuple[int, int]:
        k, words = shapes["qweight"]
        return words * 8, k

    def group(self, module: str, columns: int) -> int:
        return columns if self.group_size <= 0 else self.group_size

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> GroupedWeight:
        (n, k), scales = self.shape(module, {"qweight": tuple(tensors["qweight"].shape)}), tensors["scales"]
        size = self.group(module, k)
        expect(k % size == 0, module, f"groups of {size} do not divide {k} inputs")
        expect(
            tuple(scales.shape) == (k // size, n),
            module,
            f"scales are {list(scales.shape)}, and [{n}, {k}] in groups of {size} needs {[k // size, n]}",
        )
        zeros = None
        if (qzeros := tensors.get("qzeros")) is not None:
            expect(
                tuple(qzeros.shape) == (k // size, n // 8),
                module,
                f"zero points are {list(qzeros.shape)}; {[k // size, n // 8]} is expected",
            )
            found = codes_of_words(qzeros).T
            zeros = found.float() if self.has_zeros or bool((found != found[0, 0]).any()) else None
        return integers(codes_of_words(tensors["qweight"]).T, 4, zeros, scales.T.contiguous(), size)


def codes_of_words(words: Tensor, outputs: tuple[int, ...] = OUTPUTS) -> Tensor:
    """[rows, words] int32 -> [rows, words * 8] uint8. outputs: index of the output of each code of a word."""
    found = torch.empty(*words.shape, 8, dtype=torch.uint8)
    for index, output in enumerate(outputs):
        found[..., output] = (words >> 4 * index & 15).to(torch.uint8)
    return found.flatten(1)


FORMAT = Awq
