"""Reads a checkpoint's weights for the CPU program and packs them, one at a time, in the type that they are kept in."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

import numpy as np
import torch
from torch import Tensor

from headrace.core.options.adapters import AdapterLimits
from headrace.executor.checkpoints.formats.as_loaded import finite
from headrace.executor.checkpoints.weights import StoredTensor, WeightSource, dtype_name
from headrace.executor.models import blocks
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.blocks import Axis, Linear, Role, size_of
from headrace.executor.models.reading import CheckedWeights, Part, own_part
from headrace.executor.models.sizes import model_weights
from headrace.executor.parallel.padding import grouped_part, packed_part
from headrace.executor.parallel.rank_place import SINGLE, RankCoordinates
from headrace.ipc.process.resources import give_back_freed_memory
from headrace.kernels.cpu.facade import (
    FLOAT_TYPES,
    GROUPED_TYPES,
    WEIGHT_TYPES,
    Arena,
    DeltaTable,
    EmbeddingTable,
    ExpertDeltas,
    Norm,
    PackedDelta,
    PackedExperts,
    PackedLinear,
    Runtime,
    dequantise,
    pack,
    quantise,
    quantise_wide,
    why_no_experts,
    why_not_group,
)
from headrace.kernels.grouped import GroupedWeight, InputRounding, fit_half, joined
from headrace.kernels.low_rank import LowRank

logger = logging.getLogger(__name__)

Stored = Tensor | tuple[str, Tensor] | GroupedWeight
"""A matrix: floats [rows, columns]; a GGUF type and [rows, bytes of a row] uint8; or codes with group scales."""

OUTER_BITS = 8
"""Bits of the quantised embedding and head: their errors reach every token undiminished."""
GIVE_BACK_EVERY_BYTES = 16 << 20
"""Bytes of packed weights after which the memory that packing has freed is returned to the system. The C library keeps
freed pieces of up to 32 MB for reuse, and those between pieces in use can add up to a third of the packed weights."""
KERNEL_BLOCK = 32
"""Consecutive values of a row that kernels process together, whatever the size of a scale's group."""


@dataclass(frozen=True)
class Blocks:
    """How float weights are quantised as they are read."""

    bits: int
    """8 or 4, for the matrices of layers."""
    group_sizes: tuple[int, ...]
    """Of which a matrix has the first that divides its rows."""
    rounds_inputs: bool = False
    """The inputs of layers' matrices are rounded to 8 bits too, each token's in groups as those of the weights."""

    def group_of(self, columns: int) -> int | None:
        """The size of groups in rows of as many weights; None if none divides them."""
        return next((group for group in self.group_sizes if columns % group == 0), None)

    def bits_of(self, role: Role) -> int | None:
        """Bits for a weight of this role; None if it stays in floats."""
        if role in ("embedding", "head"):
            return OUTER_BITS
        return self.bits if role in ("matrix", "expert") else None


@dataclass(frozen=True)
class CpuLinear:
    """Matrices with the same input, whose outputs lie side by side; those of one type are packed as one weight."""

    weights: tuple[PackedLinear, ...]
    biases: tuple[Tensor | None, ...]  # each [rows of the weight] float32
    activation: str = "none"
    gated: bool = False
    """The first half of the results, after the activation, is multiplied by the second half."""
    deltas: CpuDeltas | None = None
    """None where adapters cannot change it."""

    @property
    def columns(self) -> int:
        """Columns of the output."""
        return sum(weight.columns for weight in self.weights)

    @property
    def gates_itself(self) -> bool:
        """Whether it is a single weight whose kernel multiplies the halves."""
        return self.weights[0].gated


@dataclass(frozen=True)
class CpuDeltas:
    """The adapters of a `CpuLinear`, by slot."""

    tables: tuple[DeltaTable, ...]
    """Of each of its weights."""
    first_rows: tuple[int, ...]
    """Of each of its weights, and their number."""

    @classmethod
    def of(cls, weights: Sequence[PackedLinear], limits: AdapterLimits) -> CpuDeltas:
        dtype = getattr(torch, limits.dtype)
        first_rows = tuple(accumulate((weight.n for weight in weights), initial=0))
        return cls(tuple(DeltaTable(weight, dtype, limits.slots) for weight in weights), first_rows)

    def pack(self, delta: LowRank) -> PackedDeltas:
        spans = zip(self.tables, pairwise(self.first_rows), strict=True)
        return PackedDeltas(tuple(table.pack(delta.of_rows(*span)) for table, span in spans))

    def put(self, slot: int, packed: PackedDeltas | None) -> None:
        for index, table in enumerate(self.tables):
            table.put(slot, None if packed is None else packed.parts[index])


@dataclass(frozen=True)
class PackedDeltas:
    """One adapter's part of a `CpuLinear`."""

    parts: tuple[PackedDelta | None, ...]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.parts if each is not None)


@dataclass(frozen=True)
class CpuNorm:
    """A `Norm`'s constants, and the number of columns that it norms."""

    constants: Norm
    columns: int


class CpuWeights(CheckedWeights):
    """Reads a source into packed weights. Raises ModelError, naming the weight, where source and config disagree.

    `keep_packed`: matrices keep the types that they are stored in, except bfloat16 where `dtype` is float32. Otherwise
    all matrices become `dtype` or, with `blocks`, are quantised one by one as they are read.
    """

    reader = "program_reader"

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype,
        runtime: Runtime,
        *,
        place: RankCoordinates = SINGLE,
        keep_packed: bool = False,
        blocks: Blocks | None = None,
    ) -> None:
        super().__init__(source, dtype, torch.device("cpu"), place)
        self._runtime = runtime
        self._arena = Arena()  # its own, so that its memory is freed with the model
        self._packed_bytes = 0
        """Since memory was last given back."""
        self._keeps_packed = keep_packed
        self._blocks = blocks
        self._unpacked_types: set[str] = set()
        self._undivided: set[str] = set()
        self._unquantised: set[str] = set()
        self._has_finer_inputs = False

    def norm(self, declared: blocks.Norm, prefix: str) -> CpuNorm:
        name, size, own = prefix + declared.name, size_of(declared.size), own_part(declared.size, self.place)
        columns = size if own is None else own.stop - own.start
        weight = bias = None
        if declared.affine:
            weight = self.vector(f"{name}.{declared.weight_name}", size, declared.weight_offset, own)
            bias = self.vector(f"{name}.bias", size, 0.0, own) if declared.bias else None
            weight, bias = weight * declared.scale, None if bias is None else bias * declared.scale
        return CpuNorm(Norm(declared.kind, declared.eps, weight, bias, declared.groups), columns)

    def linear(self, declared: Linear, prefix: str) -> CpuLinear:
        """Stacks its matrices by rows; those of a gated pair become one weight if their types are the same."""
        parts, columns, adds_bias = self.parts_of(declared, prefix)
        stored = [self._stored(part, size_of(declared.columns), columns, declared.role) for part in parts]
        biases = None
        if adds_bias:
            biases = [self.vector(f"{part.name}.bias", part.num_rows, take=part.rows) for part in parts]
        weights: list[PackedLinear] = []
        joined_biases: list[Tensor | None] = []
        first = 0
        while first < len(stored):
            last = first + 1
            while last < len(stored) and _go_together(stored[last], stored[first]):
                last += 1
            is_pair = declared.gated and last - first == 2
            weights.append(self.pack(_joined(stored[first:last]), gated=is_pair))
            joined_biases.append(torch.cat(biases[first:last]) if biases else None)
            first = last
        deltas = self._deltas(prefix + declared.matrices[0][0], weights)
        return CpuLinear(tuple(weights), tuple(joined_biases), declared.activation or "none", declared.gated, deltas)

    def experts(self, declared: blocks.ExpertStack, prefix: str) -> PackedExperts:
        """Packs each expert by itself, as stored; as floats where the stored types cannot be computed together."""
        hidden, inner, (experts, own) = declared.hidden, declared.inner.size, self.own_experts(declared, prefix)
        own_inner = inner if own is None else own.stop - own.start

        def stored(index: int) -> list[Stored]:
            rows = [Part(prefix + names[index], inner, own) for names in (declared.gates, declared.ups)]
            gate_up = [self._stored(part, hidden, None, "expert") for part in rows]
            return [*gate_up, self._stored(Part(prefix + declared.downs[index], hidden), inner, own, "expert")]

        first, rest = stored(experts[0]), experts[1:]
        # In floats all experts have one type, so the rest are read one by one. Stored types may differ: a layer's
        # experts are read together and compared.
        others: list[list[Stored]] | None = [stored(index) for index in rest] if self._keeps_packed else None
        kinds = tuple(map(_type_name, first))
        reason = why_no_experts(kinds, hidden, own_inner, declared.activation)
        if not all(_go_together(*pair) for each in (others or ()) for pair in zip(each, first, strict=True)):
            reason = "its experts differ in type"
        elif not _go_together(first[0], first[1]):
            reason = "an expert's gate and up projection are computed together, and are stored differently"
        elif any(isinstance(matrix, GroupedWeight) and matrix.order is not None for matrix in first):
            reason = "each expert has its inputs in an order of its own"
        if reason:
            logger.warning("the experts below %s are kept in %s: %s", prefix, dtype_name(self.dtype), reason)
        gate_ups, downs = [], []
        for each in chain((first,), map(stored, rest) if others is None else others):
            gate, up, down = (_floats(matrix, self.dtype) if reason else matrix for matrix in each)
            gate_ups.append(self.pack(_joined([gate, up]), gated=True))
            downs.append(self.pack(down, gated=False))
        biases = self.expert_biases(declared, prefix) if declared.bias else None
        places, loads = self.expert_places(declared)
        deltas = None
        if self.adapters is not None:
            deltas = ExpertDeltas.of(gate_ups[0], downs[0], self.slot_limits, None if loads is None else experts)
            self.adapter_tables[prefix + declared.gates[0]] = deltas
        packed = PackedExperts(
            tuple(gate_ups),
            tuple(downs),
            declared.activation,
            biases,
            places=places,
            loads=loads,
            deltas=deltas,
            factors=None if declared.factors is None else self.read(declared.factors, prefix),
        )
        if places is not None and loads is not None:
            self.note_balanced(packed, places, loads, deltas)
        return packed

    def table(self, part: Part, columns: int, role: Role = "embedding") -> PackedLinear:
        """A matrix of `columns` for embedding lookups, and for the head if that is tied to it."""
        return self.pack(self._stored(part, columns, None, role), gated=False)

    def head(self, part: Part, in_features: int, tied: PackedLinear | None, *, bias: bool) -> CpuLinear:
        """The matrix that computes logits: the part, or the `tied` one in its place."""
        table = self.table(part, in_features, "head") if tied is None else tied
        added = self.vector(f"{part.name}.bias", part.num_rows, take=part.rows) if bias else None
        return CpuLinear((table,), (added,), deltas=self._deltas(part.name, (table,)))

    def embedding_deltas(self, name: str) -> EmbeddingTable | None:
        """The adapters of the table of this name."""
        if self.adapters is None:
            return None
        found = self.adapter_tables[name] = EmbeddingTable(self.adapters.slots)
        return found

    def with_own_deltas(self, held: CpuLinear, declared: Linear, source: str, prefix: str) -> CpuLinear:
        """The matrices of the layer at `source`, in another one, with adapters of its own."""
        return replace(held, deltas=self._deltas(prefix + declared.matrices[0][0], held.weights))

    def _deltas(self, name: str, weights: Sequence[PackedLinear]) -> CpuDeltas | None:
        if self.adapters is None:
            return None
        found = self.adapter_tables[name] = CpuDeltas.of(weights, self.adapters)
        return found

    def report_unpacked(self) -> None:
        """Logs once which weights are kept as floats because the kernels cannot compute them as stored or as asked."""
        if self._unquantised:
            group = self._blocks.group_sizes[-1] if self._blocks else 0
            logger.warning("kept as floats, as groups of %d do not divide rows: %s", group, _listed(self._unquantised))
        if self._has_finer_inputs:
            logger.info("the inputs of experts keep 16 bits: their static scales are of one expert each")
        dtype = dtype_name(self.dtype)
        if self._undivided:
            types = ", ".join(sorted(self._undivided))
            logger.warning(
                "a rank's share of the rows of weights of type %s is no whole number of blocks; they are kept in %s",
                types,
                dtype,
            )
        if self._unpacked_types:
            types = ", ".join(sorted(self._unpacked_types))
            logger.warning(
                "weights of type %s cannot be computed as they are stored; they are kept in %s", types, dtype
            )

    def _stored(self, part: Part, in_features: int, columns: slice | None, role: Role) -> Stored:
        name = f"{part.name}.weight"
        bits = None if self._blocks is None else self._blocks.bits_of(role)
        stored = self._check(name, (part.num_rows, in_features))
        if bits is not None:
            return self._quantised(name, self._floats(name, part.rows, columns), bits, role)
        read_packed = stored.numbers.packed if self._keeps_packed else None
        if read_packed is None:
            floats = self._floats(name, part.rows, columns)
            rounds = (
                floats.dtype == torch.bfloat16 and self.dtype == torch.float32
            )  # bf16 kernels round activations too
            stays = self._keeps_packed and floats.dtype in FLOAT_TYPES and not rounds
            return floats if stays else floats.to(self.dtype)
        kept = read_packed()
        if isinstance(kept, GroupedWeight):
            return self._grouped(stored, kept, part, columns, role)
        type_name, data = kept
        kind, cut = WEIGHT_TYPES.get(type_name), None
        if kind is not None:
            block = kind.block_size, kind.block_bytes
            cut = packed_part(stored, data, block, part.rows, columns)
        if cut is None:
            (self._unpacked_types if kind is None else self._undivided).add(type_name)
            return stored.numbers.part(part.rows, columns).to(self.dtype)
        return type_name, _tensor_of(cut)

    def _grouped(
        self, stored: StoredTensor, whole: GroupedWeight, part: Part, columns: slice | None, role: Role
    ) -> Stored:
        if role == "expert" and whole.inputs is not None and whole.inputs.scale is not None:
            self._has_finer_inputs = True
            whole = replace(whole, inputs=None)
        cut = grouped_part(stored, whole, part.rows, columns)
        kind = f"{whole.kind} in groups of {whole.group}"
        if cut is None:
            self._undivided.add(kind)
        elif cut.shape[1] % GROUPED_TYPES[whole.kind].block_size or why_not_group(whole.kind, whole.group):
            self._unpacked_types.add(kind)
        else:
            return cut
        return stored.numbers.part(part.rows, columns).to(self.dtype)

    def _quantised(self, name: str, floats: Tensor, bits: int, role: Role) -> Stored:
        assert self._blocks is not None, "bits come with blocks"
        group = self._blocks.group_of(floats.shape[1])
        if group is None:
            self._unquantised.add(name)
            return floats.to(self.dtype)
        floats = finite(name, floats)
        if self._blocks.rounds_inputs and role == "matrix":
            return replace(quantise_wide(floats, bits, group), inputs=InputRounding(group=group))
        return (quantise if fit_half(floats, bits, group) else quantise_wide)(floats, bits, group)

    def pack(self, stored: Stored, *, gated: bool = False) -> PackedLinear:
        packed = pack(stored, gated=gated, arena=self._arena, runtime_=self._runtime)
        self.nbytes += packed.nbytes
        self._packed_bytes += packed.nbytes
        if self._packed_bytes >= GIVE_BACK_EVERY_BYTES:
            give_back_freed_memory()
            self._packed_bytes = 0
        return packed


def inner_block(spec: ArchSpec, source: WeightSource, *, keep_packed: bool, blocks: Blocks | None) -> int:
    """A rank's share of an FFN's inner size must be a multiple of this to consist of whole blocks; 1 without blocks."""
    if blocks is None and not keep_packed:
        return 1
    names = source.names()
    # Blocks lie along rows: only matrices whose columns are an inner size, and not heads, are divided across blocks.
    divided = {
        weight.name: weight.shape[1]
        for weight in model_weights(spec, spec.names.prefix_in(names))
        if len(weight.dimensions) > 1 and isinstance(weight.dimensions[1], Axis) and weight.dimensions[1].unit == 1
    }
    if blocks is not None:
        sizes = {blocks.group_of(size) for size in divided.values()}
        return 1 if None in sizes else math.lcm(*(size for size in sizes if size is not None))
    groups = [group for name in divided if name in names and (group := source.stored(name).group) is not None]
    return math.lcm(KERNEL_BLOCK, *groups) if groups else 1


class _AsIfWritable:
    """Memory of an array that may not be written, as numpy takes it."""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows  # as long as what is made of it
        self.__array_interface__ = {**rows.__array_interface__, "data": (rows.ctypes.data, False)}


def _tensor_of(rows: np.ndarray) -> Tensor:
    """Rows of bytes as a tensor, which must not be written. A mapped file is not copied, though torch warns of memory
    that it may not write."""
    rows = np.ascontiguousarray(rows)
    return torch.from_numpy(rows if rows.flags.writeable else np.asarray(_AsIfWritable(rows)))


def _listed(names: set[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def _type_name(stored: Stored) -> str:
    if isinstance(stored, GroupedWeight):
        return stored.kind
    return stored[0] if isinstance(stored, tuple) else FLOAT_TYPES[stored.dtype]


def _go_together(one: Stored, other: Stored) -> bool:
    """Whether they can be stacked by rows into one weight."""
    if isinstance(one, GroupedWeight) and isinstance(other, GroupedWeight):
        return one.goes_with(other)
    return _type_name(one) == _type_name(other)


def _floats(stored: Stored, dtype: torch.dtype) -> Tensor:
    if isinstance(stored, GroupedWeight):
        return stored.floats().to(dtype)
    return stored.to(dtype) if isinstance(stored, Tensor) else dequantise(*stored).to(dtype)


def _joined(parts: Sequence[Stored]) -> Stored:
    """Parts of one type, stacked by rows into one."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], GroupedWeight):
        return joined([part for part in parts if isinstance(part, GroupedWeight)])
    rows = [part[1] if isinstance(part, tuple) else part for part in parts if not isinstance(part, GroupedWeight)]
    # By numpy, in this thread: torch would divide the copy among threads that wait actively while a file is read.
    whole = torch.from_numpy(np.concatenate([each.contiguous().view(torch.uint8).numpy() for each in rows]))
    whole = whole.view(rows[0].dtype)
    return (_type_name(parts[0]), whole) if isinstance(parts[0], tuple) else whole
