"""Reads single experts from checkpoints that store the matrices of all experts of a layer as one tensor."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from headrace.executor.checkpoints.weights import Packed, WeightSource, WrappedWeights, take_part
from headrace.executor.models.arch import ArchSpec, StackedExperts
from headrace.ipc.failure import ModelError


def each_expert(spec: ArchSpec, source: WeightSource) -> WeightSource:
    """The source with a tensor per expert, under the names that blocks declare; the source itself if it stacks none."""
    if spec.stacked is None:
        return source
    held, found = source.names(), dict[str, _Place]()
    prefix = spec.names.prefix_in(held)
    for index in range(spec.num_layers):
        start = spec.names.layer(prefix, index)
        found |= _places(spec, spec.stacked, start, source, held)
    return EachExpert(source, found) if found else source


@dataclass(frozen=True)
class _Place:
    """Where an expert's matrix or bias is stored."""

    stored: str
    expert: int
    rows: slice
    """Rows in the expert's part of the stored tensor, after the transposition, if any."""
    transposed: bool


class EachExpert(WrappedWeights):
    """A `WeightSource` of single experts around one of stacked experts."""

    def __init__(self, source: WeightSource, places: dict[str, _Place]) -> None:
        super().__init__(source, frozenset(place.stored for place in places.values()), frozenset(places))
        self._places = places

    def shape(self, name: str) -> tuple[int, ...]:
        place = self._places.get(name)
        if place is None:
            return self.source.shape(name)
        part = tuple(self.source.shape(place.stored))[1:]
        if place.transposed:
            part = part[::-1]
        return (len(range(*place.rows.indices(part[0]))), *part[1:])

    def get(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        place = self._places.get(name)
        if place is None:
            return self.source.get(name, rows=rows, columns=columns)
        whole = self.source.get(place.stored, rows=slice(place.expert, place.expert + 1))[0]
        if place.transposed:
            whole = whole.T
        part = whole[place.rows]
        return take_part(part, tuple(part.shape), rows, columns)

    def _packed(self, name: str) -> Packed | None:
        """The source's packed weight; None for experts from a stack, which are floats."""
        return None if name in self._places else super()._packed(name)

    def _group_of(self, name: str) -> int | None:
        return None if name in self._places else super()._group_of(name)


def _places(
    spec: ArchSpec, stacked: StackedExperts, start: str, source: WeightSource, held: frozenset[str]
) -> dict[str, _Place]:
    """Places of the experts of one layer, whose names begin with `start`. Raises ModelError."""
    names, found = spec.names, dict[str, _Place]()
    kinds = ((".weight", stacked.gate_up, stacked.down), (".bias", stacked.gate_up_bias, stacked.down_bias))
    for kind, gate_up, down in kinds:
        if start + gate_up not in held:
            continue
        is_transposed = stacked.transposed and kind == ".weight"
        shape = tuple(source.shape(start + gate_up))
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
                found[own] = _Place(start + stored, expert, rows, is_transposed)
    return found
