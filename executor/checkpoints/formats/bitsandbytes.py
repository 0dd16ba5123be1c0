"""bitsandbytes: LLM.int8 (Dettmers et al. 2022), NF4 and FP4 (QLoRA, Dettmers et al. 2023), doubly quantised or not.

int8     weight int8 [n, k], SCB float32 [n]: w = code * SCB / 127; weight_format, 0 for rows: older versions saved what
         a GPU had put into an order of its own
4 bits   weight uint8 [n * k / 2, 1], two codes per byte, the first in the high half, or the same bytes viewed as floats
         (`bnb_4bit_quant_storage`); weight.absmax of each block of the flattened matrix; weight.quant_map, the values
         of the 16 codes; weight.quant_state.*, JSON as bytes
double   weight.absmax is uint8: absmax = nested_quant_map[code] * nested_absmax of its block + nested_offset

With --quantization bitsandbytes float weights become NF4 while they load, as in vLLM, except that scales stay floats.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from headrace.executor.checkpoints.formats import (
    BYTES,
    FLOATS,
    WHOLE,
    AsLoaded,
    Config,
    Dtypes,
    Format,
    Parts,
    Shapes,
    Stored,
    expect,
    lacking,
)
from headrace.executor.checkpoints.formats._keys import BY_TENSORS, COMMON, OF_INPUTS, OTHERS, READ, Keys, keys
from headrace.executor.checkpoints.formats._scaled import integers_in_bytes
from headrace.ipc.failure import ModelError
from headrace.ipc.ranges import FLOAT32
from headrace.kernels.grouped import GroupedWeight

STATES = {kind: f"weight.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")}
NESTED = {name: f"weight.{name}" for name in ("nested_absmax", "nested_quant_map")}
OF_4_BITS = {name: f"weight.{name}" for name in ("absmax", "quant_map")}
OF_NESTED = ("nested_blocksize", "nested_offset")
"""Fields that the quant_state of doubly quantised weights has."""
BLOCK = 64
"""Block size of weights that are quantised while they load, and the tool's default."""
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
            "NF4 and FP4, doubly quantised or not, where rows are whole blocks; bytes stored as such or as floats",
            ("float4",),
            ("bitsandbytes nf4", "bitsandbytes nf4 double", "bitsandbytes nf4 as bfloat16", "bitsandbytes fp4"),
        ),
    )
    made_by = "bitsandbytes 0.50 (benchmarks/quantised_tools.py), a writer in tests"
    marks = ("SCB", *STATES.values(), *OF_4_BITS.values(), *NESTED.values())
    keys: ClassVar[Keys] = {
        **COMMON,
        **keys(READ, "bnb_4bit_quant_type"),
        **keys(
            BY_TENSORS,
            *(
                "load_in_8bit",
                "load_in_4bit",
                "_load_in_4bit",
                "_load_in_8bit",
                "bnb_4bit_use_double_quant",
                "bnb_4bit_quant_storage",
            ),
            *("bnb_4bit_blocksize", "bits", "group_size", "block_size", "compress_statistics", "format"),
            *("checkpoint_format", "sym", "desc_act", "method", "pack_dtype"),
        ),
        **keys(OF_INPUTS, "bnb_4bit_compute_dtype", "llm_int8_threshold", "llm_int8_has_fp16_weight"),
        **keys(BY_TENSORS, "llm_int8_skip_modules"),
        **keys(OTHERS, "llm_int8_enable_fp32_cpu_offload"),
    }
    kind: str
    """int8, nf4 or fp4, by the config; a module's tensors take precedence."""

    @classmethod
    def of(cls, config: Config) -> Self:
        kind = str(config.get("bnb_4bit_quant_type", "fp4"))
        if config.get("load_in_8bit"):
            return cls("int8")
        if kind not in STATES:
            raise ModelError(f"the bitsandbytes config's bnb_4bit_quant_type is {kind!r}; nf4 and fp4 are known")
        return cls(kind)

    def parts(self, module: str, held: Container[str]) -> Parts:
        has_4_bits = any(f"{module}.{name}" in held for name in self.marks[1:])
        if f"{module}.SCB" in held or (self.kind == "int8" and not has_4_bits):
            found = {"weight": f"{module}.weight", "SCB": f"{module}.SCB", "order": f"{module}.weight_format"}
            return {part: name for part, name in found.items() if part != "order" or name in held}
        states = [name for name in STATES.values() if f"{module}.{name}" in held]
        found = {"weight": "weight", "state": states[0] if states else STATES.get(self.kind, STATES["nf4"])} | OF_4_BITS
        if any(f"{module}.{name}" in held for name in NESTED.values()):
            found |= NESTED
        return {part: f"{module}.{name}" for part, name in found.items()}

    def dtypes(self, module: str) -> Dtypes:
        floats = dict.fromkeys(("SCB", "quant_map", *NESTED), FLOATS)
        return (
            floats
            | {"weight": (torch.int8, torch.uint8, *FLOATS), "state": BYTES, "absmax": (*FLOATS, torch.uint8)}
            | {"order": (*WHOLE, torch.uint8)}
        )

    def shape(self, module: str, shapes: Shapes) -> tuple[int, int] | None:
        if "SCB" not in shapes:
            return None
        n, k = shapes["weight"]
        return n, k

    def group(self, module: str, columns: int) -> int:
        return BLOCK if columns % BLOCK == 0 else columns

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> GroupedWeight:
        weight, of_rows = tensors["weight"], "SCB" in tensors
        wanted = (torch.int8,) if of_rows else (torch.uint8, *FLOATS)
        expect(
            weight.dtype in wanted,
            module,
            f"{module}.weight is stored as {weight.dtype}; {' or '.join(map(str, wanted))} is expected",
        )
        if of_rows:
            order = tensors.get("order")
            is_by_rows = order is None or not bool(order.any())
            expect(is_by_rows, module, "its weight_format is one GPU's own order of the weights; rows (0) are expected")
            return integers_in_bytes(module, weight, tensors["SCB"].float() / 127, None)
        state = _state(module, tensors["state"])
        (n, k), size = state["shape"], state["blocksize"]
        flat = weight.flatten().view(torch.uint8)
        expect(len(flat) * 2 == n * k, module, f"{len(flat)} bytes cannot be [{n}, {k}] codes of 4 bits")
        expect(k % size == 0 or size % k == 0, module, f"blocks of {size} do not divide rows of {k} weights")
        scales = self._scales(module, state, tensors)
        if size > k:  # a block spans several rows
            scales, size = scales.repeat_interleave(min(size // k, n))[:n], k
        swapped = (flat >> 4 | (flat & 15) << 4).view(n, -1)
        table = tuple(tensors["quant_map"].float().tolist())
        expect(len(table) == 16, module, f"{len(table)} values for codes of 4 bits")
        expect(all(map(math.isfinite, table)), module, "the values of its quant_map are not all finite numbers")
        return GroupedWeight("float4", swapped, scales.view(n, k // size), size, table=table)

    def _scales(self, module: str, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
        """The scale of each block, [blocks] float32; undoes double quantisation."""
        absmax, (n, k) = tensors["absmax"], state["shape"]
        _expect_count(module, "absmax", absmax, -(-n * k // state["blocksize"]))
        is_nested = absmax.dtype == torch.uint8
        if any(key in state for key in OF_NESTED) or is_nested or "nested_absmax" in tensors:
            if missing := [f"{module}.{name}" for part, name in NESTED.items() if part not in tensors]:
                raise lacking(self, module, missing)
            expect(is_nested, module, f"{module}.weight.absmax is stored as {absmax.dtype}; torch.uint8 is expected")
            size: Any = state.get("nested_blocksize")
            offset: Any = state.get("nested_offset")
            expect(isinstance(size, int) and size > 0, module, f"the quant_state's nested_blocksize is {size!r}")
            ok = isinstance(offset, float | int) and abs(offset) <= FLOAT32
            expect(ok, module, f"the quant_state's nested_offset is {offset!r:.80}")
            largest, levels = (tensors[part].float().flatten() for part in NESTED)
            _expect_count(module, "nested_absmax", largest, -(-len(absmax) // size))
            _expect_count(module, "nested_quant_map", levels, 256)
            nested = largest.repeat_interleave(min(size, len(absmax)))[: len(absmax)]
            return levels[absmax.int()] * nested + float(offset)
        return absmax.float()


def _expect_count(module: str, part: str, tensor: Tensor, count: int) -> None:
    stored = f"{module}.weight.{part} is {list(tensor.shape)}; {[count]} is expected"
    expect(tuple(tensor.shape) == (count,), module, stored)


def _state(module: str, raw: Tensor) -> dict[str, Any]:
    try:
        state = json.loads(bytes(raw.tolist()))
        numbers = [*state["shape"], state["blocksize"]]
        ok = len(numbers) == 3 and all(isinstance(each, int) and each > 0 for each in numbers)
    except (ValueError, KeyError, TypeError, RecursionError):
        ok = False
    expect(ok, module, "the quant_state is no JSON with a shape [rows, columns] and a blocksize")
    return dict(state)


def nf4(weight: Tensor) -> GroupedWeight:
    """Quantises weight [n, k] float32, whose rows are whole blocks: a block's scale is its largest magnitude, and codes
    are those nearest to value / scale."""
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
