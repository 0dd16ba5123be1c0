"""Mirrors in ctypes of the C structures of experts."""

from __future__ import annotations

import ctypes


class RouteArgs(ctypes.Structure):
    """Mirror of `RouteArgs` in experts.h: the arguments of `hr_op_route`."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("factors", ctypes.c_void_p),
        ("expert_ids", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("logits_stride", ctypes.c_int64),
        ("num_experts", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("groups_chosen", ctypes.c_int64),
        ("group_best", ctypes.c_int64),
        ("places", ctypes.c_void_p),
        ("replicas", ctypes.c_void_p),
        ("most_replicas", ctypes.c_int64),
        ("fixed_rows", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("logits_dtype", ctypes.c_int32),
        ("scoring", ctypes.c_int32),
        ("renormalise", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("margin", ctypes.c_float),
    )


class ExpertsArgs(ctypes.Structure):
    """Mirror of `ExpertsArgs` in experts.h: the arguments of `hr_op_experts`."""

    _fields_ = (
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("gate_up_bias", ctypes.c_void_p),
        ("down_bias", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("x_thread_stride", ctypes.c_int64),
        ("expert_ids", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("inner", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("experts_read", ctypes.c_void_p),
        ("loads", ctypes.c_void_p),
        ("num_experts", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        ("pass_rows", ctypes.c_int64),
        ("fixed_rows", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("x_dtype", ctypes.c_int32),
        ("inner_dtype", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("add_to_out", ctypes.c_int32),
        ("gate_up_site", ctypes.c_void_p),
        ("down_site", ctypes.c_void_p),
        ("delta_uses", ctypes.c_int64),
        ("delta_width", ctypes.c_int64),
    )
