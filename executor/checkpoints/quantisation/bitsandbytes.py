"""bitsandbytes: LLM.int8 (Dettmers et al. 2022), NF4 and FP4 (QLoRA, Dettmers et al. 2023), doubly quantised or not.

int8     weight int8 [n, k], SCB float32 [n]: w = code * SCB / 127
4 bits   weight uint8 [n * k / 2, 1], of two neighbours the first in the high half; weight.absmax of each block of the
         flattened matrix; weight.quant_map, the values of the 16 codes; weight.quant_state.*, JSON as bytes
double   weight.absmax is uint8: nested_quant_map[code] * nested_absmax of its block + nested_offset

Float weights become NF4 as they are read where that is asked for, as with vLLM, but for the scales, which stay
floats.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from headrace.executor.checkpoints.quantisation import AsLoaded, Config, Format, Parts, Shapes, Stored, expect
from headrace.executor.checkpoints.quantisation._scaled import integers_in_bytes
from headrace.executor.models.blocks import Role
from headrace.kernels.grouped import GroupedWeight

STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
NESTED = ("nested_absmax", "nested_quant_map")
BLOCK = 64
"""Where the tensors do not say: what the tool takes by default."""
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution (Dettmers et al. 2023, appendix E)."""


@dataclass(frozen=True)
class BitsAndBytes(Format):
    names = ("bitsandbytes",)
    stored = (
        Stored(
            "LLM.int8: 8 bits in rows; outliers need no path of their own, as activations have 16 bits",
            ("int8",),
            ("bitsandbytes int8",),
        ),
        Stored(
            "NF4 and FP4, doubly quantised or not, where rows are whole blocks",
            ("float4",),
            ("bitsandbytes nf4", "bitsandbytes nf4 double", "bitsandbytes fp4"),
        ),
    )
    made_by = "bitsandbytes 0.50 (benchmarks/quantised_tools.py), a writer in tests"

    @classmethod
    def of(cls, config: Config) -> Self:
        return cls()

    def parts(self, module: str, role: Role, held: Container[str]) -> Parts | None:
        weight = f"{module}.weight"
        if f"{module}.SCB" in held:
            return {"weight": weight, "SCB": f"{module}.SCB"}
        state = next((f"{weight}.{name}" for name in STATES if f"{weight}.{name}" in held), None)
        if state is None:
            return None
        found = {"weight": weight, "state": state}
        found |= {name: f"{weight}.{name}" for name in ("absmax", "quant_map")}
        return found | {name: f"{weight}.{name}" for name in NESTED if f"{weight}.{name}" in held}

    def beside(self, module: str) -> tuple[str, ...]:
        return ("weight_format",)

    def shape(self, module: str, shapes: Shapes) -> tuple[int, int] | None:
        if "SCB" not in shapes:
            return None
        n, k = shapes["weight"]
        return n, k

    def group(self, module: str, columns: int) -> int:
        return BLOCK if columns % BLOCK == 0 else columns

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> GroupedWeight:
        if "SCB" in tensors:
            return integers_in_bytes(module, tensors["weight"], tensors["SCB"].float()[:, None] / 127, None)
        state = _state(module, tensors["state"])
        (n, k), size = state["shape"], int(state["blocksize"])
        flat = tensors["weight"].flatten()
        expect(len(flat) * 2 == n * k, module, f"{len(flat)} bytes cannot be [{n}, {k}] codes of 4 bits")
        scales = tensors["absmax"]
        if "nested_absmax" in tensors:
            nested = tensors["nested_absmax"].repeat_interleave(int(state["nested_blocksize"]))[: len(scales)]
            scales = tensors["nested_quant_map"][scales.int()] * nested + float(state["nested_offset"])
        expect(k % size == 0 or size % k == 0, module, f"blocks of {size} do not divide rows of {k} weights")
        if size > k:  # a block is several rows
            scales, size = scales.repeat_interleave(size // k)[:n], k
        swapped = (flat >> 4 | (flat & 15) << 4).view(n, -1)
        table = tuple(tensors["quant_map"].float().tolist())
        expect(len(table) == 16, module, f"{len(table)} values for codes of 4 bits")
        return GroupedWeight("float4", swapped, scales.float().view(n, k // size), size, table=table)


def _state(module: str, raw: Tensor) -> dict[str, Any]:
    try:
        state = json.loads(bytes(raw.to(torch.uint8).tolist()))
        ok = len(state["shape"]) == 2 and state["blocksize"] > 0
    except (ValueError, KeyError, TypeError):
        ok = False
    expect(ok, module, "the quant_state is no JSON with a shape and a blocksize")
    return dict(state)


def nf4(weight: Tensor) -> GroupedWeight:
    """weight [n, k] float32, rows of whole blocks: of each block the codes nearest to its values over the largest."""
    n, k = weight.shape
    blocks = weight.reshape(n, k // BLOCK, BLOCK)
    scales = blocks.abs().amax(-1)
    table = torch.tensor(NF4, device=weight.device)
    borders = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(blocks / torch.where(scales > 0, scales, 1.0)[..., None], borders).to(torch.uint8)
    pairs = codes.view(n, k // 2, 2)
    return GroupedWeight("float4", pairs[..., 0] | pairs[..., 1] << 4, scales, BLOCK, table=NF4)


FORMAT = BitsAndBytes
AS_LOADED = AsLoaded(
    name="bitsandbytes",
    roles=("matrix", "expert"),
    group=BLOCK,
    bits=4 + 32 / BLOCK,
    quantise=nf4,
    stored=Stored(
        "NF4 in blocks of 64, experts too; embedding, head and routers stay as they are",
        ("float4",),
        ("test_matrices_become_nf4_as_they_are_loaded",),
    ),
)
