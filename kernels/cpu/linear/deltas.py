"""Adapters of linear layers on the CPU kernels: the slots of a packed weight, and a step's rows: see deltas.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.cpu.linear.args import (
    DTYPES,
    FLOAT_TYPES,
    WEIGHT_TYPES,
    DeltaC,
    DeltaPanelC,
    DeltaSiteC,
    EmbedDeltaC,
    FactorRowsC,
    RowAdaptersC,
)
from headrace.kernels.cpu.linear.linear import PackedLinear, Runtime, tiles_of
from headrace.kernels.cpu.runtime.pointers import pointer
from headrace.kernels.low_rank import EmbeddingDelta, LowRank

PANEL_ROWS, HALF_ROWS = 32, 16
"""`kPanelRows`, of B, and `kHalfRows`, of A."""
BLOCK_BYTES, LEAST_GATHERED, MOST_BLOCK_ROWS = 384 * 1024, 48, 1024
"""`kActivationBlockBytes`, `kLeastGathered` and `kMaxBlockRows`."""
_PANELS = np.dtype(DeltaPanelC)


@dataclass(frozen=True, eq=False)
class PackedDelta:
    """An adapter's part of one packed weight, or of each of a stack."""

    deltas: ctypes.Array[DeltaC]
    nbytes: int
    kept: tuple[object, ...] = field(repr=False)
    """What `deltas` point to."""

    def of(self, which: Sequence[int]) -> PackedDelta:
        """The parts of some of a stack's weights, in this order."""
        return PackedDelta((DeltaC * len(which))(*(self.deltas[each] for each in which)), self.nbytes, (self,))


class DeltaTable:
    """The slots of one packed weight, or of a stack of one type and shape. One is filled or emptied while steps run
    that do not use it."""

    def __init__(self, weight: PackedLinear, dtype: torch.dtype, num_slots: int) -> None:
        """weight: the one, or any of the stack. dtype: that adapters are packed in."""
        self._weight, self._dtype, self._order = weight, dtype, _row_order(weight)
        self._slots = (ctypes.c_void_p * num_slots)()
        self._held: list[PackedDelta | None] = [None] * num_slots

    def pack(self, delta: LowRank) -> PackedDelta | None:
        """None for an adapter that leaves the weight as it is."""
        return self.pack_stack([delta])

    def pack_stack(self, stack: Sequence[LowRank | None]) -> PackedDelta | None:
        """An adapter's parts of a stack of weights of one shape; None for those that stay as they are."""
        deltas, packing = (DeltaC * len(stack))(), _Packing(self._weight.runtime, self._dtype)
        for found, delta in zip(deltas, stack, strict=True):
            if delta is not None and not delta.is_nothing:
                self._fill(found, delta, packing)
        packing.run()
        return PackedDelta(deltas, packing.nbytes, tuple(packing.kept)) if packing.kept else None

    def _fill(self, found: DeltaC, delta: LowRank, packing: _Packing) -> None:
        """Packs one weight's part."""
        found.width, found.replaces = delta.a.shape[0], delta.whole is not None
        if found.width:
            found.a = packing.add(delta.a, HALF_ROWS)
        if delta.whole is None and self._are_whole_panels(delta):
            panels = self._panels_of_parts(delta, packing)
        else:
            panels = self._panels_of_rows(delta, delta.dense_b() if delta.whole is None else delta.whole, packing)
        found.panels = packing.keep(panels, panels.ctypes.data)
        for name in ("bias", "magnitude"):
            if (vector := getattr(delta, name)) is not None:
                line = self._in_order(vector.float()).contiguous()
                setattr(found, name, packing.keep(line, pointer(line)))

    def put(self, slot: int, packed: PackedDelta | None) -> None:
        self._slots[slot] = None if packed is None else ctypes.addressof(packed.deltas)
        self._held[slot] = packed

    @property
    def slots_address(self) -> int:
        """Of a pointer for each slot, which is null while it leaves the weight as it is."""
        return ctypes.addressof(self._slots)

    def describe(self, room: Tensor | None = None) -> DeltaSiteC:
        """The argument of an op. room: for y, which the op overwrites; experts have their own."""
        type_name = FLOAT_TYPES[self._dtype]
        tiles = tiles_of(self._weight.runtime.library, type_name)
        number = WEIGHT_TYPES[type_name].number
        return DeltaSiteC(slots=self.slots_address, y=None if room is None else pointer(room), tiles=tiles, type=number)

    def scratch_bytes(self) -> int:
        """Of each thread."""
        row_bytes = 4 * (self._weight.k + 16)
        return max(BLOCK_BYTES, LEAST_GATHERED * row_bytes) + MOST_BLOCK_ROWS * PANEL_ROWS * 4

    def _in_order(self, rows: Tensor) -> Tensor:
        """rows [n, ...] as the weight's panels have them: [panels * 32, ...], with zeros where a panel has no row."""
        found = rows[self._order.clamp(min=0)]
        found[self._order < 0] = 0
        return found

    def _are_whole_panels(self, delta: LowRank) -> bool:
        """Whether each part has all rows of its panels, within one half of a gated pair."""
        half = self._weight.columns
        spans = [(part.first_row, part.first_row + part.b.shape[0]) for part in delta.parts]
        within = all(first // half == (last - 1) // half for first, last in spans)
        return within and half % PANEL_ROWS == 0 and not any(edge % PANEL_ROWS for span in spans for edge in span)

    def _panels_of_parts(self, delta: LowRank, packing: _Packing) -> np.ndarray:
        """As `_panels_of_rows`, where `_are_whole_panels` says so."""
        fan, half = self._weight.n // self._weight.columns, self._weight.columns
        panels = np.zeros(len(self._order) // PANEL_ROWS, _PANELS)
        for part in delta.parts:
            which, first = divmod(part.first_row, half)
            rank, count = part.b.shape[1], part.b.shape[0] // PANEL_ROWS
            own = panels[first // PANEL_ROWS * fan + which :: fan][:count]
            own["data"] = packing.add(part.b, PANEL_ROWS, part.scale) + np.arange(count) * packing.panel_bytes(rank)
            own["begin"], own["count"] = part.first_column, rank
        return panels

    def _panels_of_rows(self, delta: LowRank, b: Tensor, packing: _Packing) -> np.ndarray:
        """[panels] of DeltaPanelC"""
        own = self._order.numpy().reshape(-1, PANEL_ROWS)
        spans = np.zeros((len(own), 2), np.int64)
        if delta.whole is not None:
            spans[:, 1] = b.shape[1]
        for part in delta.parts:
            first, last = part.first_column, part.first_column + part.b.shape[1]
            touched = ((own >= part.first_row) & (own < part.first_row + len(part.b))).any(1)
            is_first = touched & (spans[:, 1] == 0)
            spans[is_first] = first, last
            spans[touched, 0] = np.minimum(spans[touched, 0], first)
            spans[touched, 1] = np.maximum(spans[touched, 1], last)
        panels = np.zeros(len(own), _PANELS)
        for begin, end in np.unique(spans, axis=0):
            if begin == end:
                continue
            chosen = np.flatnonzero((spans == (begin, end)).all(1))
            at = packing.add(b[:, begin:end], PANEL_ROWS, order=own[chosen].reshape(-1))
            panels["data"][chosen] = at + np.arange(len(chosen)) * packing.panel_bytes(end - begin)
            panels["begin"][chosen], panels["count"][chosen] = begin, end - begin
        return panels


class _Packing:
    """The factors of one adapter for one weight or stack, packed by one call into the memory for adapters."""

    def __init__(self, runtime: Runtime, dtype: torch.dtype) -> None:
        self._runtime, self._dtype = runtime, dtype
        self._jobs, self._sources = list[FactorRowsC](), list[object]()
        self.kept = list[object]()
        """What holds the memory that was pointed to."""
        self.nbytes = 0

    def panel_bytes(self, k: int) -> int:
        """Of a panel of B."""
        return PANEL_ROWS * self._padded(k) * self._dtype.itemsize

    def add(self, rows: Tensor, panel_rows: int, scale: float = 1.0, order: np.ndarray | None = None) -> int:
        """Notes rows [n, k], which are multiplied by `scale`, or those of `order` (-1: zeros). Returns where their
        panels will be, in the layout of float.h."""
        if rows.dtype not in DTYPES:
            rows = rows.float()
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        (num_rows, k), count = rows.shape, len(rows) if order is None else len(order)
        places = -(-count // panel_rows) * panel_rows
        size = places * self._padded(k) * self._dtype.itemsize
        chunk, address = self._runtime.adapter_arena.take(size)
        self.nbytes += size
        self.kept.append(chunk)
        order = None if order is None else np.ascontiguousarray(order, np.int64)
        self._sources += [rows, order]
        self._jobs.append(
            FactorRowsC(
                from_=pointer(rows),
                to=address,
                order=None if order is None else order.ctypes.data,
                num_rows=num_rows,
                num_places=places,
                k=k,
                stride=rows.stride(0),
                scale=scale,
                from_type=DTYPES[rows.dtype],
                type=DTYPES[self._dtype],
                panel_rows=panel_rows,
            )
        )
        return address

    def keep(self, value: Tensor | np.ndarray, address: int) -> int:
        """Holds what is read in place, of this address."""
        self.kept.append(value)
        self.nbytes += value.nbytes
        return address

    def run(self) -> None:
        jobs = (FactorRowsC * len(self._jobs))(*self._jobs)
        self._runtime.library.dll.hr_pack_factors(jobs, ctypes.c_int64(len(jobs)))
        self._sources.clear()

    def _padded(self, k: int) -> int:
        return -(-k // 2) * 2 if self._dtype == torch.bfloat16 else k


@dataclass(frozen=True, eq=False)
class PackedEmbedding:
    delta: EmbedDeltaC
    nbytes: int
    kept: EmbeddingDelta
    """What `delta` points to."""


class EmbeddingTable:
    """The slots of a table of token embeddings."""

    def __init__(self, num_slots: int) -> None:
        self.slots = (ctypes.c_void_p * num_slots)()
        self._held: list[PackedEmbedding | None] = [None] * num_slots

    def pack(self, delta: EmbeddingDelta) -> PackedEmbedding:
        kept = EmbeddingDelta(
            delta.a.contiguous(), delta.b.contiguous(), None if delta.rows is None else delta.rows.contiguous()
        )
        rows = None if kept.rows is None else pointer(kept.rows)
        found = EmbedDeltaC(a=pointer(kept.a), b=pointer(kept.b), rows=rows, rank=len(kept.b))
        return PackedEmbedding(found, kept.nbytes, kept)

    def put(self, slot: int, packed: PackedEmbedding | None) -> None:
        self.slots[slot] = None if packed is None else ctypes.addressof(packed.delta)
        self._held[slot] = packed


def _row_order(weight: PackedLinear) -> Tensor:
    """The row in each place of each panel, [panels * 32] int64; -1 where there is none: `source_row` in linear.h."""
    fan = 2 if weight.gated else 1
    half = weight.n // fan
    index = torch.arange(-(-half // PANEL_ROWS) * PANEL_ROWS)
    rows = torch.where(index < half, index, -1).unflatten(0, (-1, PANEL_ROWS))
    parts = [torch.where(rows < 0, -1, rows + part * half) for part in range(fan)]
    return torch.stack(parts, 1).reshape(-1)


@dataclass(frozen=True, eq=False)
class PairedRows:
    """The adapters of rows, sorted by slot and then by row: `RowAdapters` in deltas.h. All int32 but the scales."""

    starts: np.ndarray  # [num_slots + 1]
    slots: np.ndarray  # [num_slots]
    rows: np.ndarray  # [num_pairs]
    slot_of: np.ndarray  # [num_pairs]
    scales: np.ndarray  # [num_pairs] float32
    pair_of: np.ndarray  # [most_used, num_rows]

    @classmethod
    def of(cls, slots: np.ndarray, scales: np.ndarray) -> PairedRows:
        """slots [most_used, num_rows] int32, -1 for none; scales likewise, float32."""
        uses, rows = np.nonzero(slots >= 0)
        order = np.lexsort((rows, slots[uses, rows]))
        uses, rows = uses[order], rows[order].astype(np.int32)
        slot_of = slots[uses, rows]
        pair_of = np.full(slots.shape, -1, np.int32)
        pair_of[uses, rows] = np.arange(len(rows), dtype=np.int32)
        found, starts = np.unique(slot_of, return_index=True)
        starts = np.append(starts, len(rows)).astype(np.int32)
        return cls(starts, found, rows, slot_of, scales[uses, rows], pair_of)

    def put(self, args: RowAdaptersC) -> None:
        """Points the kernels' structure to the arrays."""
        for name in ("starts", "slots", "rows", "slot_of", "scales", "pair_of"):
            setattr(args, name, getattr(self, name).ctypes.data)
        args.num_slots, (args.most_used, args.num_rows) = len(self.slots), self.pair_of.shape
