"""The README of `executor/models/` shows a declaration, and the forward pass that is computed from it: both are run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_driver import DictSource, Driver
from torch import Tensor

from headrace.executor.cpu.decoder import CpuDecoder
from headrace.executor.cpu.program import StepLimits
from headrace.executor.models.arch import ArchSpec, LayerSpec, NormSpec, RopeSpec
from headrace.executor.models.blocks.attention import Attention
from headrace.executor.models.blocks.dense import Dense
from headrace.executor.models.decoder import Decoder
from headrace.executor.models.sizes import weight_shapes

README = Path(__file__).parents[2] / "executor/models/README.md"
GIVEN = {
    each.__name__: each for each in (ArchSpec, LayerSpec, NormSpec, RopeSpec, Attention, Dense, Tensor)
} | {"torch": torch, "F": F}  # fmt: skip
PROMPT = [5, 77, 300, 5, 6, 41, 9, 12, 200]


@pytest.mark.parametrize("kind", [Decoder, CpuDecoder])
def test_the_forward_pass_of_the_readme_is_what_a_decoder_computes(kind: Any) -> None:
    declaration, forward = README.read_text(encoding="utf-8").split("```python\n")[1:]
    names: dict[str, Any] = dict(GIVEN)
    for block in (declaration, forward):
        exec(block.split("```")[0], names)
    generator = torch.Generator().manual_seed(0)
    shapes = weight_shapes(names["spec"])
    weights = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    limits = (StepLimits(16, 2, 64),) if kind is CpuDecoder else ()
    decoder = kind(names["spec"], DictSource(weights), torch.float32, *limits)
    _, (logits,) = Driver(decoder).greedy([PROMPT], 1, chunk=4)
    wanted = names["logits"](weights, torch.tensor(PROMPT))[-1:]
    assert wanted.std() > 0.1
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4)
