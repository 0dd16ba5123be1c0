"""Mirrors in ctypes of the C structures of sampling."""

from __future__ import annotations

import ctypes


class SampleArgs(ctypes.Structure):
    """Mirror of `SampleArgs` in sampling.h: the arguments of `hr_op_sample`."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("temperature", ctypes.c_void_p),
        ("top_k", ctypes.c_void_p),
        ("top_p", ctypes.c_void_p),
        ("min_p", ctypes.c_void_p),
        ("seeds", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("best", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("highest", ctypes.c_void_p),
        ("highest_rows", ctypes.c_int64),
        ("is_masked", ctypes.c_void_p),
        ("masks", ctypes.c_void_p),
    )


class LogprobArgs(ctypes.Structure):
    """Mirror of `LogprobArgs` in logprobs.cpp: the arguments of `hr_op_token_logprobs`."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("vocab_size", ctypes.c_int64),
        ("num_rows", ctypes.c_int64),
        ("own", ctypes.c_void_p),
        ("num_top", ctypes.c_int64),
        ("token_ids", ctypes.c_void_p),
        ("logprobs", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
    )
