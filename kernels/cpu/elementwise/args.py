"""Mirrors in ctypes of the C structures of ops on rows."""

from __future__ import annotations

import ctypes


class NormArgs(ctypes.Structure):
    """Mirror of `NormArgs` in elementwise.h: the arguments of `hr_op_norm`."""

    _fields_ = (
        ("input", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("input_stride", ctypes.c_int64),
        ("residual_stride", ctypes.c_int64),
        ("output_stride", ctypes.c_int64),
        ("output_thread_stride", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("add_to_output", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("input_type", ctypes.c_int32),
        ("residual_type", ctypes.c_int32),
        ("output_type", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("factor", ctypes.c_float),
        ("groups", ctypes.c_int32),
    )


class ActivationArgs(ctypes.Structure):
    """Mirror of `ActivationArgs` in elementwise.h: the arguments of `hr_op_activation_multiply`."""

    _fields_ = (
        ("gate", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("gate_stride", ctypes.c_int64),
        ("output_stride", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("input_type", ctypes.c_int32),
        ("output_type", ctypes.c_int32),
    )


class XieluArgs(ctypes.Structure):
    """Mirror of `XieluArgs` in elementwise.h: the arguments of `hr_op_xielu`."""

    _fields_ = (
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("input_stride", ctypes.c_int64),
        ("output_stride", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("input_type", ctypes.c_int32),
        ("output_type", ctypes.c_int32),
        ("above", ctypes.c_float),
        ("below", ctypes.c_float),
        ("linear", ctypes.c_float),
        ("most", ctypes.c_float),
    )


class EmbeddingArgs(ctypes.Structure):
    """Mirror of `EmbeddingArgs` in elementwise.h: the arguments of `hr_op_embedding`."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("positions_stride", ctypes.c_int64),
        ("output_stride", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("position_offset", ctypes.c_int64),
        ("by_type", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("table_type", ctypes.c_int32),
        ("positions_type", ctypes.c_int32),
        ("output_type", ctypes.c_int32),
    )


class AddArgs(ctypes.Structure):
    """Mirror of `AddArgs` in elementwise.h: the arguments of `hr_op_add`."""

    _fields_ = (
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("input_stride", ctypes.c_int64),
        ("output_stride", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("input_type", ctypes.c_int32),
        ("output_type", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


class ScaleRowsArgs(ctypes.Structure):
    """Mirror of `ScaleRowsArgs` in elementwise.h: the arguments of `hr_op_scale_rows`."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("type", ctypes.c_int32),
    )


class GatherArgs(ctypes.Structure):
    """Mirror of `GatherArgs` in elementwise.h."""

    _fields_ = (
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("input_stride", ctypes.c_int64),
        ("output_stride", ctypes.c_int64),
        ("output_thread_stride", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
    )


class CopyArgs(ctypes.Structure):
    """Mirror of `CopyArgs` in elementwise.h: the arguments of `hr_op_copy`."""

    _fields_ = (
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("input_stride", ctypes.c_int64),
        ("output_stride", ctypes.c_int64),
        ("input_thread_stride", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("rows", ctypes.c_int32),
    )


class GatedNormArgs(ctypes.Structure):
    """Mirror of `GatedNormArgs` in elementwise.h."""

    _fields_ = (
        ("input", ctypes.c_void_p),
        ("gate", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("input_stride", ctypes.c_int64),
        ("gate_stride", ctypes.c_int64),
        ("output_stride", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("weight_stride", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("input_type", ctypes.c_int32),
        ("gate_type", ctypes.c_int32),
        ("output_type", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("gate_per_group", ctypes.c_int32),
    )


class SoftCapArgs(ctypes.Structure):
    """Mirror of `SoftCapArgs` in elementwise.h: the arguments of `hr_op_soft_cap`."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("cap", ctypes.c_float),
    )


class MixRowsArgs(ctypes.Structure):
    """Mirror of `MixRowsArgs` in rows.h: the arguments of `hr_op_mix_rows`."""

    _fields_ = (
        ("input", ctypes.c_void_p),
        ("shares", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("input_stride", ctypes.c_int64),
        ("shares_stride", ctypes.c_int64),
        ("output_stride", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("rows", ctypes.c_int32),
    )


class CorrectRowsArgs(ctypes.Structure):
    """Mirror of `CorrectRowsArgs` in rows.h: the arguments of `hr_op_correct_rows`."""

    _fields_ = (
        ("input", ctypes.c_void_p),
        ("computed", ctypes.c_void_p),
        ("shares", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("input_stride", ctypes.c_int64),
        ("computed_stride", ctypes.c_int64),
        ("shares_stride", ctypes.c_int64),
        ("output_stride", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("active", ctypes.c_int64),
        ("rows", ctypes.c_int32),
    )


class LikeRowsArgs(ctypes.Structure):
    """Mirror of `LikeRowsArgs` in rows.h: the arguments of `hr_op_like_rows`."""

    _fields_ = (
        ("input", ctypes.c_void_p),
        ("pattern", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("input_stride", ctypes.c_int64),
        ("pattern_stride", ctypes.c_int64),
        ("output_stride", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("least", ctypes.c_float),
        ("adds", ctypes.c_int32),
        ("rows", ctypes.c_int32),
    )


class SparseGateArgs(ctypes.Structure):
    """Mirror of `SparseGateArgs` in rows.h: the arguments of `hr_op_sparse_gate`."""

    _fields_ = (
        ("gate", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("gate_stride", ctypes.c_int64),
        ("up_stride", ctypes.c_int64),
        ("output_stride", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("cutoff", ctypes.c_float),
        ("rows", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("output_type", ctypes.c_int32),
    )


class ScaleColumnsArgs(ctypes.Structure):
    """Mirror of `ScaleColumnsArgs` in rows.h: the arguments of `hr_op_scale_columns`."""

    _fields_ = (
        ("input", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("input_stride", ctypes.c_int64),
        ("output_stride", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("rows", ctypes.c_int32),
    )
