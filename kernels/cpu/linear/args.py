"""The C structures of linear layers, mirrored for ctypes, and the enum values that they contain."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

DTYPES: Mapping[torch.dtype, int] = MappingProxyType({torch.float32: 0, torch.bfloat16: 1, torch.float16: 2})
ACTIVATIONS: Mapping[str, int] = MappingProxyType(
    {
        **{"none": 0, "silu": 1, "gelu_tanh": 2, "gelu": 3, "relu": 4, "relu2": 5, "sigmoid": 7},
        **{"clamped_silu": 6, "silu_to_7": 8, "silu_to_16": 9, "normal_cdf": 10, "silu_below_10": 11, "softplus2": 12},
        "softplus": 13,
    }
)
"""Numbers of the activations; clamped_silu is of gated pairs alone."""
ROWS_FIXED, ROWS_TOKENS, ROWS_LOGITS, ROWS_SEQS = range(4)
"""`Rows` in op.h, an op's number of rows: its own constant, or the step's num_tokens, num_logits or num_seqs."""


@dataclass(frozen=True)
class WeightType:
    """A storage type of weights: its number in linear.h, and the weights and bytes of a block as GGUF stores it. For
    types with group scales the bytes are those of the codes only."""

    number: int
    block_size: int
    block_bytes: int

    @property
    def quantised(self) -> bool:
        return self.block_size > 1


WEIGHT_TYPES: Mapping[str, WeightType] = MappingProxyType(
    {
        "F32": WeightType(0, 1, 4),
        "BF16": WeightType(1, 1, 2),
        "F16": WeightType(2, 1, 2),
        "Q4_0": WeightType(3, 32, 18),
        "Q4_1": WeightType(4, 32, 20),
        "Q5_0": WeightType(5, 32, 22),
        "Q5_1": WeightType(6, 32, 24),
        "Q8_0": WeightType(7, 32, 34),
        "Q4_K": WeightType(8, 256, 144),
        "Q5_K": WeightType(9, 256, 176),
        "Q6_K": WeightType(10, 256, 210),
    }
)
GROUPED_TYPES: Mapping[str, WeightType] = MappingProxyType(
    {
        "int4": WeightType(11, 32, 16),
        "int8": WeightType(12, 32, 32),
        "float4": WeightType(13, 32, 16),
        "e4m3": WeightType(14, 32, 32),
    }
)
"""The kinds of `kernels.grouped.GroupedWeight`."""
NO_ZEROS = -1
ROUNDS_TOKEN, ROUNDS_SHIFTED_TOKEN, ROUNDS_STATIC, ROUNDS_GROUPS = 1, 2, 3, 4
"""`InputRounding` in linear.h."""
FLOAT_TYPES: Mapping[torch.dtype, str] = MappingProxyType(
    {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
)


class PackedWeightC(ctypes.Structure):
    """Mirror of `PackedWeight` in linear.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("fan", ctypes.c_int32),
        ("tiles", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("group", ctypes.c_int64),
        ("scale_type", ctypes.c_int32),
        ("zero_type", ctypes.c_int32),
        ("rounding", ctypes.c_int32),
        ("input_scale", ctypes.c_float),
        ("input_zero", ctypes.c_float),
    )


class GroupSourceC(ctypes.Structure):
    """Mirror of `GroupSource` in linear.h."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
    )


class LinearArgs(ctypes.Structure):
    """Mirror of `LinearArgs` in linear.h: the arguments of `hr_op_linear`."""

    _fields_ = (
        ("weight", PackedWeightC),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("x_thread_stride", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("residual_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("x_dtype", ctypes.c_int32),
        ("residual_dtype", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("fixed_rows", ctypes.c_int64),
        ("highest", ctypes.c_void_p),
        ("highest_rows", ctypes.c_int64),
        ("add_to", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("site", ctypes.c_void_p),
        ("deltas", ctypes.c_void_p),
    )


class PackArgs(ctypes.Structure):
    """Mirror of `PackArgs` in linear.cpp: the arguments of `hr_op_pack`."""

    _fields_ = (
        ("weight", PackedWeightC),
        ("source", ctypes.c_void_p),
        ("source_stride", ctypes.c_int64),
        ("packed", ctypes.c_void_p),
        ("source_dtype", ctypes.c_int32),
        ("groups", GroupSourceC),
    )


class EmbedArgs(ctypes.Structure):
    """Mirror of `EmbedArgs` in linear.cpp: the arguments of `hr_op_embed`, which needs 4 k bytes of thread scratch."""

    _fields_ = (
        ("weight", PackedWeightC),
        ("ids", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("out_dtype", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("fixed_rows", ctypes.c_int64),
        ("first_id", ctypes.c_int64),
        ("known_ids", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class ScratchNeed(ctypes.Structure):
    """Mirror of `ScratchNeed` in linear.h."""

    _fields_ = (("shared_bytes", ctypes.c_int64), ("per_thread_bytes", ctypes.c_int64))


class DeltaPanelC(ctypes.Structure):
    """Mirror of `DeltaPanel` in deltas.h."""

    _fields_ = (("data", ctypes.c_uint64), ("begin", ctypes.c_int32), ("count", ctypes.c_int32))


class DeltaC(ctypes.Structure):
    """Mirror of `Delta` in deltas.h."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("magnitude", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("replaces", ctypes.c_int32),
    )


class FactorRowsC(ctypes.Structure):
    """Mirror of `FactorRows` in deltas.h."""

    _fields_ = (
        ("from_", ctypes.c_void_p),
        ("to", ctypes.c_void_p),
        ("order", ctypes.c_void_p),
        ("num_rows", ctypes.c_int64),
        ("num_places", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("from_type", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("panel_rows", ctypes.c_int32),
    )


class DeltaSiteC(ctypes.Structure):
    """Mirror of `DeltaSite` in deltas.h."""

    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("tiles", ctypes.c_void_p),
        ("type", ctypes.c_int32),
    )


class RowAdaptersC(ctypes.Structure):
    """Mirror of `RowAdapters` in deltas.h."""

    _fields_ = (
        ("starts", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("slot_of", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("pair_of", ctypes.c_void_p),
        ("num_slots", ctypes.c_int64),
        ("most_used", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
    )


class EmbedDeltaC(ctypes.Structure):
    """Mirror of `EmbedDelta` in deltas.h."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
    )


class EmbedDeltasArgs(ctypes.Structure):
    """Mirror of `EmbedDeltasArgs` in deltas.h."""

    _fields_ = (
        ("slots", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("out_dtype", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )
