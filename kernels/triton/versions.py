"""The list of Triton versions of ops. Importing it does not import triton, which would slow a CPU engine's start."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import subprocess
from collections.abc import Callable
from typing import Any

import torch

from headrace.kernels.registry import Version

logger = logging.getLogger(__name__)
LEAST_CAPABILITY = (8, 0)
LEAST_SCALED_MM = (9, 0)
COMPUTED = (torch.float32, torch.bfloat16, torch.float16)
MOST_HEAD_DIM = 512
MOST_GROUP = 64
MOST_NORM_SIZE = 65536
STACKED = ("floats", "int8", "int4")
"""The storage forms of experts that the kernels support."""
LINEAR = ("linear", "linear_int8", "linear_int4", "linear_fp8")


def why_no_triton(device: torch.device | None = None, **_: Any) -> str:
    """The reason why Triton kernels cannot run on a device, in a sentence; "" if they can."""
    if device is None or (device.type != "cuda" and not (device.type == "cpu" and _is_interpreted())):
        return f"the Triton kernels run on CUDA devices, not on {device}."
    if reason := _why_not_importable():
        return reason
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < LEAST_CAPABILITY:
            found = ".".join(map(str, capability))
            return f"the Triton kernels need compute capability 8.0 or above; {device} has {found}."
        return "" if _is_interpreted() else _why_not_started()
    return ""


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _why_not_importable() -> str:
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton cannot be imported here ({error}); it has no build for every platform."
    return ""


@functools.cache
def _why_not_started() -> str:
    """The reason why Triton cannot start: version 3.6 compiles its driver, and a launcher for each kernel, with the
    machine's C compiler."""
    try:
        importlib.import_module("triton.runtime").driver.active.get_current_device()
    except (ImportError, RuntimeError, AssertionError, OSError, subprocess.SubprocessError) as error:
        first_line, _, _ = str(error).partition("\n")
        return f"triton cannot start ({first_line}); it needs a C compiler (gcc) and Python's headers (python3-dev)."
    return ""


def _why_not(dtype: torch.dtype | None = None, **facts: Any) -> str:
    if dtype not in COMPUTED:
        return f"the Triton kernels compute in float32, bfloat16 and float16, not in {dtype}."
    return why_no_triton(**facts)


def _why_no_heads(head_dim: int | None = None, **facts: Any) -> str:
    if head_dim is None or not 0 < head_dim <= MOST_HEAD_DIM:
        return f"the Triton kernels take heads of up to {MOST_HEAD_DIM} values, not {head_dim}."
    return _why_not(**facts)


def _why_no_attention(
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    has_alibi: bool = False,
    grows: bool = False,
    has_sink_tokens: bool = False,
    is_causal: bool = True,
    **facts: Any,
) -> str:
    if has_alibi:
        return "Triton attention has no ALiBi."
    if grows:
        return "Triton attention has no scores that grow with positions."
    if has_sink_tokens:
        return "Triton attention has no sinks with values."
    if not is_causal:
        return "Triton attention is causal."
    if not num_heads or not num_kv_heads or num_heads > MOST_GROUP * num_kv_heads:
        return (
            f"Triton attention packs up to {MOST_GROUP} query heads of each key/value head, "
            f"not {num_heads} of {num_kv_heads}."
        )
    return _why_no_heads(**facts)


def _why_no_latent(latent_dim: int = 0, rope_dim: int = 0, sliding_window: int | None = None, **facts: Any) -> str:
    if sliding_window is not None:
        return "Triton's latent attention has no sliding windows."
    if not 0 < latent_dim <= MOST_HEAD_DIM or not 0 < rope_dim <= MOST_HEAD_DIM:
        return f"Triton's latent attention takes up to {MOST_HEAD_DIM} values, not {latent_dim} and {rope_dim}."
    return _why_not(**facts)


def _why_no_norm(size: int | None = None, **facts: Any) -> str:
    if size is not None and size > MOST_NORM_SIZE:
        return f"the Triton norms hold a row of up to {MOST_NORM_SIZE} values, not {size}."
    return _why_not(**facts)


def _why_no_scaled_mm(shape: tuple[int, int] | None = None, batch_invariant: bool = False, **facts: Any) -> str:
    device = facts.get("device")
    if shape is None or shape[0] % 16 or shape[1] % 16:
        return f"torch's fp8 product takes weights whose sides are multiples of 16, not {shape}."
    if batch_invariant:
        return "torch chooses how its fp8 product is divided by the number of tokens, so it is not batch-invariant."
    if device is not None and device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_SCALED_MM:
        return f"torch's fp8 product with a scale for each row needs compute capability 9.0; {device} has less."
    if facts.get("dtype") == torch.float32:
        return "torch's fp8 product gives bfloat16 or float16, not float32."
    is_gpu = device is not None and device.type == "cuda" and not _is_interpreted()
    return _why_not(**facts) or (_why_scaled_mm_fails(device, facts["dtype"]) if is_gpu else "")


@functools.cache
def _why_scaled_mm_fails(device: torch.device, dtype: torch.dtype) -> str:
    """The reason why torch's fp8 product fails, found by trying it once: support for a scale per row depends on the
    installed torch and cuBLAS, the GPU and the result's dtype."""
    try:
        x, weight = (torch.zeros(rows, 64, dtype=torch.float8_e4m3fn, device=device) for rows in (17, 32))
        scales = torch.ones(32, device=device)
        torch._scaled_mm(x, weight.t(), scales[:17, None], scales[None], out_dtype=dtype)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        first_line, _, _ = str(error).partition("\n")
        logger.warning("fp8 weights are multiplied in the inputs' type: torch's fp8 product fails: %s", first_line)
        return f"torch's fp8 product of {dtype} fails here ({first_line})."
    return ""


def _why_no_linear(batch_invariant: bool = False, **facts: Any) -> str:
    if batch_invariant:
        return "its sums' order depends on the number of tokens, so it is not batch-invariant."
    return _why_not(**facts)


def _why_no_stacks(stored: str = "floats", **facts: Any) -> str:
    if stored not in STACKED:
        return f"its experts are stacks of {', '.join(STACKED[:-1])} or {STACKED[-1]}, not of {stored}."
    return _why_not(**facts)


def _why_no_experts(batch_invariant: bool = False, **facts: Any) -> str:
    if batch_invariant:
        return "its tiles' size depends on the number of tokens, so it is not batch-invariant."
    return _why_no_stacks(**facts)


def _offer(op: str, module: str, why_not: Callable[..., str] = _why_not, **always: Any) -> Version:
    """A version whose module is imported on first use. always: arguments added to those of the reference."""

    @functools.cache
    def loaded() -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(importlib.import_module(f"headrace.kernels.triton.{module}"), op)
        return function

    def serve(*args: Any, **options: Any) -> Any:
        return loaded()(*args, **options, **always)

    return Version(op, "triton_invariant" if always else "triton", serve, why_not)


VERSIONS = (
    _offer("paged_attention", "attention", _why_no_attention),
    _offer("latent_attention", "latent", _why_no_latent),
    _offer("rms_norm", "norms", _why_no_norm),
    _offer("layer_norm", "norms", _why_no_norm),
    _offer("rotary", "rotary_cache", _why_no_heads),
    _offer("write_cache", "rotary_cache", _why_no_heads),
    _offer("rotary_and_write", "rotary_cache", _why_no_heads),
    _offer("convolve", "convolve"),
    _offer("scan", "scan"),
    _offer("linear_attention", "linear_attention"),
    _offer("activate", "activation"),
    _offer("activate_and_multiply", "activation"),
    _offer("embed", "embedding"),
    _offer("adjust_logits", "logits", why_no_triton),
    _offer("choose_tokens", "sampling", why_no_triton),
    _offer("decode_inputs", "decode", why_no_triton),
    _offer("token_logprobs", "logprobs", why_no_triton),
    _offer("slotted_low_rank", "low_rank"),
    _offer("route_experts", "moe"),
    _offer("experts", "moe", _why_no_experts),
    _offer("experts", "moe", _why_no_stacks, batch_invariant=True),
    *(_offer(op, "linear", _why_no_linear) for op in LINEAR),
    *(_offer(op, "linear", batch_invariant=True) for op in LINEAR),
    _offer("linear_fp8_dynamic", "linear", _why_no_scaled_mm),
)
