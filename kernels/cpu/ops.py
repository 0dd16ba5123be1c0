"""Attention, norms, rotary, activations and cache writes on the CPU kernels, with the references' signatures.

Each call opens its own parallel region; `program.py` runs the ops of a whole step in one region. Everything is
computed in float32 and rounded once to the tensors' type. Results are bitwise independent of the number of threads and
of the rest of the batch; those of attention also of the chunks of a prompt.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.cpu import build
from headrace.kernels.cpu.attention.args import AttentionArgs, KvCacheC, RotaryArgs
from headrace.kernels.cpu.attention.cache import LAYOUT_ROWS, describe_cache, why_no_attention
from headrace.kernels.cpu.elementwise.args import ActivationArgs, NormArgs
from headrace.kernels.cpu.linear.linear import ACTIVATIONS, DTYPES, ROWS_FIXED, Runtime, runtime
from headrace.kernels.cpu.runtime.pointers import pointer
from headrace.kernels.cpu.runtime.threads import Step
from headrace.kernels.reference.attention import AttentionParams, CacheScales, PagedBatch
from headrace.kernels.registry import Version

MOST_ROW_VALUES = 32768
WORKSPACE_BYTES = 8 << 20
"""Memory for partial results of sequences whose context is divided among threads. A sequence whose partial results do
not fit is not divided."""


def step_of(batch: PagedBatch) -> Step:
    """The C description of a batch, made once per step. `batch.memo` keeps it and the tensors that it points to."""
    if "cpu step" not in batch.memo:
        tensors = {
            "slot_mapping": batch.slot_mapping.to(torch.int64).contiguous(),
            "query_start": batch.query_start.to(torch.int32).contiguous(),
            "seq_lens": batch.seq_lens.to(torch.int32).contiguous(),
            **({} if batch.key_lens is None else {"key_lens": batch.key_lens.to(torch.int32).contiguous()}),
            "block_table": batch.block_tables.to(torch.int32).contiguous(),
        }
        step = Step(
            num_tokens=len(batch.slot_mapping),
            num_seqs=len(batch.seq_lens),
            block_table_stride=tensors["block_table"].shape[1],
            **{name: pointer(tensor) for name, tensor in tensors.items()},
        )
        batch.memo["cpu step"] = (step, tensors)
    return batch.memo["cpu step"][0]


class CpuOps:
    """The ops on one runtime. They copy tensors that are not contiguous."""

    def __init__(self, used: Runtime) -> None:
        self.runtime = used
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8)
        dll = used.library.dll
        dll.hr_attention_scratch_bytes.restype = ctypes.c_int64
        dll.hr_attention_scratch_bytes.argtypes = [ctypes.c_void_p]

    def rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """As `reference.rms_norm`."""
        return self._norm(0, x, residual, weight, None, eps)

    def layer_norm(
        self, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """As `reference.layer_norm`."""
        return self._norm(1, x, residual, weight, bias, eps)

    def _norm(
        self, kind: int, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        if reason := _why_no_norm(x.device, x.dtype, x.shape[-1]):
            raise ValueError(reason)
        x = x.contiguous()
        total = x if residual is None else residual.clone(memory_format=torch.contiguous_format)
        out, size = torch.empty_like(x), x.shape[-1]
        args = NormArgs(
            input=pointer(x),
            residual=None if residual is None else pointer(total),
            output=pointer(out),
            weight=None if weight is None else pointer(weight),
            bias=None if bias is None else pointer(bias),
            input_stride=size,
            residual_stride=size,
            output_stride=size,
            size=size,
            num_rows=x.numel() // size,
            rows=ROWS_FIXED,
            kind=kind,
            input_type=DTYPES[x.dtype],
            residual_type=DTYPES[total.dtype],
            output_type=DTYPES[out.dtype],
            eps=eps,
            factor=1.0,
        )
        self.runtime.pool.run_op("hr_op_norm", args)
        return out, total

    def activate(self, x: Tensor, kind: str) -> Tensor:
        """As `reference.activate`."""
        x = x.contiguous()
        return self._activate(x, x.shape[-1], x.shape[-1], None, kind)

    def activate_and_multiply(self, gate_up: Tensor, kind: str) -> Tensor:
        """As `reference.activate_and_multiply`."""
        gate_up = gate_up.contiguous()
        size = gate_up.shape[-1] // 2
        up = pointer(gate_up) + size * gate_up.itemsize
        return self._activate(gate_up, size, 2 * size, up, kind)

    def _activate(self, x: Tensor, size: int, stride: int, up: int | None, kind: str) -> Tensor:
        out = torch.empty(*x.shape[:-1], size, dtype=x.dtype)
        args = ActivationArgs(
            gate=pointer(x),
            up=up,
            output=pointer(out),
            gate_stride=stride,
            output_stride=size,
            size=size,
            num_rows=out.numel() // size,
            rows=ROWS_FIXED,
            kind=ACTIVATIONS[kind],
            input_type=DTYPES[x.dtype],
            output_type=DTYPES[out.dtype],
        )
        self.runtime.pool.run_op("hr_op_activation_multiply", args)
        return out

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """As `reference.rotary`."""
        return self._rotate(query, cos, sin), self._rotate(key, cos, sin)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x, cos, sin = x.clone(memory_format=torch.contiguous_format), cos.contiguous(), sin.contiguous()
        num_tokens, num_heads, head_dim = x.shape
        args = RotaryArgs(
            query=pointer(x),
            query_stride=num_heads * head_dim,
            cos=pointer(cos),
            sin=pointer(sin),
            cache=KvCacheC(head_dim=head_dim),
            num_heads=num_heads,
            rotary_half=cos.shape[-1],
            by_token=1,
            type=DTYPES[x.dtype],
        )
        self.runtime.pool.run_op("hr_op_rotary_and_cache_write", args, Step(num_tokens=num_tokens))
        return x

    def write_cache(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: PagedBatch,
        scales: CacheScales | None = None,
        layout: int = LAYOUT_ROWS,
    ) -> None:
        """As `reference.write_cache`."""
        key, value = _rows_of_heads(key), _rows_of_heads(value)
        args = RotaryArgs(
            key=pointer(key),
            value=pointer(value),
            key_stride=key.stride(0),
            value_stride=value.stride(0),
            cache=describe_cache(key_cache, value_cache, scales, layout),
            type=DTYPES[key.dtype],
        )
        self.runtime.pool.run_op("hr_op_rotary_and_cache_write", args, step_of(batch))

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        batch: PagedBatch,
        params: AttentionParams,
        scales: CacheScales | None = None,
        layout: int = LAYOUT_ROWS,
    ) -> Tensor:
        """As `reference.attention.paged_attention`.

        If the CPU has bf16 products, the query and the softmax weights are rounded to bf16 for bf16, int8, e4m3 and
        e5m2 caches. Sums are always in float32.
        """
        query = _rows_of_heads(query)
        _, num_heads, head_dim = query.shape
        out = torch.empty(query.shape, dtype=query.dtype)
        sinks = None if params.sinks is None else params.sinks.float().contiguous()
        alibi = None if params.alibi is None else params.alibi.float().contiguous()
        tokens = params.sink_tokens
        args = AttentionArgs(
            source=RotaryArgs(
                query=pointer(query),
                query_stride=query.stride(0),
                cache=describe_cache(key_cache, value_cache, scales, layout),
                num_heads=num_heads,
                type=DTYPES[query.dtype],
            ),
            output=pointer(out),
            output_stride=num_heads * head_dim,
            sinks=None if sinks is None else pointer(sinks),
            sink_keys=None if tokens is None else pointer(tokens.keys),
            sink_values=None if tokens is None else pointer(tokens.values),
            num_sinks=0 if tokens is None else len(tokens.keys),
            alibi=None if alibi is None else pointer(alibi),
            alibi_root=params.alibi_root,
            grow_after=params.grow_after or 0,
            distance_bias=None if params.distance_bias is None else pointer(params.distance_bias),
            bias_stride=0 if params.distance_bias is None else params.distance_bias.shape[1],
            workspace=pointer(self._workspace),
            workspace_bytes=self._workspace.nbytes,
            scale=params.scale,
            soft_cap=params.soft_cap or 0.0,
            window=params.sliding_window or 0,
            both_sides=not params.causal,
            value_dim=head_dim,
            output_type=DTYPES[out.dtype],
        )
        pool = self.runtime.pool
        pool.reserve(0, self.runtime.library.dll.hr_attention_scratch_bytes(ctypes.byref(args)))
        pool.run_op("hr_op_attention", args, step_of(batch))
        return out


def _rows_of_heads(x: Tensor) -> Tensor:
    """x [num_tokens, num_heads, head_dim] with each token's heads contiguous; the stride of tokens is free."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@functools.cache
def shared_ops() -> CpuOps:
    """The ops on this process's shared runtime. Raises RuntimeError if the kernels cannot be built."""
    return CpuOps(runtime())


def why_no_op(device: torch.device | None = None, dtype: torch.dtype | None = None, **_: Any) -> str:
    """The reason why the CPU's row ops do not apply, in a sentence; "" if they do."""
    if device is None or device.type != "cpu":
        return f"the CPU kernels work on the CPU's memory, not on {device}."
    if dtype not in DTYPES:
        return f"the CPU kernels compute in float32, bfloat16 and float16, not in {dtype}."
    return build.why_not() or ""


def _offer(op: str, why_not: Callable[..., str] = why_no_op) -> Version:
    def serve(*args: Any, **options: Any) -> Any:
        return getattr(shared_ops(), op)(*args, **options)

    return Version(op, "cpu_native", serve, why_not)


def _why_no_norm(
    device: torch.device | None = None, dtype: torch.dtype | None = None, size: int | None = None, **_: Any
) -> str:
    if size is not None and size > MOST_ROW_VALUES:
        return f"the CPU norms hold rows of up to {MOST_ROW_VALUES} values, not {size}."
    return why_no_op(device, dtype)


def _why_no_paged_attention(**facts: Any) -> str:
    return why_no_op(**facts) or why_no_attention(**facts)


VERSIONS = (
    *(_offer(op, _why_no_norm) for op in ("rms_norm", "layer_norm")),
    *(_offer(op) for op in ("rotary", "activate", "activate_and_multiply")),
    _offer("write_cache", _why_no_paged_attention),
    _offer("paged_attention", _why_no_paged_attention),
)
