"""Mirrors in ctypes of the C structures of programs."""

from __future__ import annotations

import ctypes


class ProgramOp(ctypes.Structure):
    """Mirror of `ProgramOp` in program.h."""

    _fields_ = (
        ("run", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("barrier_before", ctypes.c_int32),
        ("skipped_when_single", ctypes.c_int32),
    )


class ProgramC(ctypes.Structure):
    """Mirror of `Program` in program.h."""

    _fields_ = (
        ("ops", ctypes.c_void_p),
        ("first", ctypes.c_int64),
        ("end", ctypes.c_int64),
        ("ticks", ctypes.c_void_p),
        ("ticks_per_thread", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("position_limit", ctypes.c_int64),
        ("alone_rows", ctypes.c_int64),
    )
