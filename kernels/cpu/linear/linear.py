"""Linear layers over packed weights: y = x W^T + b, in bf16, fp16, fp32, the GGUF block types and group scales.

`pack` copies a weight into the kernels' own layout (see linear.h), after which the original can be freed. The storage
type of a weight determines the arithmetic and the error bound:

- fp32, fp16: products and sums in fp32. |error| <= (K + 2) 2^-24 sum_k |x_k w_k|, for fp32 or fp16 x.
- bf16: x is rounded to bf16 (exact for bf16 x), products are exact, sums in fp32; the same bound over the rounded x.
- quantised: each block of 32 of x becomes two int8 parts with step d = max|x| / 32512, block sums are exact integers,
  and are scaled and added in fp32.
  |error| <= sum_blocks d sum_k |w_k| + (K / 8 + 8) 2^-24 sum_k (|x_k| + d) (|w_k| + m),
  where w is the exact dequantisation and m the block's offset (its minimum or its step times the stored bias).

- group scales (`GroupedWeight`): integers as quantised, with m = |scale * zero|; codes of float4 and e4m3 are
  expanded exactly and multiplied by x in fp32: |error| <= (K + 4) 2^-24 sum_k |x_k w_k|.
- integers with int8 inputs (`InputRounding`): sums of a group are exact, and
  |error| <= (K / group + 6) 2^-24 sum_k (|x_k| + |zero| d) (|w_k| + m), over the rounded x, with its scale d, and with
  m as above if the weight has zero points, else 0.

Rounding the result to the output's type adds to the error. A row's result is bitwise independent of the number of
rows, its place among them and the number of threads. reference.py has the same product in torch.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace.kernels.cpu import build, units
from headrace.kernels.cpu.linear.args import (
    ACTIVATIONS,
    DTYPES,
    FLOAT_TYPES,
    GROUPED_TYPES,
    NO_ZEROS,
    ROUNDS_GROUPS,
    ROUNDS_SHIFTED_TOKEN,
    ROUNDS_STATIC,
    ROUNDS_TOKEN,
    ROWS_FIXED,
    ROWS_LOGITS,
    ROWS_SEQS,
    ROWS_TOKENS,
    WEIGHT_TYPES,
    EmbedArgs,
    GroupSourceC,
    LinearArgs,
    PackArgs,
    PackedWeightC,
    ScratchNeed,
    WeightType,
)
from headrace.kernels.cpu.linear.reference import dequantise, quantise, quantise_wide, reference
from headrace.kernels.cpu.runtime.pointers import pointer
from headrace.kernels.cpu.runtime.threads import ThreadPool
from headrace.kernels.grouped import GroupedWeight
from headrace.kernels.registry import Version

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "GROUPED_TYPES",
    "ROWS_FIXED",
    "ROWS_LOGITS",
    "ROWS_SEQS",
    "ROWS_TOKENS",
    "VERSIONS",
    "WEIGHT_TYPES",
    "Arena",
    "EmbedArgs",
    "LinearArgs",
    "PackArgs",
    "PackedLayer",
    "PackedLinear",
    "Runtime",
    "WeightType",
    "dequantise",
    "pack",
    "quantise",
    "quantise_wide",
    "reference",
    "runtime",
    "tiles_of",
    "why_not",
]  # fmt: skip

HUGE_PAGE_BYTES = 2 << 20
SPARE_CHUNKS = 32
"""Most memory, of HUGE_PAGE_BYTES each, that is kept when adapters leave."""


def why_not(type_name: str, n: int, k: int, *, gated: bool = False, level: str = "native") -> str | None:
    """The reason why a weight [n, k] cannot be packed on this machine, in a sentence; None if it can."""
    kind = WEIGHT_TYPES.get(type_name) or GROUPED_TYPES.get(type_name)
    if kind is None:
        return f"weights of type {type_name} are not supported; there are {', '.join(WEIGHT_TYPES)}."
    if n < 1 or k < 1:
        return f"a weight of [{n}, {k}] is empty."
    block = kind.block_size
    if k % block != 0:
        return f"{type_name} stores blocks of {block} weights, and rows of {k} are not a multiple of that."
    if gated and n % 2 != 0:
        return f"a gated pair needs as many gate rows as up rows, and {n} rows cannot be halved."
    part = library_part(type_name)
    return build.why_not(level) or (None if part == units.CORE else build.why_not(level, part))


def library_part(type_name: str) -> str:
    """The library of `build` that has the kernels for weights of a type."""
    if type_name in GROUPED_TYPES:
        return units.GROUPED
    return units.PACKED if WEIGHT_TYPES[type_name].quantised else units.CORE


class Chunk:
    """Memory of an arena, which lives as long as this object."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


@dataclass
class Arena:
    """Memory for packed weights, in chunks of huge pages. A chunk lives as long as any weight packed in it."""

    chunk_bytes: int = 64 << 20
    most_spare: int = 0
    """Chunks in which nothing is packed any more that are kept for what comes: the system may take milliseconds to find
    a huge page."""
    _chunk: Chunk | None = None
    _used: int = 0
    _size: int = 0
    _spare: deque[mmap.mmap] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, num_bytes: int) -> tuple[Chunk, int]:
        """Allocates `num_bytes` of zeroed, 64-byte aligned memory: the chunk that keeps it alive, and its address."""
        num_bytes = -(-num_bytes // 64) * 64
        with self._lock:
            if self._chunk is None or self._used + num_bytes > self._size:
                # Whole huge pages; later weights fill up the last one.
                self._size = max(self.chunk_bytes, -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)
                self._chunk, self._used = self._new_chunk(self._size), 0
            address = self._chunk.address + self._used
            self._used += num_bytes
            return self._chunk, address

    def _new_chunk(self, size: int) -> Chunk:
        memory = self._spare.pop() if size == self.chunk_bytes and self._spare else None
        if memory is not None:
            chunk = Chunk(memory)
            ctypes.memset(chunk.address, 0, size)
        else:
            memory = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            chunk = Chunk(memory)
        if self.most_spare and size == self.chunk_bytes:
            weakref.finalize(chunk, self._keep, memory).atexit = False
        return chunk

    def _keep(self, memory: mmap.mmap) -> None:
        """Without the lock, since any allocation may end a chunk's life."""
        if len(self._spare) < self.most_spare:
            self._spare.append(memory)


@dataclass(frozen=True)
class Runtime:
    """A library, the pool that runs its ops, and the memory for packed weights and for adapters."""

    library: build.Library
    pool: ThreadPool
    arena: Arena = field(default_factory=Arena)
    adapter_arena: Arena = field(default_factory=lambda: Arena(HUGE_PAGE_BYTES, SPARE_CHUNKS))
    """Of small chunks, as adapters come and go. What a step reads of one lies together."""


@functools.cache
def runtime(level: str = "native", num_threads: int | None = None) -> Runtime:
    """This process's runtime for a level and number of threads. Raises RuntimeError if the kernels cannot be built."""
    library = build.load(level)
    if library is None:
        raise RuntimeError(f"The CPU kernels cannot be used: {build.why_not(level)}")
    dll = library.dll
    dll.hr_linear_bytes.restype = ctypes.c_int64
    dll.hr_linear_bytes.argtypes = [ctypes.c_void_p]
    dll.hr_linear_scratch.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    dll.hr_stream_weights(dll.hr_streams_well())
    return Runtime(library, ThreadPool(library, num_threads))


@dataclass(frozen=True)
class PackedLinear:
    """A weight [n, k] in packed form, owning its memory. `descriptor` goes into the args of a program's ops."""

    type_name: str
    n: int
    k: int
    gated: bool
    descriptor: PackedWeightC
    nbytes: int
    runtime: Runtime
    chunk: Chunk = field(repr=False)
    order: Tensor | None = field(default=None, repr=False)
    """[k] int32: `GroupedWeight.order`, which `descriptor` points to."""

    @property
    def dtype(self) -> torch.dtype:
        """The stored type of a float weight; fp32 for quantised weights."""
        return next((dtype for dtype, name in FLOAT_TYPES.items() if name == self.type_name), torch.float32)

    @property
    def columns(self) -> int:
        """Columns of the output: n, or n / 2 for a gated pair."""
        return self.n // 2 if self.gated else self.n

    @property
    def packed(self) -> Tensor:
        """[nbytes] uint8: the packed weight's memory. Another weight of the same `layout` may be copied into it."""
        memory = self.chunk.memory
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        offset = self.descriptor.data - start
        return torch.frombuffer(memory, dtype=torch.uint8, count=self.nbytes, offset=offset)

    @property
    def layout(self) -> tuple[int, ...]:
        """Describes the format of `packed`: two weights with equal layouts pack in the same way."""
        descriptor = self.descriptor
        shape = self.nbytes, descriptor.n, descriptor.k, descriptor.type, descriptor.fan
        return (*shape, descriptor.group, descriptor.scale_type, descriptor.zero_type, descriptor.rounding)

    def scratch(self, max_rows: int) -> tuple[int, int]:
        """The scratch to reserve in the pool for up to `max_rows` rows: (shared bytes, bytes per thread)."""
        need = ScratchNeed()
        self.runtime.library.dll.hr_linear_scratch(ctypes.byref(self.descriptor), max_rows, ctypes.byref(need))
        return need.shared_bytes, need.per_thread_bytes

    def apply(
        self,
        x: Tensor,  # [..., k] fp32, bf16 or fp16
        bias: Tensor | None = None,  # [n]
        out: Tensor | None = None,  # [..., columns] fp32, bf16 or fp16; rows may be strided
        *,
        residual: Tensor | None = None,  # [..., columns], added to the result; may be `out` itself
        activation: str = "none",
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """act(x W^T + bias) + residual; for a gated pair act(x Wg^T + bg) * (x Wu^T + bu) + residual: [..., columns].

        Without `out` the result has `out_dtype`, by default x's type. Raises ValueError for wrong shapes or types.
        """
        rows = _rows(x, self.k, "x")
        if out is None:
            out = torch.empty(*x.shape[:-1], self.columns, dtype=out_dtype or x.dtype)
        to = _rows(out, self.columns, "out", copy=False)
        added = None if residual is None else _rows(residual, self.columns, "residual")
        if bias is not None and bias.shape != (self.n,):
            raise ValueError(f"bias has shape {list(bias.shape)}; a weight of {self.n} rows needs [{self.n}].")
        for name, tensor in (("out", to), ("residual", added)):
            if tensor is not None and tensor.shape[0] != rows.shape[0]:
                raise ValueError(f"{name} has {tensor.shape[0]} rows and x has {rows.shape[0]}; they must be equal.")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation {activation!r} is unknown; there are {', '.join(ACTIVATIONS)}.")
        bias_f32 = None if bias is None else bias.to(torch.float32).contiguous()
        self.runtime.pool.reserve(*self.scratch(rows.shape[0]))
        args = LinearArgs(
            weight=self.descriptor,
            x=pointer(rows),
            x_stride=rows.stride(0),
            bias=None if bias_f32 is None else pointer(bias_f32),
            residual=None if added is None else pointer(added),
            residual_stride=0 if added is None else added.stride(0),
            out=pointer(to),
            out_stride=to.stride(0),
            x_dtype=DTYPES[rows.dtype],
            residual_dtype=0 if added is None else DTYPES[added.dtype],
            out_dtype=DTYPES[to.dtype],
            activation=ACTIVATIONS[activation],
            rows=ROWS_FIXED,
            fixed_rows=rows.shape[0],
        )
        self.runtime.pool.run_op("hr_op_linear", args)
        return out

    def look_up(self, ids: Tensor, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """W[ids] * scale with exactly dequantised rows: [*ids.shape, k]. Raises ValueError for an id outside [0, n)."""
        flat = ids.reshape(-1).to(torch.int32).contiguous()  # [rows]
        if flat.numel():
            least, most = int(flat.min()), int(flat.max())
            if least < 0 or most >= self.n:
                raise ValueError(f"an id is outside [0, {self.n}): the ids go from {least} to {most}.")
        out = torch.empty(flat.numel(), self.k, dtype=dtype)
        self.runtime.pool.reserve(0, 4 * self.k)
        args = EmbedArgs(
            weight=self.descriptor,
            ids=pointer(flat),
            out=pointer(out),
            out_stride=self.k,
            out_dtype=DTYPES[dtype],
            rows=ROWS_FIXED,
            fixed_rows=flat.numel(),
            scale=scale,
        )
        self.runtime.pool.run_op("hr_op_embed", args)
        return out.reshape(*ids.shape, self.k)

    def unpack(self) -> Tensor:
        """The whole weight, exactly dequantised: [n, k] fp32."""
        return self.look_up(torch.arange(self.n))


def pack(
    weight: Tensor | tuple[str, Tensor] | GroupedWeight,
    *,
    gated: bool = False,
    arena: Arena | None = None,
    runtime_: Runtime | None = None,
) -> PackedLinear:
    """Packs a weight. The result holds no reference to the original.

    weight: [n, k] fp32, bf16 or fp16, stored in the same type; (GGUF type name, [n, bytes of a row] uint8); or codes
    with group scales.
    gated: rows [0, n/2) are the gate projection and [n/2, n) the up projection of a gated pair.
    Raises ValueError if `why_not` or `why_not_group` has a reason.
    """
    source: Tensor
    type_name: str
    if isinstance(weight, GroupedWeight):
        type_name, source, k = weight.kind, weight.codes, weight.shape[1]
    elif isinstance(weight, tuple):
        type_name, source = weight
        k = _k_of_rows(type_name, source)
    else:
        source = weight
        if source.dtype not in FLOAT_TYPES or source.dim() != 2:
            raise ValueError(f"a weight is [n, k] fp32, bf16 or fp16; this one is {source.dtype} {list(source.shape)}.")
        type_name, k = FLOAT_TYPES[source.dtype], source.shape[1]
    n = source.shape[0]
    level = runtime_.library.level if runtime_ else "native"
    reason = why_not(type_name, n, k, gated=gated, level=level)
    if reason is None and isinstance(weight, GroupedWeight):
        reason = why_not_group(weight.kind, weight.group)
    if reason is not None:
        raise ValueError(f"The weight cannot be packed: {reason}")
    used = runtime_ or runtime()
    if source.stride(1) != 1:
        source = source.contiguous()
    kind = _kind(type_name)
    descriptor = PackedWeightC(n=n, k=k, type=kind.number, fan=2 if gated else 1)
    order: Tensor | None = None
    groups = GroupSourceC()
    kept: tuple[object, ...] = ()
    if isinstance(weight, GroupedWeight):
        order = None if weight.order is None else weight.order.to(torch.int32).contiguous()
        groups, kept = _describe_groups(weight, source, descriptor, order)
        _describe_inputs(weight, descriptor)
    descriptor.tiles = tiles_of(used.library, type_name, rounded=descriptor.rounding > 0)
    nbytes = used.library.dll.hr_linear_bytes(ctypes.byref(descriptor))
    chunk, address = (arena or used.arena).take(nbytes)
    descriptor.data = address
    args = PackArgs(
        weight=descriptor,
        source=pointer(source),
        source_stride=source.stride(0),
        packed=address,
        source_dtype=DTYPES.get(source.dtype, 0),
        groups=groups,
    )
    used.pool.run_op("hr_op_pack", args)
    del kept
    return PackedLinear(type_name, n, k, gated, descriptor, nbytes, used, chunk, order)


def why_not_group(kind: str, group: int) -> str | None:
    """The reason why the kernels do not support groups of this size, in a sentence; None if they do."""
    if group % 32 == 0 or (group == 16 and kind in ("float4", "e4m3")):
        return None
    return f"the kernels take {kind} in groups of multiples of 32 weights{_OR_16.get(kind, '')}, not of {group}."


_OR_16 = {"float4": " or of 16", "e4m3": " or of 16"}


def _describe_groups(
    weight: GroupedWeight, codes: Tensor, descriptor: PackedWeightC, order: Tensor | None
) -> tuple[GroupSourceC, tuple[object, ...]]:
    """Completes the descriptor. Returns the source to pack from, and objects that must live until it is packed."""
    scales, zeros = weight.scales.contiguous(), None if weight.zeros is None else weight.zeros.contiguous()
    table = (ctypes.c_float * 16)(*weight.table) if weight.table else None
    descriptor.order = None if order is None else pointer(order)
    descriptor.group = weight.group
    descriptor.scale_type = DTYPES[scales.dtype]
    descriptor.zero_type = NO_ZEROS if zeros is None else DTYPES[zeros.dtype]
    source = GroupSourceC(
        codes=pointer(codes),
        stride=codes.stride(0),
        scales=pointer(scales),
        zeros=None if zeros is None else pointer(zeros),
        table=None if table is None else ctypes.addressof(table),
    )
    return source, (scales, zeros, table)


def rounds_inputs(weight: GroupedWeight) -> bool:
    """Whether the kernels round the inputs to int8 as the checkpoint asks; otherwise they keep 16 bits."""
    return weight.inputs is not None and weight.kind in ("int4", "int8") and weight.group <= MOST_EXACT


MOST_EXACT = 1 << 16
"""The number of int8 products whose sum always fits 32 bits."""


def _describe_inputs(weight: GroupedWeight, descriptor: PackedWeightC) -> None:
    inputs = weight.inputs
    if inputs is None or not rounds_inputs(weight):
        return
    if inputs.group is not None:
        descriptor.rounding = ROUNDS_GROUPS
    elif inputs.scale is None:
        descriptor.rounding = ROUNDS_SHIFTED_TOKEN if inputs.shifted else ROUNDS_TOKEN
    else:
        descriptor.rounding = ROUNDS_STATIC
        descriptor.input_scale, descriptor.input_zero = inputs.scale, inputs.zero


@dataclass(frozen=True)
class PackedLayer:
    """A packed weight with its bias: the `LinearWeight` of this version of the op `linear`."""

    weight: PackedLinear
    bias: Tensor | None  # [n] float32

    def apply(self, x: Tensor) -> Tensor:
        """x [..., k] -> [..., n] in x's dtype."""
        return self.weight.apply(x, self.bias)

    def look_up(self, ids: Tensor) -> Tensor:
        """Exact rows of the weight, [*ids.shape, k] in `PackedLinear.dtype`."""
        return self.weight.look_up(ids, self.weight.dtype)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (self.bias.nbytes if self.bias is not None else 0)


def _pack_layer(weight: Tensor, bias: Tensor | None) -> PackedLayer:
    return PackedLayer(pack(weight), None if bias is None else bias.to(torch.float32).contiguous())


def _why_no_layer(device: torch.device | None = None, dtype: torch.dtype | None = None, **facts: Any) -> str:
    if device is not None and device.type != "cpu":
        return f"it runs on a CPU, and the weight is on {device}."
    if dtype is None or dtype not in FLOAT_TYPES:
        return f"it multiplies in fp32, bf16 or fp16, and the weight is {dtype}."
    n, k = facts.get("shape", (1, 1))
    return why_not(FLOAT_TYPES[dtype], n, k) or ""


VERSIONS = (Version("linear", "cpu_packed", _pack_layer, _why_no_layer),)


@functools.cache
def tiles_of(core: build.Library, type_name: str, *, rounded: bool = False) -> int:
    """The address of the `Tiles` of a type. Their library exists: `why_not` was asked before."""
    part = library_part(type_name)
    library = core if part == units.CORE else build.load(core.level, part)
    assert library is not None
    library.dll.hr_stream_weights(core.dll.hr_streams_well())
    find = library.dll.hr_tiles
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_int32, ctypes.c_bool]
    return int(find(_kind(type_name).number, rounded))


def _kind(type_name: str) -> WeightType:
    return GROUPED_TYPES[type_name] if type_name in GROUPED_TYPES else WEIGHT_TYPES[type_name]


def _k_of_rows(type_name: str, rows: Tensor) -> int:
    kind = WEIGHT_TYPES.get(type_name)
    if kind is None or not kind.quantised:
        names = ", ".join(name for name, each in WEIGHT_TYPES.items() if each.quantised)
        raise ValueError(f"blocks of type {type_name} are not supported; there are {names}.")
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] % kind.block_bytes != 0:
        raise ValueError(
            f"{type_name} rows are uint8 [n, multiple of {kind.block_bytes}]; here: {rows.dtype} {list(rows.shape)}."
        )
    return rows.shape[1] // kind.block_bytes * kind.block_size


def _rows(tensor: Tensor, columns: int, name: str, *, copy: bool = True) -> Tensor:
    """`tensor` as [rows, columns] with unit stride along a row, as a view if possible."""
    if tensor.dtype not in DTYPES or tensor.dim() < 1 or tensor.shape[-1] != columns:
        raise ValueError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}; it must be fp32, bf16 or fp16 [..., {columns}]."
        )
    if tensor.dim() == 2 and (tensor.stride(1) == 1 or columns == 1):
        return tensor
    if not tensor.is_contiguous():
        if not copy:
            raise ValueError(f"{name} must be contiguous, or two-dimensional with unit stride along a row.")
        tensor = tensor.contiguous()
    return tensor.view(-1, columns)
