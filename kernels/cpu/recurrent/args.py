"""The C structures of layers that keep a state, mirrored for ctypes."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from headrace.kernels.cpu.linear.args import DTYPES
from headrace.kernels.cpu.runtime.pointers import pointer
from headrace.kernels.reference.states import KeptUnits


class StateStepC(ctypes.Structure):
    """Mirror of `StateStep` in states.h."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("sources", ctypes.c_void_p),
        ("has_source", ctypes.c_void_p),
        ("replayed", ctypes.c_void_p),
        ("committed", ctypes.c_void_p),
        ("snapshot_sequences", ctypes.c_void_p),
        ("snapshot_ends", ctypes.c_void_p),
        ("snapshot_pages", ctypes.c_void_p),
        ("num_snapshots", ctypes.c_int64),
        ("pages_per_state", ctypes.c_int64),
    )


class StateUnitsC(ctypes.Structure):
    """Mirror of `StateUnits` in states.h."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("page_elements", ctypes.c_int64),
        ("page", ctypes.c_void_p),
        ("offset", ctypes.c_void_p),
        ("type", ctypes.c_int32),
    )

    @classmethod
    def of(cls, units: KeptUnits) -> StateUnitsC:
        if units.memory.dtype not in DTYPES or not units.memory.is_contiguous():
            raise ValueError(f"pages of states are contiguous, in one of {list(DTYPES)}, not {units.memory.dtype}.")
        if units.page.dtype != torch.int64 or units.offset.dtype != torch.int64:
            raise ValueError("the places of a state are int64.")
        type_ = DTYPES[units.memory.dtype]
        return cls(pointer(units.memory), units.memory.shape[1], pointer(units.page), pointer(units.offset), type_)


class DraftedC(ctypes.Structure):
    """Mirror of `Drafted` in states.h."""

    _fields_ = (("values", ctypes.c_void_p), ("row_stride", ctypes.c_int64), ("draft_stride", ctypes.c_int64))

    @classmethod
    def of(cls, drafted: Tensor, first: int = 0) -> DraftedC:
        """first: the element of a draft's input at which an op's begin."""
        return cls(pointer(drafted) + first * drafted.itemsize, drafted.stride(0), drafted.stride(1))


class ConvolveArgs(ctypes.Structure):
    """Mirror of `ConvolveArgs` in states.h: the arguments of `hr_op_convolve`."""

    _fields_ = (
        ("states", ctypes.c_void_p),
        ("history", StateUnitsC),
        ("drafted", DraftedC),
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("width", ctypes.c_int32),
        ("gated", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("x_type", ctypes.c_int32),
        ("out_type", ctypes.c_int32),
    )


class ScanArgs(ctypes.Structure):
    """Mirror of `ScanArgs` in states.h: the arguments of `hr_op_scan`."""

    _fields_ = (
        ("states", ctypes.c_void_p),
        ("state", StateUnitsC),
        ("drafted", DraftedC),
        ("mixed", ctypes.c_void_p),
        ("steps", ctypes.c_void_p),
        ("gate", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("decay", ctypes.c_void_p),
        ("skip", ctypes.c_void_p),
        ("step_bias", ctypes.c_void_p),
        ("mixed_stride", ctypes.c_int64),
        ("steps_stride", ctypes.c_int64),
        ("gate_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("state_size", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("least_step", ctypes.c_float),
        ("most_step", ctypes.c_float),
        ("out_type", ctypes.c_int32),
    )


class LinearAttentionArgs(ctypes.Structure):
    """Mirror of `LinearAttentionArgs` in states.h: the arguments of `hr_op_linear_attention`."""

    _fields_ = (
        ("states", ctypes.c_void_p),
        ("state", StateUnitsC),
        ("drafted", DraftedC),
        ("mixed", ctypes.c_void_p),
        ("decays", ctypes.c_void_p),
        ("rates", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("key_of_head", ctypes.c_void_p),
        ("decay", ctypes.c_void_p),
        ("decay_bias", ctypes.c_void_p),
        ("mixed_stride", ctypes.c_int64),
        ("decays_stride", ctypes.c_int64),
        ("rates_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_key_heads", ctypes.c_int64),
        ("key_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("decay_columns", ctypes.c_int64),
        ("correction", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("decay_floor", ctypes.c_float),
        ("unit_keys", ctypes.c_int32),
        ("mixed_type", ctypes.c_int32),
        ("out_type", ctypes.c_int32),
    )


class SelectiveArgs(ctypes.Structure):
    """Mirror of `SelectiveArgs` in states.h: the arguments of `hr_op_selective_scan`."""

    _fields_ = (
        ("states", ctypes.c_void_p),
        ("state", StateUnitsC),
        ("drafted", DraftedC),
        ("x", ctypes.c_void_p),
        ("steps", ctypes.c_void_p),
        ("shared", ctypes.c_void_p),
        ("gate", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("decay", ctypes.c_void_p),
        ("skip", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("steps_stride", ctypes.c_int64),
        ("shared_stride", ctypes.c_int64),
        ("gate_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("channels", ctypes.c_int64),
        ("state_size", ctypes.c_int64),
        ("out_type", ctypes.c_int32),
    )


class GatedLruArgs(ctypes.Structure):
    """Mirror of `GatedLruArgs` in states.h: the arguments of `hr_op_gated_lru`."""

    _fields_ = (
        ("states", ctypes.c_void_p),
        ("state", StateUnitsC),
        ("drafted", DraftedC),
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rates", ctypes.c_void_p),
        ("input_weight", ctypes.c_void_p),
        ("input_bias", ctypes.c_void_p),
        ("recurrence_weight", ctypes.c_void_p),
        ("recurrence_bias", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("out_type", ctypes.c_int32),
    )
