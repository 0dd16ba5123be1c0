"""AWQ (Lin et al. 2023) in AutoAWQ's GEMM layout: 4-bit codes in int32 words along the output axis.

    qweight [k, n / 8] int32, qzeros [k / group, n / 8] int32, scales [k / group, n]

The eight codes of a word belong to the outputs 0, 2, 4, 6, 1, 3, 5, 7, lowest bits first.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from headrace.executor.checkpoints.quantisation import (
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
from headrace.executor.checkpoints.quantisation.gptq import integers
from headrace.ipc.failure import ModelError
from headrace.kernels.grouped import GroupedWeight

METHOD = "AWQ"
OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Awq(Format):
    names = ("awq", "awq_marlin", "moe_wna16")
    stored = (Stored("4 bits in the GEMM layout, in groups or rows, zero points or none", ("int4",), ("awq",)),)
    made_by = "auto-round 0.16 (benchmarks/quantised_tools.py), as AutoAWQ is not developed any more; a writer in tests"
    marks = ("qweight", "scales", "qzeros")
    group_size: int
    """Inputs that share a scale; -1: each row has one scale."""
    zero_point: bool

    @classmethod
    def of(cls, config: Config) -> Self:
        bits = number(config, ("bits", "w_bit"), METHOD)
        if bits != 4:
            raise ModelError(f"AWQ weights of {bits} bits are not supported; 4 bits are")
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm":
            raise ModelError(f"AWQ weights in the layout {version} are not supported; those in the layout gemm are")
        return cls(number(config, ("group_size", "q_group_size"), METHOD), bool(config.get("zero_point", True)))

    def parts(self, module: str, held: Container[str]) -> Parts:
        return {part: f"{module}.{part}" for part in (self.marks if self.zero_point else self.marks[:2])}

    def dtypes(self, module: str) -> Dtypes:
        return {"qweight": WORDS, "qzeros": WORDS, "scales": FLOATS}

    def beside(self, module: str) -> tuple[str, ...]:
        return () if self.zero_point else ("qzeros",)

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
        if self.zero_point:
            qzeros = tensors["qzeros"]
            expect(
                tuple(qzeros.shape) == (k // size, n // 8),
                module,
                f"zero points are {list(qzeros.shape)}; {[k // size, n // 8]} is expected",
            )
            zeros = codes_of_words(qzeros).T.float()
        return integers(codes_of_words(tensors["qweight"]).T, 4, zeros, scales.T.contiguous(), size)


def codes_of_words(words: Tensor, outputs: tuple[int, ...] = OUTPUTS) -> Tensor:
    """[rows, words] int32 -> [rows, words * 8] uint8. outputs: index of the output of each code of a word."""
    found = torch.empty(*words.shape, 8, dtype=torch.uint8)
    for index, output in enumerate(outputs):
        found[..., output] = (words >> 4 * index & 15).to(torch.uint8)
    return found.flatten(1)


FORMAT = Awq
