"""Mirrors in ctypes of the C structures of attention and of the cache."""

from __future__ import annotations

import ctypes


class KvCacheC(ctypes.Structure):
    """Mirror of `KvCache` in attention/cache.h."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("key_scales", ctypes.c_void_p),
        ("value_scales", ctypes.c_void_p),
        ("key_heads", ctypes.c_void_p),
        ("value_heads", ctypes.c_void_p),
        ("key_scale", ctypes.c_float),
        ("value_scale", ctypes.c_float),
        ("type", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("layout", ctypes.c_int32),
        ("scales_skip", ctypes.c_int64),
        ("slots_offset", ctypes.c_int64),
        ("tables_offset", ctypes.c_int64),
    )


class RotaryArgs(ctypes.Structure):
    """Mirror of `RotaryArgs` in attention.h: the arguments of `hr_op_rotary_and_cache_write`."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("key_stride", ctypes.c_int64),
        ("value_stride", ctypes.c_int64),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("value_norm", ctypes.c_void_p),
        ("query_norm_bias", ctypes.c_void_p),
        ("key_norm_bias", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("cache", KvCacheC),
        ("clip", ctypes.c_float),
        ("norm_eps", ctypes.c_float),
        ("norm_kind", ctypes.c_int32),
        ("norm_last", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("rotary_half", ctypes.c_int32),
        ("by_token", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("fuse_decode", ctypes.c_int32),
    )


class AttentionArgs(ctypes.Structure):
    """Mirror of `AttentionArgs` in attention.h: the arguments of `hr_op_attention`."""

    _fields_ = (
        ("source", RotaryArgs),
        ("output", ctypes.c_void_p),
        ("output_stride", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("sink_keys", ctypes.c_void_p),
        ("sink_values", ctypes.c_void_p),
        ("alibi", ctypes.c_void_p),
        ("distance_bias", ctypes.c_void_p),
        ("bias_stride", ctypes.c_int64),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("window", ctypes.c_int32),
        ("both_sides", ctypes.c_int32),
        ("value_dim", ctypes.c_int32),
        ("most_tokens", ctypes.c_int32),
        ("output_type", ctypes.c_int32),
        ("only_logits", ctypes.c_int32),
        ("alibi_root", ctypes.c_int32),
        ("chunk", ctypes.c_int32),
        ("chunks_before", ctypes.c_int32),
        ("num_sinks", ctypes.c_int32),
        ("grow_after", ctypes.c_int32),
        ("never_skipped", ctypes.c_void_p),
    )


class LatentArgs(ctypes.Structure):
    """Mirror of `LatentArgs` in latent.h: the arguments of `hr_op_latent_write`."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        ("absorbed", ctypes.c_void_p),
        ("latent", ctypes.c_void_p),
        ("query_stride", ctypes.c_int64),
        ("absorbed_stride", ctypes.c_int64),
        ("latent_stride", ctypes.c_int64),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("cache", KvCacheC),
        ("num_heads", ctypes.c_int32),
        ("nope_dim", ctypes.c_int32),
        ("rotary_half", ctypes.c_int32),
        ("interleaved", ctypes.c_int32),
    )


class LatentExpandedArgs(ctypes.Structure):
    """Mirror of `LatentExpandedArgs` in latent.h: the arguments of `hr_op_latent_expanded`."""

    _fields_ = (
        ("latent", LatentArgs),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("keys_stride", ctypes.c_int64),
        ("output", ctypes.c_void_p),
        ("output_stride", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("value_dim", ctypes.c_int32),
        ("least_tokens", ctypes.c_int32),
        ("output_type", ctypes.c_int32),
        ("skipped", ctypes.c_void_p),
    )
