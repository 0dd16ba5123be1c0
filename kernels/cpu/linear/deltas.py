"""Adapters of linear layers on the CPU kernels: the slots of a packed weight, and a step's rows: see deltas.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.cpu.linear.args import (
    FLOAT_TYPES,
    WEIGHT_TYPES,
    DeltaC,
    DeltaPanelC,
    DeltaSiteC,
    EmbedDeltaC,
    RowAdaptersC,
)
from headrace.kernels.cpu.linear.linear import PackedLinear, tiles_of
from headrace.kernels.cpu.runtime.pointers import pointer
from headrace.kernels.low_rank import EmbeddingDelta, LowRank

PANEL_ROWS, HALF_ROWS = 32, 16
"""`kPanelRows`, of B, and `kHalfRows`, of A."""
BLOCK_BYTES, LEAST_GATHERED, MOST_BLOCK_ROWS = 384 * 1024, 48, 1024
"""`kActivationBlockBytes`, `kLeastGathered` and `kMaxBlockRows`."""


@dataclass(frozen=True, eq=False)
class PackedDelta:
    """An adapter's part of one packed weight, or of each of a stack."""

    deltas: ctypes.Array[DeltaC]
    nbytes: int
    kept: tuple[object, ...] = field(repr=False)
    """What `deltas` point to."""


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
        deltas, kept = (DeltaC * len(stack))(), list[Any]()
        for found, delta in zip(deltas, stack, strict=True):
            if delta is not None and not delta.is_nothing:
                kept += self._fill(found, delta)
        return PackedDelta(deltas, sum(each.nbytes for each in kept), tuple(kept)) if kept else None

    def _fill(self, found: DeltaC, delta: LowRank) -> list[Any]:
        """Packs one weight's part. Returns what it points to."""
        found.width, found.replaces = len(delta.a), delta.whole is not None
        kept: list[Any] = []
        if len(delta.a):
            kept.append(a := self._panels(_whole_panels(delta.a)))
            found.a = pointer(a)
        if delta.whole is None and self._are_whole_panels(delta):
            panels, data = self._panels_of_parts(delta)
        else:
            rows = delta.dense_b() if delta.whole is None else delta.whole
            panels, data = self._panels_of_rows(delta, rows)
        kept += [panels, *data]
        found.panels = panels.ctypes.data
        for name in ("bias", "magnitude"):
            if (vector := getattr(delta, name)) is not None:
                kept.append(line := self._in_order(vector.float()).contiguous())
                setattr(found, name, pointer(line))
        return kept

    def put(self, slot: int, packed: PackedDelta | None) -> None:
        self._slots[slot] = None if packed is None else ctypes.addressof(packed.deltas)
        self._held[slot] = packed

    def describe(self, room: Tensor | None = None) -> DeltaSiteC:
        """The argument of an op. room: for y, which the op overwrites; experts have their own."""
        type_name = FLOAT_TYPES[self._dtype]
        tiles = tiles_of(self._weight.runtime.library, type_name)
        number = WEIGHT_TYPES[type_name].number
        return DeltaSiteC(
            slots=ctypes.addressof(self._slots), y=None if room is None else pointer(room), tiles=tiles, type=number
        )

    def scratch_bytes(self) -> int:
        """Of each thread."""
        row_bytes = 4 * (self._weight.k + 16)
        return max(BLOCK_BYTES, LEAST_GATHERED * row_bytes) + MOST_BLOCK_ROWS * PANEL_ROWS * 4

    def _panels(self, rows: Tensor) -> Tensor:
        """rows [panels, rows of a panel, k] in the layout of float.h, in the memory for adapters."""
        rows = rows.to(self._dtype)
        if self._dtype == torch.bfloat16:  # a pair is moved as one number
            odd = rows.shape[2] % 2
            rows = (torch.nn.functional.pad(rows, (0, 1)) if odd else rows.contiguous()).view(torch.int32)
        memory, address = self._weight.runtime.adapter_arena.take(rows.nbytes)
        offset = address - ctypes.addressof(ctypes.c_char.from_buffer(memory))
        found = torch.frombuffer(memory, dtype=rows.dtype, count=rows.numel(), offset=offset)
        return found.view(rows.transpose(1, 2).shape).copy_(rows.transpose(1, 2))

    def _in_order(self, rows: Tensor) -> Tensor:
        """rows [n, ...] as the weight's panels have them: [panels * 32, ...], with zeros where a panel has no row."""
        found = rows[self._order.clamp(min=0)]
        found[self._order < 0] = 0
        return found

    def _are_whole_panels(self, delta: LowRank) -> bool:
        """Whether each part has all rows of its panels, within one half of a gated pair."""
        half = self._weight.columns
        edges = [edge for part in delta.parts for edge in (part.first_row, part.first_row + len(part.b))]
        within = all(part.first_row // half == (part.first_row + len(part.b) - 1) // half for part in delta.parts)
        return within and half % PANEL_ROWS == 0 and not any(edge % PANEL_ROWS for edge in edges)

    def _panels_of_parts(self, delta: LowRank) -> tuple[np.ndarray, list[Tensor]]:
        """As `_panels_of_rows`, where `_are_whole_panels` says so."""
        fan, half = self._weight.n // self._weight.columns, self._weight.columns
        panels, data = np.zeros(len(self._order) // PANEL_ROWS, np.dtype(DeltaPanelC)), []
        for part in delta.parts:
            data.append(packed := self._panels(part.b.unflatten(0, (-1, PANEL_ROWS))))
            which, first = divmod(part.first_row, half)
            own = panels[first // PANEL_ROWS * fan + which :: fan][: len(packed)]
            own["data"] = pointer(packed) + np.arange(len(packed)) * (packed.nbytes // len(packed))
            own["begin"], own["count"] = part.first_column, part.b.shape[1]
        return panels, data

    def _panels_of_rows(self, delta: LowRank, b: Tensor) -> tuple[np.ndarray, list[Tensor]]:
        """[panels] of DeltaPanelC, and the memory that they point to."""
        rows = self._in_order(b).unflatten(0, (-1, PANEL_ROWS))
        spans = np.zeros((len(rows), 2), np.int64)
        if delta.whole is not None:
            spans[:, 1] = b.shape[1]
        own = self._order.numpy().reshape(-1, PANEL_ROWS)
        for part in delta.parts:
            first, last = part.first_column, part.first_column + part.b.shape[1]
            touched = ((own >= part.first_row) & (own < part.first_row + len(part.b))).any(1)
            is_first = touched & (spans[:, 1] == 0)
            spans[is_first] = first, last
            spans[touched, 0] = np.minimum(spans[touched, 0], first)
            spans[touched, 1] = np.maximum(spans[touched, 1], last)
        panels = np.zeros(len(rows), np.dtype(DeltaPanelC))
        data = []
        for begin, end in np.unique(spans, axis=0):
            chosen = np.flatnonzero((spans == (begin, end)).all(1))
            if begin == end:
                continue
            data.append(packed := self._panels(rows[torch.from_numpy(chosen), :, begin:end]))
            panels["data"][chosen] = pointer(packed) + np.arange(len(chosen)) * (packed.nbytes // len(chosen))
            panels["begin"][chosen], panels["count"][chosen] = begin, end - begin
        return panels, data


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


def _whole_panels(rows: Tensor) -> Tensor:
    """rows [n, k] with rows of zeros up to a whole number of panels: [panels, 16, k]"""
    missing = -len(rows) % HALF_ROWS
    padded = torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows
    return padded.unflatten(0, (-1, HALF_ROWS))


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
