"""Pads a checkpoint with zero weights, so that ranks can share sizes that do not divide evenly.

`ArchSpec.for_ranks` gives the padded numbers of heads and inner columns. A padding head has zero rows in the query, key
and value matrices and zero columns in the output matrix, and likewise an inner column of an FFN: its results are
multiplied by zero, so the model's output is unchanged.

    padded   | group 0: q q q 0 | group 1: q q q 0 | group of zeros  |      3 query heads a group and 2 groups,
    spans    | 0..2   > 0..2    | 4..6 > 3..5      |                 |      padded to 4 and 3
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.executor.checkpoints.weights import Numbers, ReadPart, StoredTensor, Weights, WeightSource, bounds
from headrace.executor.models.arch import ArchSpec
from headrace.executor.models.blocks import Axis
from headrace.executor.models.sizes import model_weights
from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.ipc.failure import InconsistentError, ModelError
from headrace.kernels.grouped import GroupedWeight

logger = logging.getLogger(__name__)


class Span(NamedTuple):
    """A run of indices that stays contiguous."""

    start: int
    """First index in the padded model."""
    source: int
    """First index in the checkpoint."""
    length: int


@dataclass(frozen=True)
class GrownAxis:
    """A dimension that padding enlarged."""

    size: int
    """Size in the checkpoint."""
    padded: int
    spans: tuple[Span, ...]

    def within(self, first: int, last: int) -> list[Span]:
        """The spans of first .. last - 1 that are not padding; their `start` counts from `first`."""
        found = []
        for start, source, length in self.spans:
            begin, end = max(start, first), min(start + length, last)
            if begin < end:
                found.append(Span(begin - first, source + begin - start, end - begin))
        return found


class CheckpointPiece(NamedTuple):
    """A rectangle of a part of a matrix that comes from the checkpoint; whatever no piece covers is zero."""

    rows: slice
    """Rows in the part."""
    columns: slice
    source_rows: slice
    """Rows in the checkpoint's tensor."""
    source_columns: slice


def padded_weights(source: WeightSource, spec: ArchSpec, padded: ArchSpec) -> Weights:
    """The weights with the padded model's shapes. Parts that are only padding are float32.

    Raises ModelError, when a tensor is asked for, where the checkpoint disagrees with the model's config.
    """
    weights = Weights.of(source)
    axes = grown_axes(spec, padded, spec.names.prefix_in(weights.names()))

    def stored(name: str) -> StoredTensor:
        found, grown = weights.stored(name), axes[name]
        own = [grown[dimension].size if dimension in grown else size for dimension, size in enumerate(found.shape)]
        if list(found.shape) != own:
            raise ModelError(f"weight {name} has shape {list(found.shape)}, but the config needs {own}")
        shape = tuple(grown[dimension].padded if dimension in grown else size for dimension, size in enumerate(own))
        part = partial(_padded_part, found.numbers.part, shape, grown)
        return replace(found, shape=shape, numbers=Numbers(part, found.numbers.packed), padding=grown)

    return weights.then("padded with zeros", weights.names() & axes.keys(), stored)


def _padded_part(
    part: ReadPart, shape: tuple[int, ...], grown: Mapping[int, GrownAxis], rows: slice | None, columns: slice | None
) -> Tensor:
    if len(shape) == 1:
        return _padded_vector(part, grown[0], *bounds(rows, shape[0]))
    height, width = part_size(shape, rows, columns)
    wanted = (height, *shape[1:-1], width)
    pieces = _pieces(shape, grown, rows, columns)
    parts = [part(p.source_rows, p.source_columns) for p in pieces]
    if len(parts) == 1 and parts[0].shape == wanted:
        return parts[0]
    whole = parts[0].new_zeros(wanted) if parts else torch.zeros(wanted)
    for piece, found in zip(pieces, parts, strict=True):
        whole[piece.rows, ..., piece.columns] = found
    return whole


def _padded_vector(part: ReadPart, grown: GrownAxis, first: int, last: int) -> Tensor:
    spans = grown.within(first, last)
    found = [(span.start, part(slice(span.source, span.source + span.length), None)) for span in spans]
    whole = found[0][1].new_zeros(last - first) if found else torch.zeros(last - first)
    for start, values in found:
        whole[start : start + len(values)] = values
    return whole


def padded_for(
    spec: ArchSpec, source: WeightSource, place: RankCoordinates, inner_block: int = 1
) -> tuple[ArchSpec, WeightSource]:
    """The model as the ranks of a stage share it, and its weights; both are unchanged where everything divides evenly.

    inner_block: each rank's share of an MLP's inner size is padded to a multiple of this, where padding is possible.

    Raises ModelError, with the numbers, where ranks cannot share the model.
    """
    padded = spec.for_ranks(place.tp_size, inner_block)
    if padded == spec:
        return spec, source
    if place.rank == 0:
        said = ", ".join(
            f"{now} for {was} {what}"
            for was, now, what in (
                (spec.num_heads, padded.num_heads, "query heads"),
                *sorted(
                    {
                        (old.mixer.cache.num_heads, new.mixer.cache.num_heads, "key/value heads")
                        for old, new in zip(spec.layers, padded.layers, strict=True)
                        if old.mixer.cache is not None and new.mixer.cache is not None
                    }
                ),
                (spec.intermediate_size, padded.intermediate_size, "inner columns of an MLP"),
            )
            if was != now
        )
        if said:
            logger.warning(
                "%d ranks cannot share each layer evenly, so zeros are added: it has %s", place.tp_size, said
            )
    return padded, padded_weights(source, spec, padded)


def packed_part(
    stored: StoredTensor, data: np.ndarray, block: tuple[int, int], rows: slice | None, columns: slice | None
) -> np.ndarray | None:
    """A part of a matrix whose rows are blocks of (elements, bytes); None if it begins or ends within a block.

    data: [rows, bytes of a row] uint8, without padding. Blocks of zero bytes decode to zeros in every type.
    """
    elements, num_bytes = block
    _check_size(stored, (len(data), data.shape[1] * elements // num_bytes))
    height, width = part_size(stored.shape, rows, columns)
    pieces = _pieces(stored.shape, stored.padding, rows, columns)
    edges = {edge for p in pieces for s in (p.columns, p.source_columns) for edge in (s.start, s.stop)}
    if any(edge % elements for edge in (*edges, width)):
        return None

    def in_bytes(part: slice) -> slice:
        return slice(part.start // elements * num_bytes, part.stop // elements * num_bytes)

    if len(pieces) == 1 and (pieces[0].rows.stop, pieces[0].columns.stop) == (height, width):
        return data[pieces[0].source_rows, in_bytes(pieces[0].source_columns)]
    whole = np.zeros((height, width // elements * num_bytes), np.uint8)
    for piece in pieces:
        part = data[piece.source_rows, in_bytes(piece.source_columns)]
        whole[piece.rows, in_bytes(piece.columns)] = part
    return whole


def grouped_part(
    stored: StoredTensor, whole: GroupedWeight, rows: slice | None, columns: slice | None
) -> GroupedWeight | None:
    """A part of a matrix with group scales; None where it begins or ends within a group.

    Padding has scales of zero or is multiplied with inputs of zero.
    """
    _check_size(stored, whole.shape)
    height, width = part_size(stored.shape, rows, columns)
    pieces = _pieces(stored.shape, stored.padding, rows, columns)
    if not all(whole.columns_divide(p.source_columns.start, p.source_columns.stop) for p in pieces):
        return None
    if len(pieces) == 1 and (pieces[0].rows.stop, pieces[0].columns.stop) == (height, width):
        return whole.part(pieces[0].source_rows, pieces[0].source_columns)
    edges = {edge for p in pieces for edge in (p.columns.start, p.columns.stop)}
    if whole.order is not None or any(edge % whole.undivided for edge in (*edges, width)):
        return None
    found = whole.blank(height, width)
    for piece in pieces:
        found.part(piece.rows, piece.columns).write(whole.part(piece.source_rows, piece.source_columns))
    return found


def _check_size(stored: StoredTensor, packed: tuple[int, int]) -> None:
    """Raises InconsistentError unless a packed matrix of this size is the tensor without its padding."""
    own = tuple(stored.padding[i].size if i in stored.padding else size for i, size in enumerate(stored.shape))
    if own != packed:
        raise InconsistentError(f"a packed matrix is {list(packed)}, and its record says {list(own)}")


def _pieces(
    shape: tuple[int, ...], grown: Mapping[int, GrownAxis], rows: slice | None, columns: slice | None
) -> list[CheckpointPiece]:
    """The pieces of that part of a matrix of this padded shape, in order of rows, then columns."""
    down, across = (
        grown[dimension].within(first, last) if dimension in grown else [Span(0, first, last - first)]
        for dimension, (first, last) in enumerate((bounds(rows, shape[0]), bounds(columns, shape[-1])))
    )
    return [
        CheckpointPiece(
            slice(r.start, r.start + r.length),
            slice(c.start, c.start + c.length),
            slice(r.source, r.source + r.length),
            slice(c.source, c.source + c.length),
        )
        for r in down
        for c in across
    ]


def part_size(shape: tuple[int, ...], rows: slice | None, columns: slice | None) -> tuple[int, int]:
    """The numbers of rows and columns of a part of a matrix."""
    first, last = bounds(rows, shape[0])
    begin, end = bounds(columns, shape[-1])
    return last - first, end - begin


def grown_axes(spec: ArchSpec, padded: ArchSpec, prefix: str) -> dict[str, dict[int, GrownAxis]]:
    """For each tensor that padding enlarges, its enlarged dimensions."""
    found: dict[str, dict[int, GrownAxis]] = {}
    for weight, grown in zip(model_weights(spec, prefix), model_weights(padded, prefix), strict=True):
        axes = {
            index: _grown(old, new)
            for index, (old, new) in enumerate(zip(weight.dimensions, grown.dimensions, strict=True))
            if isinstance(old, Axis) and isinstance(new, Axis) and old.size != new.size
        }
        if axes:
            found[weight.name] = axes
    return found


def _grown(old: Axis, new: Axis) -> GrownAxis:
    each, padded_each = old.size // old.groups, new.size // new.groups
    spans = tuple(Span(index * padded_each, index * each, each) for index in range(old.groups))
    return GrownAxis(old.size, new.size, spans)
