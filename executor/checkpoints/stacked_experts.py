"""Reads single experts from checkpoints that store the matrices of all experts of a layer as one tensor."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import Tensor

from headrace.executor.checkpoints.weights import StoredTensor, Weights, take_part
from headrace.executor.models.arch import ArchSpec, StackedExperts
from headrace.ipc.failure import ModelError


def each_expert(spec: ArchSpec, weights: Weights) -> Weights:
    """The weights with a tensor per expert, under the names that blocks declare; unchanged if they stack none."""
    if spec.stacked is None:
        return weights
    held, found = weights.names(), dict[str, _StoredExpert]()
    prefix = spec.names.prefix_in(held)
    for index, stacked in itertools.product(range(spec.num_layers), (spec.stacked, *spec.also_stacked)):
        start = spec.names.layer(prefix, index)
        of_layer = _flat_places if stacked.flat else _places
        found |= of_layer(spec, index, stacked, start, weights, held)
    if not found:
        return weights
    if (twice := next((name for name in found if name in held), None)) is not None:
        raise ModelError(f"the checkpoint holds {twice} twice, once in {found[twice].stored}")
    gone = frozenset(place.stored for place in found.values())
    return weights.then("each expert of a stack", frozenset(found), lambda name: _expert(weights, found[name]), gone)


def with_scales_of_each_expert(spec: ArchSpec, weights: Weights) -> Weights:
    """The weights, in which stacks beside whose `weight` there are stacks of scales are a module for each expert: of
    gates and ups together, two, if the first half of the rows is the gate's."""
    stacked = spec.stacked
    if stacked is None or stacked.flat or stacked.transposed or (stacked.alternating and not stacked.up):
        return weights
    names, held, found = spec.names, weights.names(), dict[str, _Entry]()
    prefix, beside = names.prefix_in(held), dict[str, list[str]]()
    for name in held:
        beside.setdefault(name.rpartition(".")[0], []).append(name)
    parts: list[tuple[str, str, int | None]] = [(stacked.down, names.expert_down, None)]
    if stacked.up:
        parts += [(stacked.gate_up, names.expert_gate, None), (stacked.up, names.expert_up, None)]
    else:
        parts += [(stacked.gate_up, names.expert_gate, 0), (stacked.gate_up, names.expert_up, 1)]
    for index in range(spec.num_layers):
        start = names.layer(prefix, index)
        for stack, part, half in parts:
            module = (start + stack).removesuffix(".weight")
            if f"{module}.weight" not in held or len(beside[module]) == 1:
                continue
            for expert in range(weights.shape(f"{module}.weight")[0]):
                own = f"{start}{names.experts}.{expert}.{part}"
                found |= {f"{own}.{name.rpartition('.')[2]}": _Entry(name, expert, half) for name in beside[module]}
    if not found:
        return weights
    gone = frozenset(entry.stored for entry in found.values())
    return weights.then("each expert of a quantised stack", frozenset(found), lambda n: _entry(weights, found[n]), gone)


@dataclass(frozen=True)
class _Entry:
    """Where a tensor of an expert's module is stored."""

    stored: str
    expert: int
    half: int | None
    """Of the rows that gate and up have in one tensor, if that has several; None: it has those of one matrix."""


def _entry(weights: Weights, entry: _Entry) -> StoredTensor:
    """The expert's tensor, as it is stored. Raises ModelError if the stack has none of this number, or no two equal
    halves."""
    stack, index = weights.stored(entry.stored), entry.expert
    if not stack.shape or stack.shape[0] <= index:
        raise ModelError(f"{entry.stored} has shape {list(stack.shape)}, and its experts are at least {index + 1}")
    shape, own = stack.shape[1:], slice(None)
    if entry.half is not None and shape and shape[0] > 1:
        if shape[0] % 2:
            raise ModelError(f"{entry.stored} has shape {list(stack.shape)}, of which gate and up have no equal parts")
        rows = shape[0] // 2
        shape, own = (rows, *shape[1:]), slice(entry.half * rows, (entry.half + 1) * rows)

    def part(rows: slice | None, columns: slice | None) -> Tensor:
        found = stack.numbers.part(slice(index, index + 1), None)[0]
        return take_part(found[own] if shape else found, shape, rows, columns)

    return StoredTensor.plain(shape, stack.format, part)


@dataclass(frozen=True)
class _StoredExpert:
    """Where an expert's matrix or bias is stored."""

    stored: str
    expert: int
    rows: slice
    """Rows in the expert's part of the stored tensor, after the transposition, if any."""
    transposed: bool
    flat_rows: int = 0
    """Rows of each expert in a tensor of two dimensions; 0: the first of three dimensions is the experts'."""


def _expert(weights: Weights, place: _StoredExpert) -> StoredTensor:
    """An expert's tensor, in floats."""
    stack, each = weights.stored(place.stored), place.flat_rows or 1
    own = (each, *stack.shape[1:]) if place.flat_rows else stack.shape[1:]
    whole = own[::-1] if place.transposed else own
    shape = (len(range(*place.rows.indices(whole[0]))), *whole[1:])

    def part(rows: slice | None, columns: slice | None) -> Tensor:
        found = stack.numbers.part(slice(place.expert * each, (place.expert + 1) * each), None)
        found = found if place.flat_rows else found[0]
        return take_part((found.T if place.transposed else found)[place.rows], shape, rows, columns)

    return StoredTensor.plain(shape, stack.format, part)


def _flat_places(
    spec: ArchSpec, index: int, stacked: StackedExperts, start: str, weights: Weights, held: frozenset[str]
) -> dict[str, _StoredExpert]:
    """As `_places`, of tensors of two dimensions."""
    names, found, ffn = spec.names, dict[str, _StoredExpert](), spec.layers[index].ffn
    count = getattr(ffn, "num_experts", 0)
    tensors = ((names.expert_gate, stacked.gate_up), (names.expert_up, stacked.up), (names.expert_down, stacked.down))
    for part, stored in tensors:
        if not count or start + stored not in held:
            continue
        shape, rows = weights.shape(start + stored), count * ffn.inner
        if len(shape) != 2 or shape[0] != rows:
            raise ModelError(f"weight {start}{stored} has shape {list(shape)}, but the config needs {rows} rows")
        for expert in range(count):
            own, down = f"{start}{names.experts}.{expert}.{part}.weight", stored == stacked.down
            found[own] = _StoredExpert(start + stored, expert, slice(None), down, flat_rows=ffn.inner)
    return found


def _places(
    spec: ArchSpec, index: int, stacked: StackedExperts, start: str, weights: Weights, held: frozenset[str]
) -> dict[str, _StoredExpert]:
    """Places of the experts of one layer, whose names begin with `start`. Raises ModelError."""
    names, found = spec.names, dict[str, _StoredExpert]()
    kinds = ((".weight", stacked.gate_up, stacked.down), (".bias", stacked.gate_up_bias, stacked.down_bias))
    for kind, gate_up, down in kinds:
        if start + gate_up not in held:
            continue
        is_transposed = stacked.transposed and kind == ".weight"
        shape = weights.shape(start + gate_up)
        if len(shape) < 2 or start + down not in held:
            raise ModelError(f"weights {start}{gate_up}, of shape {list(shape)}, and {down} are no experts' matrices")
        inner = shape[-1 if is_transposed else 1] // 2
        gates, ups = (slice(0, inner), slice(inner, None))
        if stacked.alternating:
            gates, ups = slice(0, None, 2), slice(1, None, 2)
        if stacked.up:
            gates = ups = slice(None)
        parts = (
            (names.expert_gate, gate_up, gates),
            (names.expert_up, stacked.up or gate_up, ups),
            (names.expert_down, down, slice(None)),
        )
        for expert in range(shape[0]):
            for part, stored, rows in parts:
                own = f"{start}{names.experts}.{stacked.first + expert}.{part}{kind}"
                found[own] = _StoredExpert(start + stored, expert, rows, is_transposed)
    return found
