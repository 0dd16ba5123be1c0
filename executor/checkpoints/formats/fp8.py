"""fp8 as Hugging Face, DeepSeek and FBGEMM store it: `weight` in float8_e4m3fn, with its scales.

`weight_scale` is one for the matrix or for each row; `weight_scale_inv`, with `weight_block_size`, for blocks
(DeepSeek-V3, section 3.3), which begin anew in each of a fused matrix's chunks (MiMo V2.5). Codes are multiplied by
either, but divided by it if `weight_scale_semantics` is inverse (GPTQModel). Scales that are powers of two may be
stored as their exponents (e8m0). Scales of activations are ignored, since activations stay floats.

With `expert_dtype` fp4 (DeepSeek V4) the experts are 4-bit floats: `weight` [rows, columns / 2] int8 has two codes in a
byte, the first in the low half, and the scales are those of 32 neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from headrace.executor.checkpoints.formats import (
    BYTES,
    EXPONENTS,
    FLOATS,
    FLOATS_OF_8_BITS,
    Config,
    Dtypes,
    Format,
    Parts,
    Shapes,
    Stored,
)
from headrace.executor.checkpoints.formats._keys import (
    BY_TENSORS,
    COMMON,
    OF_CACHE,
    OF_INPUTS,
    OF_TOOLS,
    READ,
    SEARCH,
    Keys,
    RefusedKey,
    keys,
)
from headrace.executor.checkpoints.formats._scaled import floats_of_4_bits, floats_of_8_bits, powers_of_two
from headrace.ipc.failure import ModelError
from headrace.kernels.grouped import GroupedWeight

SCALES = ("weight_scale_inv", "weight_scale")
CHUNKS = "num_key_value_heads"
"""As many chunks of [queries, keys, values] may make up a fused qkv_proj."""
EXPERT = re.compile(r"\.experts\.\d+\.")
FP4_GROUP = 32


@dataclass(frozen=True)
class Fp8(Format):
    names = ("fp8", "fbgemm_fp8")
    stored = (
        Stored(
            "float8_e4m3fn, a scale for the matrix, each row (FBGEMM), or blocks of 128 x 128 (DeepSeek), as a number "
            "or as an exponent of two; activations stay in floats",
            ("e4m3",),
            ("fp8 matrix", "fp8 rows", "fp8 blocks", "fp8 exponents", "fp8 exponents as bytes", "fp8 divisors"),
        ),
        Stored(
            "float8_e4m3fn, a fused qkv_proj in chunks of [Q, K, V] with blocks of their own (MiMo V2.5)",
            ("e4m3",),
            ("test_fused_matrices_of_mimo_v2_5_are_read_by_chunk",),
        ),
        Stored(
            "float8_e4m3fn, stacks of experts with stacks of scales (Step 3)",
            ("e4m3",),
            ("test_stacks_of_experts_in_fp8_have_stacks_of_scales",),
        ),
        Stored(
            "float8_e4m3fn in blocks, and experts in 4-bit floats in groups of 32 (DeepSeek V4)",
            ("e4m3", "float4"),
            ("test_experts_of_deepseek_v4_are_read_from_4_bit_floats",),
            made_by="a writer in tests, compared with transformers' own reading of it",
        ),
    )
    outside = ("expert_dtype", CHUNKS)
    made_by = "GPTQModel 7.6 (benchmarks/quantised_tools.py), a writer in tests"
    marks = SCALES
    keys: ClassVar[Keys] = {
        **COMMON,
        **OF_TOOLS,
        **keys(
            *(READ, "weight_block_size", "weight_scale_semantics", "fmt", "format", "checkpoint_format"),
            *("expert_dtype", CHUNKS),
        ),
        **keys(BY_TENSORS, "scale_fmt", "store_dtype", "weight_scale_method", "bits", "group_size", "sym"),
        **keys(OF_INPUTS, "activation_scale_ub"),
        **keys(OF_CACHE, "kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant_method"),
        **keys(SEARCH, "method", "data_type", "desc_act", "quant_type"),
        "dynamic": RefusedKey("fp8 weights whose settings differ between modules are not supported"),
    }
    block: tuple[int, int] | None
    """Rows and columns of a block that shares a scale; None: the matrix or each row has one."""
    divides: bool = False
    """Whether codes are divided by the stored scales."""
    fp4_experts: bool = False
    """Whether experts are 4-bit floats."""
    chunks: int = 1
    """Chunks of a fused qkv_proj, each of which may have blocks of its own."""

    @classmethod
    def of(cls, config: Config) -> Self:
        block, semantics = config.get("weight_block_size"), config.get("weight_scale_semantics")
        for key in ("fmt", "format", "checkpoint_format"):
            if config.get(key) and "e4m3" not in str(config[key]).lower() and str(config[key]).lower() != "fp8":
                raise ModelError(f"the fp8 config's {key} is {config[key]!r}; e4m3 is known")
        if (experts := config.get("expert_dtype")) not in (None, "fp4", "fp8"):
            raise ModelError(f"the fp8 config's expert_dtype is {experts!r}; fp4 and fp8 are known")
        if semantics not in (None, "inverse"):
            raise ModelError(f"the fp8 config's weight_scale_semantics is {semantics!r}; inverse is known")
        divides, fp4_experts = semantics is not None, experts == "fp4"
        if block is None:
            return cls(None, divides, fp4_experts)
        heads = config.get(CHUNKS)
        chunks = heads if isinstance(heads, int) and heads > 0 else 1
        numbers = block if isinstance(block, list | tuple) else ()
        if len(numbers) != 2 or not all(isinstance(each, int) and each > 0 for each in numbers):
            raise ModelError(f"the fp8 config's weight_block_size is {block!r}; two whole numbers are expected")
        return cls((numbers[0], numbers[1]), divides, fp4_experts, chunks)

    def _is_fp4(self, module: str) -> bool:
        return self.fp4_experts and EXPERT.search(module) is not None

    def scheme(self, module: str) -> str:
        if self._is_fp4(module):
            return "fp4 in groups of 32"
        return "fp8" if self.block is None else f"fp8 in blocks of {self.block[0]} x {self.block[1]}"

    def parts(self, module: str, held: Container[str]) -> Parts:
        usual = "weight_scale" if self.block is None else "weight_scale_inv"
        scales = next((name for name in SCALES if f"{module}.{name}" in held), usual)
        return {"weight": f"{module}.weight", "scales": f"{module}.{scales}"}

    def dtypes(self, module: str) -> Dtypes:
        if self._is_fp4(module):
            return {"weight": (torch.int8, *BYTES), "scales": EXPONENTS}
        return {"weight": FLOATS_OF_8_BITS, "scales": (*FLOATS, *EXPONENTS)}

    def beside(self, module: str) -> tuple[str, ...]:
        return ("input_scale", "activation_scale", "input_scale_ub")

    def shape(self, module: str, shapes: Shapes) -> tuple[int, int]:
        n, k = shapes["weight"]
        return n, 2 * k if self._is_fp4(module) else k

    def group(self, module: str, columns: int) -> int:
        if self._is_fp4(module):
            return FP4_GROUP
        return columns if self.block is None else self.block[1]

    def read(self, module: str, tensors: Mapping[str, Tensor]) -> GroupedWeight:
        scales = tensors["scales"]
        if self._is_fp4(module):
            return floats_of_4_bits(module, tensors["weight"].view(torch.uint8), powers_of_two(scales), FP4_GROUP)
        own = 1 / scales.float() if self.divides else scales
        chunks = self._chunks(module, len(tensors["weight"]), scales)
        return floats_of_8_bits(module, tensors["weight"], own, block=self.block, chunks=chunks)

    def _chunks(self, module: str, num_rows: int, scales: Tensor) -> int:
        """Chunks of a matrix that have blocks of their own, as its number of scales shows; 1: its blocks are one
        grid."""
        if self.block is None or scales.dim() != 2 or num_rows % self.chunks or not module.endswith("qkv_proj"):
            return 1
        of_chunks = self.chunks * -(-num_rows // self.chunks // self.block[0])
        return self.chunks if scales.shape[0] == of_chunks else 1


FORMAT = Fp8
