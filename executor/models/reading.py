"""Reading a checkpoint's weights as they are declared: checked, and this rank's part alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace.executor.checkpoints.weights import WeightSource
from headrace.executor.models.arch import ArchSpec, LayerSpec
from headrace.executor.models.blocks import (
    Attend,
    Axis,
    Declared,
    Dimension,
    ExpertStack,
    LayerDeclaration,
    LayerHeld,
    Linear,
    Vector,
    size_of,
)
from headrace.executor.parallel.load_balancing import BalancedExperts
from headrace.executor.parallel.rank_place import SINGLE, RankPlace
from headrace.ipc.failure import ModelError
from headrace.kernels.expert_places import ExpertPlaces
from headrace.kernels.reference.moe import MovableExperts

TIED_ROWS_COMPARED, TIED_DIFFERENCE = 64, 0.3
"""How many rows of a head are compared with the embedding's, and how much of their norm the difference may have: a copy
may be quantised, and another matrix is all of it away."""


@dataclass(frozen=True)
class Part:
    """Rows of a checkpoint's matrix that become rows of ours."""

    name: str
    """Without `.weight` or `.bias`."""
    num_rows: int
    """Of the whole matrix in the checkpoint."""
    rows: slice | None = None
    """None takes them all."""

    @property
    def taken(self) -> int:
        return self.num_rows if self.rows is None else self.rows.stop - self.rows.start


def own_slopes(declared: Attend, place: RankPlace, device: torch.device | str = "cpu") -> Tensor | None:
    """What `AttentionParams.alibi` is of this rank's heads."""
    own = Axis(declared.num_heads, groups=declared.num_kv_heads).own(place)
    slopes = declared.alibi if own is None else declared.alibi[own]
    return torch.tensor(slopes, dtype=torch.float32, device=device) if slopes else None


def own_part(dimension: Dimension, place: RankPlace) -> slice | None:
    """A rank's part of a dimension; None is all of it."""
    return dimension.own(place) if isinstance(dimension, Axis) else None


class CheckedWeights:
    """Reads a source into what one rank computes with, checking each shape first and noting what was used.

    A subclass reads declared things for its ops: `models.eager`, `cpu.weights`. Raises ModelError, naming the weight,
    where source and config disagree.
    """

    def __init__(
        self, source: WeightSource, dtype: torch.dtype, device: torch.device, place: RankPlace = SINGLE
    ) -> None:
        self.dtype, self.device, self.place = dtype, device, place
        self.nbytes = 0
        """Memory of what was read so far, in its final layout."""
        self.balanced: list[BalancedExperts] = []
        """Those that were read so far, in the order of their layers."""
        self._source = source
        self._names = source.names()
        self._used: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def read(self, declared: Declared, prefix: str) -> Any:
        """What the subclass's ops take for it. Its names are below `prefix`."""
        raise NotImplementedError

    def read_layer(self, spec: ArchSpec, layer: LayerSpec, prefix: str) -> LayerHeld:
        declaration = LayerDeclaration.of(spec, layer)
        mixer, ffn, norms, stream = (
            {key: self.read(declared, prefix) for key, declared in parts.items()}
            for parts in (declaration.mixer, declaration.ffn, declaration.norms, declaration.stream)
        )
        return LayerHeld(mixer, ffn, norms, stream)

    def _floats(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """That part of a weight, of whatever float type. Raises ModelError for whole numbers, which are no weights."""
        tensor = self._source.get(name, rows=rows, columns=columns)
        if not tensor.is_floating_point():
            stored = str(tensor.dtype).removeprefix("torch.")
            raise ModelError(f"the weight {name} is stored as {stored}; a type of floats is expected")
        return tensor

    def vector(self, name: str, size: int, offset: float = 0.0, take: slice | None = None) -> Tensor:
        """Elements `take` of [size], float32, plus `offset`: norm weights stay wide, they cost nothing."""
        self._check(name, (size,))
        tensor = self._floats(name, take).to(self.device, torch.float32) + offset
        self.nbytes += tensor.nbytes
        return tensor

    def values(self, declared: Vector, prefix: str) -> Tensor:
        """This rank's, [size] float32."""
        name, size, own = prefix + declared.name, size_of(declared.size), own_part(declared.size, self.place)
        if not declared.is_row:
            return self.vector(name, size, take=own)
        self._check(name, (1, size))
        row = self._source.get(name, columns=own)[0].to(self.device, torch.float32)
        self.nbytes += row.nbytes
        return row

    def matrix(self, name: str, rows: int, columns: int, take: slice | None = None) -> Tensor:
        """Rows `take` of a [rows, columns] matrix as it is, in the model's dtype."""
        self._check(name, (rows, columns))
        tensor = self._floats(name, take).to(self.device, self.dtype)
        self.nbytes += tensor.nbytes
        return tensor

    def parts_of(self, linear: Linear, prefix: str) -> tuple[list[Part], slice | None, bool]:
        """What this rank reads of a `Linear`: rows of each matrix, columns of all, and whether it adds the bias."""
        parts = [Part(prefix + name, size_of(rows), own_part(rows, self.place)) for name, rows in linear.matrices]
        adds_bias = linear.bias
        if linear.bias and isinstance(linear.columns, Axis) and self.place.tp_rank > 0:
            for part in parts:
                self._check(f"{part.name}.bias", (part.num_rows,))
            adds_bias = False
        return parts, own_part(linear.columns, self.place), adds_bias

    def own_experts(self, declared: ExpertStack, prefix: str) -> tuple[Sequence[int], slice | None]:
        """This rank's experts, and which of their inner columns; the others' names are noted as used."""
        count = len(declared.gates)
        own = self.place.experts(count)
        if not self.place.has_whole_experts(count):
            return own, own_part(declared.inner, self.place)
        shapes = {prefix + weight.name: weight.shape for weight in declared.weights()}
        kept = {names[index] for names in (declared.gates, declared.ups, declared.downs) for index in own}
        for name, shape in shapes.items():
            if name.removeprefix(prefix).rsplit(".", 1)[0] not in kept:
                self._check(name, shape)
        return own, None

    def expert_places(self, declared: ExpertStack) -> tuple[ExpertPlaces | None, Tensor | None]:
        """Of experts that are divided whole: where they are, and, where they are to be balanced, what counts the rows
        of each of this rank's."""
        place, count = self.place, len(declared.gates)
        if not place.has_whole_experts(count):
            return None, None
        places = ExpertPlaces.of(place.expert_placement(count), count, place.expert_ranks[0])
        return places, torch.zeros(len(place.experts(count)), dtype=torch.int64) if place.balances_experts else None

    def note_balanced(self, experts: MovableExperts, places: ExpertPlaces, loads: Tensor) -> None:
        """These may change ranks."""
        placement = self.place.expert_placement(len(places.replicas))
        self.balanced.append(BalancedExperts(experts, places, loads, [list(each) for each in placement]))

    def expert_biases(self, declared: ExpertStack, prefix: str) -> tuple[Tensor, Tensor]:
        """[num_experts, 2 * inner] and [num_experts, hidden] float32, of this rank's experts; of ranks that share an
        expert, the first adds the latter."""
        experts, own = self.own_experts(declared, prefix)
        adds_last = own is None or self.place.tp_rank == 0
        first, last = [], []
        for expert in experts:
            stacks = (declared.gates, declared.ups, declared.downs)
            gate, up, down = (f"{prefix}{names[expert]}.bias" for names in stacks)
            first.append(torch.cat([self.vector(name, declared.inner.size, take=own) for name in (gate, up)]))
            found = self.vector(down, declared.hidden)
            last.append(found if adds_last else torch.zeros_like(found))
        return torch.stack(first), torch.stack(last)

    def check_rest(self, spec: ArchSpec, prefix: str) -> None:
        """Raises ModelError when the source holds a tensor that nothing read and nothing excuses, or a head of its own
        where the config says that the embedding is the head."""
        if spec.tied_head and self.place.is_last_stage:
            self._check_tied(spec, prefix)
        ignorable = _not_read(spec, self.place, prefix)
        rest = [n for n in sorted(self._names - self._used) if not any(re.search(p, n) for p in ignorable)]
        if rest:
            shown = ", ".join(rest[:5]) + (f" and {len(rest) - 5} more" if len(rest) > 5 else "")
            raise ModelError(f"the checkpoint holds weights that this architecture has no place for: {shown}")

    def _check_tied(self, spec: ArchSpec, prefix: str) -> None:
        table = f"{prefix}{spec.names.embedding}.weight"
        head = next((name for each in spec.names.lm_heads if (name := f"{each}.weight") in self._names), None)
        if head is None:
            return
        rows = range(0, spec.vocab_size, max(1, spec.vocab_size // TIED_ROWS_COMPARED))
        is_copy = self._source.shape(head) == self._source.shape(table)
        if is_copy:
            own, tied = (
                torch.cat([self._source.get(name, rows=slice(row, row + 1)).float() for row in rows])
                for name in (head, table)
            )
            is_copy = bool((own - tied).norm() <= TIED_DIFFERENCE * tied.norm())
        if not is_copy:
            raise ModelError(
                f"the config ties the head to the embedding, and the checkpoint's {head} is no copy of {table}; "
                "if the model has a head of its own, set tie_word_embeddings to false by hf_overrides"
            )

    def _check(self, name: str, expected: tuple[int, ...]) -> None:
        if name not in self._names:
            raise ModelError(f"the checkpoint has no weight {name}; expected one of shape {list(expected)}")
        found = tuple(self._source.shape(name))
        if found != expected:
            raise ModelError(f"weight {name} has shape {list(found)}, but the config needs {list(expected)}")
        self._used.add(name)


def _not_read(spec: ArchSpec, place: RankPlace, prefix: str) -> list[str]:
    """Patterns of tensors that a checkpoint may hold and this rank does not read."""
    names, own = spec.names, place.layers(spec.num_layers)
    # A tied checkpoint may carry a copy of the embedding as its head, which was compared.
    excused = names.lm_heads if spec.tied_head or not place.is_last_stage else ()
    if not place.is_first_stage:
        firsts = (names.embedding, names.positions, names.embedding_norm, names.project_in)
        excused += tuple(prefix + name for name in firsts)
    if not place.is_last_stage:
        excused += tuple(prefix + name for name in (names.final_norm, names.project_out))
    if (stream := spec.stream) is not None and not place.is_first_stage:
        excused += (prefix + stream.table.name, *_stems(stream.declare_beginning(spec), prefix))
    if stream is not None and not place.is_last_stage:
        excused += _stems(stream.declare_end(spec), prefix)
    others = [names.layer(prefix, i) for i in range(spec.num_layers) if i not in own]
    patterns = [rf"^{re.escape(name)}\.(weight|bias)$" for name in excused]
    return [*names.ignorable, *patterns, *(f"^{re.escape(start)}" for start in others)]


def _stems(declared: Mapping[str, Declared], prefix: str) -> tuple[str, ...]:
    """Names of what holds these weights."""
    return tuple(prefix + weight.name.rpartition(".")[0] for each in declared.values() for weight in each.weights())
