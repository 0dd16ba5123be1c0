"""Maps a checkpoint's tensors to the weights that a model's blocks declare, where the checkpoint stores several
matrices as one, transposed, or with interleaved rotary pairs.

    stored   query_key_value [12, in]      head 0: q q k k v v   head 1: q q k k v v
    declared query [4, in]                 rows 0 1 6 7
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from headrace.executor.checkpoints.formats.as_loaded import quantised_as_loaded
from headrace.executor.checkpoints.stacked_experts import each_expert
from headrace.executor.checkpoints.weights import Numbers, Packed, StoredTensor, Weights, WeightSource, bounds
from headrace.executor.models.arch import ArchSpec, Fused
from headrace.executor.models.blocks import Weight, size_of
from headrace.executor.models.sizes import model_weights
from headrace.executor.parallel.rank_place import RankCoordinates
from headrace.ipc.failure import ModelError
from headrace.kernels.grouped import GroupedWeight

logger = logging.getLogger(__name__)
ROWS_COMPARED = 4096
"""Rows of a head that are compared with the embedding at once."""


def as_declared(spec: ArchSpec, source: WeightSource) -> Weights:
    """The weights with the names and rows that the model's blocks declare, and quantised if they are to be while
    loading."""
    weights = each_expert(spec, under_own_names(spec, Weights.of(source)))
    if spec.sharded:
        weights = _with_whole_tables(spec, weights)
    if spec.unit_head:
        weights = _with_unit_head(spec, weights)
    weights = _without_padded_rows(spec, _in_each_layer(spec, weights))
    if spec.task_types:
        weights = _with_first_task(spec, weights)
    if places := places_of(spec, held := weights.names()):
        for name, place in places.items():
            if name != place.name and name in held:
                raise ModelError(f"the checkpoint holds {name} twice, once as rows of {place.name}")
        gone = frozenset(place.name for place in places.values())
        stored = partial(_placed, weights, places)
        weights = weights.then("rows as the model declares them", frozenset(places), stored, gone)
    if spec.scaled:
        weights = _with_scales(spec, weights)
    return weights if weights.as_loaded is None else quantised_as_loaded(weights, weights.as_loaded, spec)


def under_own_names(spec: ArchSpec, weights: Weights) -> Weights:
    """The weights with the names that the spec's `renamed` makes of theirs. Raises ModelError if two become one."""
    sources: dict[str, str] = {}
    for name in sorted(weights.names()):
        own = spec.names.own(name)
        if own != name and (own in sources or own in weights.names()):
            raise ModelError(f"the checkpoint holds {own} twice, once as {name}")
        if own != name:
            sources[own] = name
    if not sources:
        return weights
    gone = frozenset(sources.values())
    return weights.then("names of the model", frozenset(sources), lambda name: weights.stored(sources[name]), gone)


def _in_each_layer(spec: ArchSpec, weights: Weights) -> Weights:
    """The weights with those that all layers share in each of them."""
    names, held = spec.names, weights.names()
    prefix, sources = names.prefix_in(held), dict[str, str]()
    for name, stored in spec.shared:
        if (source := f"{prefix}{stored}.weight") in held:
            sources |= {f"{names.layer(prefix, i)}{name}.weight": source for i in range(spec.num_layers)}
    if not sources:
        return weights
    gone = frozenset(sources.values())
    return weights.then("shared tables", frozenset(sources), lambda name: weights.stored(sources[name]), gone)


def parts_of_tables(spec: ArchSpec, held: frozenset[str]) -> dict[str, list[str]]:
    """From each table of a layer that these tensors have in parts to the parts' names, in order."""
    prefix, found = spec.names.prefix_in(held), dict[str, list[str]]()
    for index, name in itertools.product(range(spec.num_layers), spec.sharded):
        start = f"{spec.names.layer(prefix, index)}{name}."
        names = (f"{start}shard_{number}.weight" for number in itertools.count())
        if parts := list(itertools.takewhile(held.__contains__, names)):
            found[f"{start}weight"] = parts
    return found


def _with_whole_tables(spec: ArchSpec, weights: Weights) -> Weights:
    """The weights with a table in the place of the parts that have its rows, times the scale of 8-bit floats."""
    held = weights.names()
    if not (parts := parts_of_tables(spec, held)):
        return weights
    scales = {name: scale for name in parts if (scale := f"{name}_scale") in held}
    gone = frozenset(itertools.chain(*parts.values(), scales.values()))
    stored = partial(_table_of_parts, weights, parts, scales)
    return weights.then("tables of parts", frozenset(parts), stored, gone)


def _table_of_parts(
    weights: Weights, parts: Mapping[str, list[str]], scales: Mapping[str, str], name: str
) -> StoredTensor:
    """Raises ModelError for a scale of more than one number."""
    found = _joined(weights, parts[name])
    if name not in scales:
        return found
    scale = weights.get(scales[name])
    if scale.numel() != 1:
        raise ModelError(f"weight {scales[name]} has shape {list(scale.shape)}; one number is expected")
    return StoredTensor.plain(found.shape, found.format, partial(_times, found, float(scale)))


def _joined(weights: Weights, names: list[str]) -> StoredTensor:
    """The rows of several tensors. Raises ModelError if they have other columns."""
    parts = [weights.stored(name) for name in names]
    for name, each in zip(names, parts, strict=True):
        if len(each.shape) != 2 or each.shape[1] != parts[0].shape[-1]:
            raise ModelError(f"weight {name} has shape {list(each.shape)}, and {names[0]} {list(parts[0].shape)}")
    ends = list(itertools.accumulate(each.shape[0] for each in parts))

    def part(rows: slice | None, columns: slice | None) -> Tensor:
        first, last = bounds(rows, ends[-1])
        found = []
        for each, end in zip(parts, ends, strict=True):
            start = end - each.shape[0]
            own = slice(max(first, start) - start, min(last, end) - start)
            if own.start < own.stop:
                found.append(each.numbers.part(own, columns))
        return torch.cat(found) if found else parts[0].numbers.part(slice(0, 0), columns)

    return StoredTensor.plain((ends[-1], parts[0].shape[1]), parts[0].format, part)


def _without_padded_rows(spec: ArchSpec, weights: Weights) -> Weights:
    """The weights without the rows of both ends that stand for no token."""
    ends = (_table(spec, weights.names()), _head(spec, weights.names()))
    found = frozenset(name for name in ends if name is not None and _has_padded_rows(spec, weights, name))
    if not found:
        return weights
    place = StoredRows("", spec.stored_vocab, np.arange(spec.vocab_size))
    places = {name: replace(place, name=name) for name in found}
    return weights.then("rows of tokens alone", found, partial(_placed, weights, places))


def _has_padded_rows(spec: ArchSpec, weights: Weights, name: str) -> bool:
    is_padded = spec.stored_vocab > spec.vocab_size and name in weights.names()
    return is_padded and weights.shape(name)[0] == spec.stored_vocab


def _with_first_task(spec: ArchSpec, weights: Weights) -> Weights:
    """The weights with the row of the first task added to each token type, of which every token has one."""
    held = weights.names()
    prefix = spec.names.prefix_in(held)
    types, tasks = (f"{prefix}{name}.weight" for name in (spec.names.token_types, spec.task_types))
    if tasks not in held:
        return weights

    def stored(_: str) -> StoredTensor:
        found = weights.stored(types)

        def part(rows: slice | None, columns: slice | None) -> Tensor:
            own, first = found.numbers.part(rows, columns), weights.get(tasks, slice(0, 1), columns)
            return (own.float() + first.float()).to(own.dtype)

        return StoredTensor.plain(found.shape, found.format, part)

    return weights.then("token types with the first task's type", frozenset({types}), stored, frozenset({tasks}))


def with_own_head(spec: ArchSpec, source: WeightSource, place: RankCoordinates) -> ArchSpec:
    """The spec as its checkpoint has it: where it ties the head to the embedding, and the checkpoint has a head that is
    no copy of it, the head is used, which is logged. A copy may be rounded to its type. Only the last stage compares
    them, since the others have no head."""
    if not spec.tied_head or not place.is_last_stage:
        return spec
    if spec.unit_head:  # its rows are not those of the embedding
        return replace(spec, tied_head=False)
    head, table = _head(spec, source.names()), _table(spec, source.names())
    if head is None or _is_copy(source, head, table):
        return spec
    logger.warning(
        "the config ties the head to the embedding, and the checkpoint's %s is no copy of %s: %s is used",
        *(head, table, head),
    )
    return replace(spec, tied_head=False)


def _head(spec: ArchSpec, held: frozenset[str]) -> str | None:
    return next((name for each in spec.names.lm_heads if (name := f"{each}.weight") in held), None)


def _table(spec: ArchSpec, held: frozenset[str]) -> str:
    return f"{spec.names.prefix_in(held)}{spec.names.embedding}.weight"


def _is_copy(source: WeightSource, head: str, table: str) -> bool:
    """Whether all values of two matrices are the same, where the types they are stored in have them."""
    stored = source.stored(head)
    if stored.shape != source.shape(table) or stored.numbers.packed is not None:
        return False
    num_rows = stored.shape[0]
    for first in range(0, num_rows, ROWS_COMPARED):
        rows = slice(first, min(first + ROWS_COMPARED, num_rows))
        own, tied = (source.get(name, rows=rows) for name in (head, table))
        if not (torch.equal(own, tied.to(own.dtype)) or torch.equal(own.to(tied.dtype), tied)):
            return False
    return True


def stored_weights(spec: ArchSpec, held: frozenset[str]) -> Iterator[Weight]:
    """The weights that the model reads from a checkpoint with these tensors, under the checkpoint's names."""
    prefix = spec.names.prefix_in(held)
    declared = {weight.name: weight for weight in model_weights(spec, prefix)}
    if spec.tied_head and (head := _head(spec, held)) is not None:
        declared[head] = Weight(head, (spec.vocab_size, spec.embedding_width), "head")
    places = places_of(spec, held)
    for name, weight in declared.items():
        place = places.get(name)
        if place is None:
            yield weight
        else:
            yield Weight(place.name, (place.num_stored, *map(size_of, weight.dimensions[1:])), weight.role)


@dataclass(frozen=True, eq=False)
class StoredRows:
    """Where the rows of a declared tensor are stored."""

    name: str
    """Name of the stored tensor."""
    num_stored: int
    """Number of rows that the stored tensor must have."""
    rows: np.ndarray  # [declared rows] int64
    transposed: bool = False


def _with_unit_head(spec: ArchSpec, weights: Weights) -> Weights:
    """The weights with a head, in floats, each row of which is divided by its L2 norm; without an own head, one made of
    the embedding."""
    head = f"{spec.names.lm_heads[0]}.weight"
    held = head if head in weights.names() else _table(spec, weights.names())

    def stored(_: str) -> StoredTensor:
        found = weights.stored(held)
        return StoredTensor.plain(found.shape, found.format, partial(_of_length_1, found))

    return weights.then("rows of the head have length 1", frozenset({head}), stored)


def _with_scales(spec: ArchSpec, weights: Weights) -> Weights:
    """The weights multiplied by the factors of the spec, in floats."""
    names, prefix, held = spec.names, spec.names.prefix_in(weights.names()), weights.names()
    starts = [names.layer(prefix, index) for index in range(spec.num_layers)]
    factors = {start + name: factor for start in starts for name, factor in spec.scaled if start + name in held}

    def stored(name: str) -> StoredTensor:
        found, factor = weights.stored(name), factors[name]
        return StoredTensor.plain(found.shape, found.format, partial(_times, found, factor))

    return weights.then("weights times the config's multipliers", frozenset(factors), stored)


def _times(found: StoredTensor, factor: float, rows: slice | None, columns: slice | None) -> Tensor:
    part = found.numbers.part(rows, columns)
    return (part.float() * factor).to(torch.float32 if part.dtype.itemsize == 1 else part.dtype)


def _of_length_1(found: StoredTensor, rows: slice | None, columns: slice | None) -> Tensor:
    whole = found.numbers.part(rows, None)
    normalised = torch.nn.functional.normalize(whole.float()).to(whole.dtype)
    return normalised if columns is None else normalised[:, columns]


def _placed(weights: Weights, places: Mapping[str, StoredRows], name: str) -> StoredTensor:
    """A declared tensor; it is packed where the stored one is and is not transposed. Raises ModelError if the stored
    one has another number of rows than its parts together."""
    place = places[name]
    found = weights.stored(place.name)
    shape = found.shape[::-1] if place.transposed else found.shape
    if shape[0] != place.num_stored:
        axis = "columns" if place.transposed and len(shape) == 2 else "rows"
        raise ModelError(
            f"weight {place.name} has shape {list(found.shape)}, but the config needs {place.num_stored} {axis}"
        )
    read = None if place.transposed else found.numbers.packed
    packed = None if read is None else partial(_packed_placed, read, place)
    numbers = Numbers(partial(_part_placed, found, place), packed)
    return StoredTensor.unpadded((len(place.rows), *shape[1:]), found.format, found.group, numbers)


def _part_placed(found: StoredTensor, place: StoredRows, rows: slice | None, columns: slice | None) -> Tensor:
    wanted, read = place.rows[slice(*bounds(rows, len(place.rows)))], found.numbers.part
    if not len(wanted):
        return read(None, None)[:0]
    span = slice(int(wanted.min()), int(wanted.max()) + 1)
    part = read(columns, span).T if place.transposed and len(found.shape) > 1 else read(span, columns)
    if len(wanted) == len(part) and (np.diff(wanted) == 1).all():
        return part
    return part[torch.from_numpy(wanted - span.start)]


def _packed_placed(read: Callable[[], Packed], place: StoredRows) -> Packed:
    stored = read()
    if isinstance(stored, GroupedWeight):
        return stored.take(torch.from_numpy(place.rows))
    return stored[0], stored[1][place.rows]


def places_of(spec: ArchSpec, held: frozenset[str]) -> dict[str, StoredRows]:
    """From each declared tensor that is stored differently to its place."""
    names, found = spec.names, dict[str, StoredRows]()
    prefix = names.prefix_in(held)
    if names.sublayers > 1:
        found |= _sublayers(spec, prefix, held)
    for index, layer in enumerate(spec.layers):
        start = names.layer(prefix, index)
        for fused in spec.fused_in(index):
            found |= _parts_of(fused, start, held)
        rope = layer.mixer.rope
        if rope is None or not rope.interleaved:
            continue
        keys = layer.mixer.cache
        assert keys is not None, "rotation is of attention"
        order = _halves_apart(keys.key_size, rope.rotary_dim)
        each = [(names.query, layer.mixer.num_heads), (names.key, keys.num_heads)]
        each += [(names.query_norm, 1), (names.key_norm, 1)]
        for name, heads in each:
            rows = (np.arange(heads)[:, None] * keys.key_size + order).reshape(-1)
            for full in (f"{start}{name}.weight", f"{start}{name}.bias"):
                if full in found:
                    place = found[full]
                    found[full] = StoredRows(place.name, place.num_stored, place.rows[rows], place.transposed)
                elif full in held:
                    found[full] = StoredRows(full, len(rows), rows)
    return found


def _sublayers(spec: ArchSpec, prefix: str, held: frozenset[str]) -> dict[str, StoredRows]:
    """Places of the weights of layers that the checkpoint counts as parts of others."""
    found: dict[str, StoredRows] = {}
    for weight in model_weights(spec, prefix):
        start = re.match(rf"{re.escape(prefix + spec.names.layers)}\.\d+\.", weight.name)
        number, _, below = weight.name[start.end() if start else 0 :].partition(".")
        if start is None or not number.isdecimal() or weight.name in held:  # as weights without a file have it
            continue
        part, _, rest = below.partition(".")
        stored = [f"{start[0]}{part}.{number}.{rest}", f"{start[0]}{part}.{rest}"]
        count = size_of(weight.dimensions[0])
        held_as = next((each for each in stored if each in held), stored[0])
        found[weight.name] = StoredRows(held_as, count, np.arange(count))
    return found


def _parts_of(fused: Fused, start: str, held: frozenset[str]) -> dict[str, StoredRows]:
    """Places of the parts of a fused matrix and its bias in one layer, whose names begin with `start`."""
    found: dict[str, StoredRows] = {}
    stride = sum(count for _, count in fused.parts)
    for kind in ("weight", "bias"):
        stored = f"{start}{fused.name}.{kind}"
        if stored not in held:
            continue
        offset = 0
        for part, count in fused.parts:
            rows = (np.arange(fused.groups)[:, None] * stride + offset + np.arange(count)).reshape(-1)
            found[f"{start}{part}.{kind}"] = StoredRows(stored, fused.groups * stride, rows, fused.transposed)
            offset += count
    return found


def _halves_apart(head_dim: int, rotary_dim: int) -> np.ndarray:
    """For each row of a head, [head_dim] int64, the index of the stored row; stored pairs are neighbours."""
    rotated = np.arange(rotary_dim).reshape(-1, 2).T.reshape(-1)
    return np.concatenate([rotated, np.arange(rotary_dim, head_dim)])
