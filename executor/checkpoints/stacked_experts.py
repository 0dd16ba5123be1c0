"""Reads single experts from checkpoints that store the matrices of all experts of a layer as one tensor."""

from __future__ import annotations

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
    for index in range(spec.num_layers):
        start = spec.names.layer(prefix, index)
        found |= _places(spec, spec.stacked, start, weights, held)
    if not found:
        return weights
    gone = frozenset(place.stored for place in found.values())
    return weights.then("each expert of a stack", frozenset(found), lambda name: _expert(weights, found[name]), gone)


@dataclass(frozen=True)
class _StoredExpert:
    """Where an expert's matrix or bias is stored."""

    stored: str
    expert: int
    rows: slice
    """Rows in the expert's part of the stored tensor, after the transposition, if any."""
    transposed: bool


def _expert(weights: Weights, place: _StoredExpert) -> StoredTensor:
    """An expert's tensor, in floats."""
    stack = weights.stored(place.stored)
    whole = stack.shape[:0:-1] if place.transposed else stack.shape[1:]
    shape = (len(range(*place.rows.indices(whole[0]))), *whole[1:])

    def part(rows: slice | None, columns: slice | None) -> Tensor:
        found = stack.numbers.part(slice(place.expert, place.expert + 1), None)[0]
        return take_part((found.T if place.transposed else found)[place.rows], shape, rows, columns)

    return StoredTensor.plain(shape, stack.format, part)


def _places(
    spec: ArchSpec, stacked: StackedExperts, start: str, weights: Weights, held: frozenset[str]
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
        parts = (
            (names.expert_gate, gate_up, gates),
            (names.expert_up, gate_up, ups),
            (names.expert_down, down, slice(None)),
        )
        for expert in range(shape[0]):
            for part, stored, rows in parts:
                own = f"{start}{names.experts}.{expert}.{part}{kind}"
                found[own] = _StoredExpert(start + stored, expert, rows, is_transposed)
    return found
