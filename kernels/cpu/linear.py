"""Linear layers over packed weights: y = x W^T + b, in bf16, fp16, fp32 and the GGUF block types.

`pack` turns a weight into the kernels' own layout (see linear.h), after which the original can be freed. The type a
weight is stored in decides how it multiplies:

- fp32, fp16: products and sums in fp32. |error| <= (K + 2) 2^-24 sum_k |x_k w_k|, for fp32 or fp16 x.
- bf16: x is rounded to bf16 (exact for bf16 x), products are exact, sums in fp32; the same bound over the rounded x.
- quantised: each block of 32 of x becomes int8 with step d = max|x| / 127, block sums are exact integers, and are
  scaled and added in fp32. |error| <= sum_blocks d / 2 sum_k |w_k| + (K / 8 + 8) 2^-24 sum_k (|x_k| + d) (|w_k| + m),
  where w is the exact dequantisation and m the block's offset (its minimum or its step times the stored bias).

The rounding of the result to the output's type comes on top. A row's result is the same to the bit whatever the
number of rows, its place among them and the number of threads; `reference` is the same product in torch.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import build
from .threads import Pool

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLOAT_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
ACTIVATIONS = {"none": 0, "silu": 1, "gelu_tanh": 2, "gelu": 3, "relu": 4}
ROWS_FIXED, ROWS_TOKENS, ROWS_LOGITS, ROWS_SEQS = range(4)
HUGE_PAGE_BYTES = 2 << 20


@dataclass(frozen=True)
class WeightType:
    """A storage type: its number in linear.h, and weights and bytes of a block as GGUF stores it."""

    number: int
    block_size: int
    block_bytes: int

    @property
    def quantised(self) -> bool:
        return self.block_size > 1


WEIGHT_TYPES = {
    "F32": WeightType(0, 1, 4),
    "BF16": WeightType(1, 1, 2),
    "F16": WeightType(2, 1, 2),
    "Q4_0": WeightType(3, 32, 18),
    "Q4_1": WeightType(4, 32, 20),
    "Q5_0": WeightType(5, 32, 22),
    "Q5_1": WeightType(6, 32, 24),
    "Q8_0": WeightType(7, 32, 34),
    "Q4_K": WeightType(8, 256, 144),
    "Q5_K": WeightType(9, 256, 176),
    "Q6_K": WeightType(10, 256, 210),
}


class PackedWeightC(ctypes.Structure):
    """Mirror of `PackedWeight` in linear.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("fan", ctypes.c_int32),
    )


class LinearArgs(ctypes.Structure):
    """Mirror of `LinearArgs` in linear.h: the arguments of `hr_op_linear`."""

    _fields_ = (
        ("weight", PackedWeightC),
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("x_thread_stride", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("residual_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("x_dtype", ctypes.c_int32),
        ("residual_dtype", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("from_logits", ctypes.c_int32),
        ("fixed_rows", ctypes.c_int64),
    )


class PackArgs(ctypes.Structure):
    """Mirror of `PackArgs` in linear.cpp: the arguments of `hr_op_pack`."""

    _fields_ = (
        ("weight", PackedWeightC),
        ("source", ctypes.c_void_p),
        ("source_stride", ctypes.c_int64),
        ("packed", ctypes.c_void_p),
        ("source_dtype", ctypes.c_int32),
    )


class EmbedArgs(ctypes.Structure):
    """Mirror of `EmbedArgs` in linear.cpp: the arguments of `hr_op_embed`, which needs 4 k bytes of thread scratch."""

    _fields_ = (
        ("weight", PackedWeightC),
        ("ids", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("out_dtype", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("fixed_rows", ctypes.c_int64),
        ("scale", ctypes.c_float),
    )


class ScratchNeed(ctypes.Structure):
    """Mirror of `ScratchNeed` in linear.h."""

    _fields_ = (("shared_bytes", ctypes.c_int64), ("per_thread_bytes", ctypes.c_int64))


def why_not(type_name: str, n: int, k: int, *, gated: bool = False, level: str = "native") -> str | None:
    """Why a weight [n, k] cannot be packed here, in a sentence, or None when it can."""
    if type_name not in WEIGHT_TYPES:
        return f"weights of type {type_name} are not supported; there are {', '.join(WEIGHT_TYPES)}."
    if n < 1 or k < 1:
        return f"a weight of [{n}, {k}] is empty."
    block = WEIGHT_TYPES[type_name].block_size
    if k % block != 0:
        return f"{type_name} stores blocks of {block} weights, and rows of {k} are not a multiple of that."
    if gated and n % 2 != 0:
        return f"a gated pair needs as many gate rows as up rows, and {n} rows cannot be halved."
    return build.why_not(level)


@dataclass
class Arena:
    """Memory for packed weights, in chunks aligned to huge pages. A chunk lives as long as something packed in it."""

    chunk_bytes: int = 64 << 20
    _chunk: mmap.mmap | None = None
    _base: int = 0
    _used: int = 0
    _size: int = 0

    def take(self, num_bytes: int) -> tuple[mmap.mmap, int]:
        """`num_bytes` of zeroed, 64-byte aligned memory: the chunk that keeps it alive, and its address."""
        num_bytes = -(-num_bytes // 64) * 64
        if self._chunk is None or self._used + num_bytes > self._size:
            self._size = max(self.chunk_bytes, num_bytes)
            self._chunk = mmap.mmap(-1, self._size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            start = ctypes.addressof(ctypes.c_char.from_buffer(self._chunk))
            self._base = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            self._used = 0
            if hasattr(mmap, "MADV_HUGEPAGE") and num_bytes >= HUGE_PAGE_BYTES // 2:
                self._chunk.madvise(mmap.MADV_HUGEPAGE)
        address = self._base + self._used
        self._used += num_bytes
        return self._chunk, address


@dataclass(frozen=True)
class Runtime:
    """A library with the pool that runs its ops."""

    library: build.Library
    pool: Pool


@functools.cache
def runtime(level: str = "native", num_threads: int | None = None) -> Runtime:
    """The runtime of this process for a level and a number of threads. Raises RuntimeError where there is none."""
    library = build.load(level)
    if library is None:
        raise RuntimeError(f"The CPU kernels cannot be used: {build.why_not(level)}")
    dll = library.dll
    dll.hr_linear_bytes.restype = ctypes.c_int64
    dll.hr_linear_bytes.argtypes = [ctypes.c_void_p]
    dll.hr_linear_scratch.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]
    return Runtime(library, Pool(library, num_threads))


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
    memory: mmap.mmap = field(repr=False)

    @property
    def columns(self) -> int:
        """Columns of the output: n, or n / 2 of a gated pair."""
        return self.n // 2 if self.gated else self.n

    def scratch(self, max_rows: int) -> tuple[int, int]:
        """(shared bytes, bytes per thread) that the pool must have reserved to run `max_rows` rows."""
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
        """act(x W^T + bias) + residual, of a gated pair act(x Wg^T + bg) * (x Wu^T + bu) + residual: [..., columns].

        Without `out` the result has x's type, or `out_dtype`. Raises ValueError for shapes or types that do not fit.
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
            x=rows.data_ptr(),
            x_stride=rows.stride(0),
            bias=None if bias_f32 is None else bias_f32.data_ptr(),
            residual=None if added is None else added.data_ptr(),
            residual_stride=0 if added is None else added.stride(0),
            out=to.data_ptr(),
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
        """W[ids] * scale: [*ids.shape, k], of exactly dequantised rows. Raises ValueError for an id outside [0, n)."""
        flat = ids.reshape(-1).to(torch.int32).contiguous()  # [rows]
        if flat.numel():
            least, most = int(flat.min()), int(flat.max())
            if least < 0 or most >= self.n:
                raise ValueError(f"an id is outside [0, {self.n}): the ids go from {least} to {most}.")
        out = torch.empty(flat.numel(), self.k, dtype=dtype)
        self.runtime.pool.reserve(0, 4 * self.k)
        args = EmbedArgs(
            weight=self.descriptor,
            ids=flat.data_ptr(),
            out=out.data_ptr(),
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
    weight: Tensor | tuple[str, Tensor],
    *,
    gated: bool = False,
    arena: Arena | None = None,
    runtime_: Runtime | None = None,
) -> PackedLinear:
    """A weight in packed form; the original is not referred to any more.

    weight: [n, k] fp32, bf16 or fp16, kept in its type; or (GGUF type name, [n, bytes of a row] uint8).
    gated: rows [0, n/2) are the gate projection and [n/2, n) the up projection of a gated pair.
    Raises ValueError where `why_not` has a reason.
    """
    if isinstance(weight, tuple):
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
    if reason is not None:
        raise ValueError(f"The weight cannot be packed: {reason}")
    used = runtime_ or runtime()
    if source.stride(1) != 1:
        source = source.contiguous()
    descriptor = PackedWeightC(n=n, k=k, type=WEIGHT_TYPES[type_name].number, fan=2 if gated else 1)
    nbytes = used.library.dll.hr_linear_bytes(ctypes.byref(descriptor))
    memory, address = (arena or Arena(chunk_bytes=0)).take(nbytes)
    descriptor.data = address
    args = PackArgs(
        weight=descriptor,
        source=source.data_ptr(),
        source_stride=source.stride(0),
        packed=address,
        source_dtype=DTYPES.get(source.dtype, 0),
    )
    used.pool.run_op("hr_op_pack", args)
    return PackedLinear(type_name, n, k, gated, descriptor, nbytes, used, memory)


def reference(
    x: Tensor,  # [..., k]
    weight: Tensor,  # [n, k], dequantised
    bias: Tensor | None = None,  # [n]
    *,
    gated: bool = False,
    activation: str = "none",
    residual: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The same product in torch, computed in `dtype`; bf16 weights meet x rounded to bf16, as in the kernels."""
    if weight.dtype == torch.bfloat16:
        x = x.to(torch.bfloat16)
    y = torch.nn.functional.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    functions = {
        "none": lambda value: value,
        "silu": torch.nn.functional.silu,
        "gelu_tanh": lambda value: torch.nn.functional.gelu(value, approximate="tanh"),
        "gelu": torch.nn.functional.gelu,
        "relu": torch.relu,
    }
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = functions[activation](gate) * up
    else:
        y = functions[activation](y)
    return y if residual is None else y + residual.to(dtype)


def dequantise(type_name: str, rows: Tensor) -> Tensor:
    """GGUF rows [n, bytes] uint8 as [n, k] fp32, by the gguf package."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType[type_name]))


def cat_rows(parts: Sequence[Tensor]) -> Tensor:
    """Weights over the same input as one, row under row: projections that share x then share one op."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))


def _k_of_rows(type_name: str, rows: Tensor) -> int:
    kind = WEIGHT_TYPES.get(type_name)
    if kind is None or not kind.quantised:
        names = ", ".join(name for name, each in WEIGHT_TYPES.items() if each.quantised)
        raise ValueError(f"blocks of type {type_name} are not supported; there are {names}.")
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] % kind.block_bytes != 0:
        raise ValueError(
            f"{type_name} rows are [n, multiple of {kind.block_bytes}] uint8; these are {rows.dtype} {list(rows.shape)}."
        )
    return rows.shape[1] // kind.block_bytes * kind.block_size


def _rows(tensor: Tensor, columns: int, name: str, *, copy: bool = True) -> Tensor:
    """`tensor` as [rows, columns] with unit stride along a row; a view where that is possible."""
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
