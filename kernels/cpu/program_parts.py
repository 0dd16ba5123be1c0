"""What a program is made of: buffers of activations, and the constants of norms and attention layers."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .linear import DTYPES
from .ops import CacheScales, best_layout, describe_cache
from .program_args import RotaryArgs

FEW_ROWS = 16
"""Steps of at most this many tokens take the list in which each thread norms every row for itself."""


PANEL_ROWS = 32
"""`kPanelRows` in linear.h."""
CORE_BYTES_PER_S, CORE_MULTIPLY_ADDS_PER_S = 40e9, 100e9
"""What a core does at least, in bf16: enough to tell steps of microseconds from steps of milliseconds."""


def rows_within(seconds: float, weight_bytes: int, multiply_adds: int) -> int:
    """How many rows one thread computes in this time with weights of this size; multiply_adds: for one row."""
    left_s = seconds - weight_bytes / CORE_BYTES_PER_S
    return max(0, int(left_s * CORE_MULTIPLY_ADDS_PER_S / multiply_adds)) if multiply_adds else 0


@dataclass(frozen=True, eq=False)
class Buffer:
    """Activations of a step. `tensor` holds what the last step left."""

    tensor: Tensor  # [max rows, columns]
    rows: Literal["tokens", "logits"]
    copies: Tensor | None = None  # [num_threads, FEW_ROWS, columns], where threads make their own in small steps
    whole: Buffer | None = None
    """What this is some columns of."""
    highest: Tensor | None = None  # [num_threads, max rows, 2 * 32] 32-bit words
    """Where a step that wants nothing else of these logits keeps the highest of each row: `LaneHighest` in linear.h."""

    def part(self, first: int, columns: int) -> Buffer:
        """Columns [first, first + columns), for a linear layer to write. Parts that share no column may be written
        without a barrier between them."""
        if self.copies is not None or not 0 <= first < first + columns <= self.columns:
            raise ValueError(f"columns [{first}, {first + columns}) are no part of a shared buffer of {self.columns}.")
        return Buffer(self.tensor[:, first : first + columns], self.rows, whole=self)

    def of_logits(self, most: int) -> Buffer:
        """The same memory with one row per row of logits, of which there are at most so many."""
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
        """From row to row."""
        return self.stride * self.tensor.itemsize

    @property
    def span(self) -> tuple[int, int, int]:
        """(address of the whole, first byte, end) of a row: spans that overlap touch the same memory."""
        base = (self.whole or self).tensor.data_ptr()
        first = self.address - base
        return base, first, first + self.columns * self.tensor.itemsize

    @property
    def type(self) -> int:
        return DTYPES[self.tensor.dtype]

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm's constants. weight and bias: [size] float32, any constant offset already added, or None."""

    kind: Literal["rms", "layer"]
    eps: float
    weight: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Rotary:
    """cos and sin: [max positions, half] float32; dimensions i and i + half of a head are rotated together."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, eq=False)
class LayerCache:
    """One layer's keys and values, each [num_blocks, num_kv_heads, block_size, head_dim].

    A program keeps a block's rows of a head in the order of `layout`: nothing else reads them, and blocks stay whole.
    """

    keys: Tensor
    values: Tensor
    scales: CacheScales | None = None
    slots_offset: int = 0
    """Where this layer's slots begin in the step's, in elements: layers of one group share slots and block tables."""
    tables_offset: int = 0
    """The same of its block tables."""

    @property
    def layout(self) -> int:
        return best_layout(self.keys.shape[2], self.keys.shape[3])


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """Norms apply to each head before rotation."""

    num_heads: int
    cache: LayerCache
    scale: float
    rotary: Rotary | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    """[num_heads] float32: of each head the score of a key that is not there."""
    alibi: Tensor | None = None
    """[num_heads] float32: what a score loses for each token between the two."""


def rotary_args(qkv: Buffer, layer: AttentionLayer) -> RotaryArgs:
    """What a layer's attention knows of queries, keys and values. Raises ValueError for what does not fit."""
    cache = describe_cache(layer.cache.keys, layer.cache.values, layer.cache.scales, layer.cache.layout)
    cache.slots_offset, cache.tables_offset = layer.cache.slots_offset, layer.cache.tables_offset
    head_dim, num_kv_heads = cache.head_dim, cache.num_kv_heads
    if layer.num_heads % num_kv_heads:
        raise ValueError(f"{layer.num_heads} query heads cannot share {num_kv_heads} KV heads evenly.")
    width = (layer.num_heads + 2 * num_kv_heads) * head_dim
    require_same(qkv.columns, width, "the query, key and value buffer's columns", "its heads'")
    norms = [norm for norm in (layer.query_norm, layer.key_norm) if norm is not None]
    for norm in norms:
        check_vector(norm.weight, head_dim, "a query or key norm's weight")
        if norm.kind != "rms" or norm.weight is None or norm.bias is not None or norm.eps != norms[0].eps:
            raise ValueError("the norms of queries and keys are RMS norms with weights and one eps.")
    head_bytes = head_dim * qkv.tensor.itemsize
    args = RotaryArgs(
        query=qkv.address,
        key=qkv.address + layer.num_heads * head_bytes,
        value=qkv.address + (layer.num_heads + num_kv_heads) * head_bytes,
        query_stride=qkv.stride,
        key_stride=qkv.stride,
        value_stride=qkv.stride,
        query_norm=address_of(layer.query_norm.weight) if layer.query_norm else None,
        key_norm=address_of(layer.key_norm.weight) if layer.key_norm else None,
        norm_eps=norms[0].eps if norms else 0.0,
        num_heads=layer.num_heads,
        type=qkv.type,
        fuse_decode=1,
        cache=cache,
    )
    if layer.rotary is not None:
        check_tables(layer.rotary)
        cos, sin = layer.rotary.cos, layer.rotary.sin
        if 2 * cos.shape[1] > head_dim:
            raise ValueError(f"rotation of {2 * cos.shape[1]} dimensions does not fit heads of {head_dim}.")
        args.cos, args.sin, args.rotary_half = cos.data_ptr(), sin.data_ptr(), cos.shape[1]
    return args


def check_tables(rotary: Rotary) -> None:
    for table in (rotary.cos, rotary.sin):
        if table.dtype != torch.float32 or not table.is_contiguous() or table.shape != rotary.cos.shape:
            raise ValueError("cos and sin are contiguous float32 tables of one shape, [positions, half].")


def with_own_copies(args: ctypes.Structure, name: str, buffer: Buffer) -> ctypes.Structure | None:
    """The same arguments, with each thread's own copy of the buffer at `name`; None where it has none."""
    if buffer.copies is None:
        return None
    few = type(args).from_buffer_copy(args)
    setattr(few, name, buffer.copies.data_ptr())
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
    return None if tensor is None else tensor.data_ptr()


def matrix_of(table: Tensor) -> tuple[int, int, int]:
    if table.dtype not in DTYPES or table.dim() != 2 or table.stride(1) != 1:
        raise ValueError(f"a table is [rows, columns] in fp32, bf16 or fp16, not {table.dtype} {list(table.shape)}.")
    return table.data_ptr(), table.stride(0), DTYPES[table.dtype]
