"""The parts of a program: buffers of activations, and the constants of norms and attention layers."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headrace.kernels.cpu.attention.args import RotaryArgs
from headrace.kernels.cpu.attention.cache import best_layout, describe_cache
from headrace.kernels.cpu.linear.linear import DTYPES
from headrace.kernels.cpu.runtime.pointers import pointer
from headrace.kernels.reference.attention import CacheScales, SinkRows

FEW_ROWS = 16
"""Steps of at most this many tokens use the list of ops in which each thread norms every row itself."""


PANEL_ROWS = 32
"""`kPanelRows` in linear.h."""
CORE_BYTES_PER_S, CORE_MULTIPLY_ADDS_PER_S = 40e9, 100e9
"""Cautious estimates for one core, in bf16, precise enough to tell steps of microseconds from those of milliseconds."""


def rows_within(seconds: float, weight_bytes: int, multiply_adds: int) -> int:
    """Estimates how many rows one thread computes in `seconds`. weight_bytes: read once; multiply_adds: per row."""
    left_s = seconds - weight_bytes / CORE_BYTES_PER_S
    return max(0, int(left_s * CORE_MULTIPLY_ADDS_PER_S / multiply_adds)) if multiply_adds else 0


@dataclass(frozen=True, eq=False)
class Buffer:
    """Activations of a step. Between steps `tensor` keeps the values of the last one."""

    tensor: Tensor  # [max rows, columns]
    rows: Literal["tokens", "logits"]
    copies: Tensor | None = None  # [num_threads, FEW_ROWS, columns]: each thread's own copy in steps of few rows
    whole: Buffer | None = None
    """The buffer whose columns this is a part of."""
    highest: Tensor | None = None  # [num_threads, max rows, 2 * 32] 32-bit words
    """The highest logits of each row (`LaneHighest` in linear.h), for steps with `Step.only_highest`."""

    def part(self, first: int, columns: int) -> Buffer:
        """A view of columns [first, first + columns), for a linear layer to write. Parts that share no column may be
        written without a barrier between them."""
        if self.copies is not None or not 0 <= first < first + columns <= self.columns:
            raise ValueError(f"columns [{first}, {first + columns}) are no part of a shared buffer of {self.columns}.")
        return Buffer(self.tensor[:, first : first + columns], self.rows, whole=self.whole or self)

    def of_logits(self, most: int) -> Buffer:
        """The same memory with one row per row of logits, at most `most`."""
        return Buffer(self.tensor[:most], "logits", self.copies)

    @property
    def columns(self) -> int:
        return self.tensor.shape[1]

    @property
    def stride(self) -> int:
        """Elements from row to row."""
        return self.tensor.stride(0)

    @property
    def row_bytes(self) -> int:
        """Bytes from row to row."""
        return self.stride * self.tensor.itemsize

    @property
    def span(self) -> tuple[int, int, int]:
        """(address of the whole buffer, first byte, end) within a row. Buffers share memory if their spans overlap."""
        base = pointer((self.whole or self).tensor)
        first = self.address - base
        return base, first, first + self.columns * self.tensor.itemsize

    @property
    def type(self) -> int:
        return DTYPES[self.tensor.dtype]

    @property
    def address(self) -> int:
        return pointer(self.tensor)


NORM_KINDS = {"rms": 0, "layer": 1}
"""Mirror of `NormKind` in elementwise/elementwise.h."""


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm's constants. weight and bias: [size] float32, any constant offset already added, or None."""

    kind: Literal["rms", "layer"]
    eps: float
    weight: Tensor | None = None
    bias: Tensor | None = None
    groups: int = 1
    """Groups of columns, each of which is normed by itself."""


@dataclass(frozen=True, eq=False)
class Rotary:
    """cos and sin: [max positions, half] float32; dimensions i and i + half of a head are rotated together."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, eq=False)
class LayerCache:
    """One layer's keys and values, each [num_blocks, num_kv_heads, block_size, head_dim].

    A program stores each block's rows of a head in the order of `layout`. Only programs read them, and other code moves
    only whole blocks.
    """

    keys: Tensor
    values: Tensor
    scales: CacheScales | None = None
    slots_offset: int = 0
    """The offset of the slots of this layer's cache group in the step's slot mapping, in elements."""
    tables_offset: int = 0
    """The offset of the group's block tables in those of the step, in elements."""

    @property
    def layout(self) -> int:
        return best_layout(self.keys.shape[2], self.keys.shape[3])


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """The constants of one attention layer. The norms apply to each head."""

    num_heads: int
    cache: LayerCache
    scale: float
    rotary: Rotary | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    """[num_heads] float32: attention sinks, the score of an extra key whose value is 0."""
    sink_tokens: SinkRows | None = None
    """Of `AttentionParams.sink_tokens`."""
    alibi: Tensor | None = None
    """[num_heads] float32: ALiBi slopes: a score loses slope * distance of key and query."""
    alibi_root: bool = False
    """Whether a score loses slope * the root of the distance instead."""
    chunk_size: int | None = None
    """Tokens of a chunk: a token attends to its own and to `chunks_before` before it, in the place of a window."""
    chunks_before: int = 0
    grow_after: int | None = None
    """Of `AttentionParams.grow_after`."""
    distance_bias: Tensor | None = None
    """Of `AttentionParams.distance_bias`."""
    both_sides: bool = False
    """Whether a token attends to the tokens after it too, which are all in the cache after the step."""
    norm_after_rotation: bool = False
    clip_qkv: float | None = None
    """Largest magnitude of queries, keys and values, before their norms."""
    value_norm: Norm | None = None
    reads_only: bool = False
    """Whether there are queries alone, which attend to what another layer writes."""
    keys_are_values: bool = False
    """Whether the keys before their norm and rotation are the values before theirs."""


def _bias_of(norm: Norm | None) -> int | None:
    return None if norm is None or norm.bias is None else address_of(norm.bias)


def rotary_args(qkv: Buffer, layer: AttentionLayer) -> RotaryArgs:
    """The arguments of rotation and cache write for a layer's queries, keys and values.

    Raises ValueError for shapes that do not match and norms that the kernels do not support."""
    cache = describe_cache(layer.cache.keys, layer.cache.values, layer.cache.scales, layer.cache.layout)
    cache.slots_offset, cache.tables_offset = layer.cache.slots_offset, layer.cache.tables_offset
    head_dim, num_kv_heads = cache.head_dim, cache.num_kv_heads
    if layer.num_heads % num_kv_heads:
        raise ValueError(f"{layer.num_heads} query heads cannot share {num_kv_heads} KV heads evenly.")
    kv_parts = 0 if layer.reads_only else 1 if layer.keys_are_values else 2
    width = (layer.num_heads + kv_parts * num_kv_heads) * head_dim
    require_same(qkv.columns, width, "the query, key and value buffer's columns", "its heads'")
    norms = [norm for norm in (layer.query_norm, layer.key_norm, layer.value_norm) if norm is not None]
    for norm in norms:
        check_vector(norm.weight, head_dim, "a query, key or value norm's weight")
        if norm.bias is not None:
            check_vector(norm.bias, head_dim, "a query or key norm's bias")
        if norm.weight is None or (norm.kind, norm.eps) != (norms[0].kind, norms[0].eps):
            raise ValueError("the norms of queries, keys and values are of one kind, with weights and one eps.")
    if layer.value_norm is not None and layer.value_norm.bias is not None:
        raise ValueError("the norm of values has no bias.")
    head_bytes = head_dim * qkv.tensor.itemsize
    keys = qkv.address + layer.num_heads * head_bytes
    args = RotaryArgs(
        query=qkv.address,
        key=None if layer.reads_only else keys,
        value=None if layer.reads_only else keys + (kv_parts - 1) * num_kv_heads * head_bytes,
        query_stride=qkv.stride,
        key_stride=qkv.stride,
        value_stride=qkv.stride,
        query_norm=address_of(layer.query_norm.weight) if layer.query_norm else None,
        key_norm=address_of(layer.key_norm.weight) if layer.key_norm else None,
        value_norm=address_of(layer.value_norm.weight) if layer.value_norm else None,
        query_norm_bias=_bias_of(layer.query_norm),
        key_norm_bias=_bias_of(layer.key_norm),
        norm_eps=norms[0].eps if norms else 0.0,
        norm_kind=NORM_KINDS[norms[0].kind] if norms else 0,
        norm_last=layer.norm_after_rotation,
        clip=layer.clip_qkv or 0.0,
        num_heads=layer.num_heads,
        type=qkv.type,
        fuse_decode=1,
        cache=cache,
    )
    if layer.rotary is not None:
        set_rotation(args, layer.rotary, head_dim)
    return args


def set_rotation(args: RotaryArgs, rotary: Rotary, head_dim: int) -> None:
    """Raises ValueError for tables that do not fit a head."""
    check_tables(rotary)
    cos, sin = rotary.cos, rotary.sin
    if 2 * cos.shape[1] > head_dim:
        raise ValueError(f"rotation of {2 * cos.shape[1]} dimensions does not fit heads of {head_dim}.")
    args.cos, args.sin, args.rotary_half = pointer(cos), pointer(sin), cos.shape[1]


def check_tables(rotary: Rotary) -> None:
    for table in (rotary.cos, rotary.sin):
        if table.dtype != torch.float32 or not table.is_contiguous() or table.shape != rotary.cos.shape:
            raise ValueError("cos and sin are contiguous float32 tables of one shape, [positions, half].")


def with_own_copies(args: ctypes.Structure, name: str, buffer: Buffer) -> ctypes.Structure | None:
    """A copy of the arguments whose field `name` points to the threads' own copies of the buffer; None if the buffer
    has no copies."""
    if buffer.copies is None:
        return None
    few = type(args).from_buffer_copy(args)
    setattr(few, name, pointer(buffer.copies))
    setattr(few, f"{name}_thread_stride", buffer.copies.stride(0) * buffer.copies.itemsize)
    return few


def require_same(found: object, wanted: object, what: str, against: str) -> None:
    if found != wanted:
        raise ValueError(f"{what} ({found}) must equal {against} ({wanted}).")


def check_vector(vector: Tensor | None, size: int, what: str) -> None:
    if vector is None:
        return
    if vector.dtype != torch.float32 or vector.shape != (size,) or not vector.is_contiguous():
        raise ValueError(f"{what} is {vector.dtype} {list(vector.shape)}; it must be contiguous float32 [{size}].")


def address_of(tensor: Tensor | None) -> int | None:
    return None if tensor is None else pointer(tensor)


def matrix_of(table: Tensor) -> tuple[int, int, int]:
    if table.dtype not in DTYPES or table.dim() != 2 or table.stride(1) != 1:
        raise ValueError(f"a table is [rows, columns] in fp32, bf16 or fp16, not {table.dtype} {list(table.shape)}.")
    return pointer(table), table.stride(0), DTYPES[table.dtype]
