"""MXFP4 as gpt-oss stores it: the experts of a layer in two stacks of 4-bit floats in groups of 32.

gate_up_proj_blocks  uint8 [experts, 2 * inner, hidden / 32, 16]; rows of gate and up projection alternate
down_proj_blocks     uint8 [experts, hidden, inner / 32, 16]; two codes per byte, the first in the low half
*_scales             uint8 [experts, rows, columns / 32]; the scale is 2 ** (value - 127)
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from headrace.executor.checkpoints.formats import (
    BYTES,
    EXPONENTS,
    Config,
    Dtypes,
    Format,
    Parts,
    Shapes,
    Stored,
    expect,
)
from headrace.executor.checkpoints.formats._keys import COMMON, Keys
from headrace.executor.checkpoints.formats._scaled import floats_of_4_bits, powers_of_two
from headrace.kernels.grouped import GroupedWeight

EXPERT = re.compile(r"(?P<stack>.*\.experts)\.(?P<index>\d+)\.(?P<part>gate|up|down)_proj")
GROUP = 32


@dataclass(frozen=True)
class Mxfp4(Format):
    names = ("mxfp4", "gpt_oss_mxfp4")
    stored = (
        Stored(
            "4-bit floats in groups of 32, gpt-oss's stacks of experts",
            ("float4",),
            ("test_gpt_oss_is_read_from_its_stacks_of_4_bit_floats_which_the_program_keeps",),
        ),
    )
    made_by = "a writer in tests, compared with transformers' own reading of it"
    marks = ()  # tensors are those of a stack, not of a module
    keys: ClassVar[Keys] = COMMON

    @classmethod
    def of(cls, config: Config) -> Self:
        return cls()

    def marked(self, module: str, held: Container[str]) -> bool:
        return EXPERT.fullmatch(module) is not None and any(name in held for name in self.parts(module, held).values())

    def parts(self, module: str, held: Container[str]) -> Parts:
        match = EXPERT.fullmatch(module)
        assert match is not None, "only such modules are quantised"
        stack = f"{match['stack']}.{'down_proj' if match['part'] == 'down' else 'gate_up_proj'}"
        return {"blocks": f"{stack}_blocks", "scales": f"{stack}_scales"}

    def dtypes(self, module: str) -> Dtypes:
        return {"blocks": BYTES, "scales": EXPONENTS}

    def entry(self, module: str) -> int | None:
        match = EXPERT.fullmatch(module)
        return None if match is None else int(match["index"])

    def shape(self, module: str, shapes: Shapes) -> tuple[int, int]:
        _, rows, groups, _ = shapes["blocks"]
        return rows if module.endswith("down_proj") else rows // 2, groups * GROUP

    def group(self, module: str, columns: int) -> int:
        return GROUP

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> GroupedWeight:
        blocks, scales = tensors["blocks"], tensors["scales"]
        expect(
            blocks.dim() == 3 and blocks.shape[2] == GROUP // 2 and scales.shape == blocks.shape[:2],
            module,
            f"an expert's blocks are {list(blocks.shape)} and its scales {list(scales.shape)}; [rows, groups, 16] and "
            "[rows, groups] are expected",
        )
        if not module.endswith("down_proj"):
            own = slice(0 if module.endswith("gate_proj") else 1, None, 2)
            blocks, scales = blocks[own], scales[own]
        return floats_of_4_bits(module, blocks.flatten(1).contiguous(), powers_of_two(scales.contiguous()), GROUP)


FORMAT = Mxfp4
