"""Mirrors in ctypes of the C structures of programs and of the arguments of their ops."""

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
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("cache", KvCacheC),
        ("norm_eps", ctypes.c_float),
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
        ("alibi", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("workspace_bytes", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("window", ctypes.c_int32),
        ("value_dim", ctypes.c_int32),
        ("most_tokens", ctypes.c_int32),
        ("output_type", ctypes.c_int32),
        ("only_logits", ctypes.c_int32),
    )


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


class RouteArgs(ctypes.Structure):
    """Mirror of `RouteArgs` in experts.h: the arguments of `hr_op_route`."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
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
    )


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
