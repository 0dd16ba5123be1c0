"""Collectives over shared memory between the ranks of a host: mirrors of collectives.h and its functions' types."""

from __future__ import annotations

import ctypes

from headrace.kernels.cpu import build

OUTCOMES = {1: "failed", 2: "gone", 3: "late"}


class PeerC(ctypes.Structure):
    """Mirror of `Peer`."""

    _fields_ = (
        ("header", ctypes.c_void_p),
        ("deadline_ms", ctypes.c_int64),
        ("spin_us", ctypes.c_int32),
        ("outcome", ctypes.c_int32),
        ("culprit", ctypes.c_int32),
    )


class GroupC(ctypes.Structure):
    """Mirror of `Group`."""

    _fields_ = (
        ("peer", ctypes.c_void_p),
        ("lines", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("part_bytes", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("count", ctypes.c_uint32),
        ("turn", ctypes.c_uint32),
    )


class RankSumArgs(ctypes.Structure):
    """Mirror of `RankSumArgs`: the arguments of `hr_op_rank_sum`."""

    _fields_ = (
        ("group", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("part_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("out_dtype", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("add", ctypes.c_int32),
    )


class RankGatherArgs(ctypes.Structure):
    """Mirror of `RankGatherArgs`: the arguments of `hr_op_rank_gather`."""

    _fields_ = (
        ("group", ctypes.c_void_p),
        ("shared", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
        ("rows", ctypes.c_int32),
    )


def declare(library: build.Library) -> ctypes.CDLL:
    """Sets the argument types of the functions for lines and groups, and returns the library's handle."""
    dll, pointer, word = library.dll, ctypes.c_void_p, ctypes.c_uint32
    for name, arguments in (
        ("hr_line_own", [pointer]),
        ("hr_line_wait", [pointer, pointer, word]),
        ("hr_line_reached", [pointer, word]),
        ("hr_line_raise", [pointer, word]),
        ("hr_group_meet", [pointer]),
        ("hr_group_sum", [pointer, pointer, ctypes.c_int64, ctypes.c_int32]),
        ("hr_group_gather", [pointer, pointer, ctypes.c_int64, ctypes.c_int64, pointer]),
    ):
        getattr(dll, name).argtypes = arguments
    return dll
