"""Reads a checkpoint's weights as the blocks declare them: checks their shapes, and takes only this rank's part."""

from __future__ import annotations

import functools
import importlib
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from headrace.executor.checkpoints.weights import StoredTensor, Weights, WeightSource, dtype_name
from headrace.executor.models.arch import ArchSpec, Fused, LayerSpec
from headrace.executor.models.blocks import (
    Attend,
    Axis,
    Declared,
    Dimension,
    DistanceBias,
    ExpertStack,
    LayerDeclaration,
    LayerHeld,
    Linear,
    SinkTokens,
    Vector,
    size_of,
)
from headrace.executor.models.blocks.short_convolution import Convolve
from headrace.executor.parallel.load_balancing import BalancedExperts
from headrace.executor.parallel.rank_place import SINGLE, RankCoordinates
from headrace.ipc.adapters import most_of_request
from headrace.ipc.failure import HeadraceError, ModelError, let_interrupts_pass
from headrace.kernels.expert_places import ExpertPlaces
from headrace.kernels.low_rank import SlotLimits
from headrace.kernels.reference.attention import BIAS_PADDING, SinkRows
from headrace.kernels.reference.moe import MovableExperts

if TYPE_CHECKING:
    from headrace.core.options.adapters import AdapterLimits
    from headrace.executor.adapters.slots import AdapterTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """The rows of a checkpoint's matrix that a rank reads."""

    name: str
    """Name of the matrix, without `.weight` or `.bias`."""
    num_rows: int
    """Rows of the whole matrix in the checkpoint."""
    rows: slice | None = None
    """Rows to read; None: all."""

    @property
    def taken(self) -> int:
        return self.num_rows if self.rows is None else self.rows.stop - self.rows.start


def own_slopes(declared: Attend, place: RankCoordinates, device: torch.device | str = "cpu") -> Tensor | None:
    """ALiBi slopes of this rank's heads, [num_heads of the rank] float32, for `AttentionParams`; None without ALiBi."""
    own = Axis(declared.num_heads, groups=declared.num_kv_heads).own(place)
    slopes = declared.alibi if own is None else declared.alibi[own]
    return torch.tensor(slopes, dtype=torch.float32, device=device) if slopes else None


def own_part(dimension: Dimension, place: RankCoordinates) -> slice | None:
    """A rank's slice of a dimension; None: all of it."""
    return dimension.own(place) if isinstance(dimension, Axis) else None


def distance_buckets(distances: Tensor, num_buckets: int, most_distance: int) -> Tensor:
    """The bucket of each distance (key - query position): see `blocks.DistanceBias`."""
    of_side = num_buckets // 2
    near, away = of_side // 2, distances.abs()
    growth = torch.log(away.clamp(min=1).float() / near) / math.log(most_distance / near)
    far = (near + (growth * (of_side - near)).long()).clamp(max=of_side - 1)
    return (distances > 0) * of_side + torch.where(away < near, away, far)


@functools.cache
def _reader(path: str) -> Callable[[CheckedWeights, Any, str], Any]:
    module, _, name = path.partition(":")
    found: Callable[[CheckedWeights, Any, str], Any] = attrgetter(name)(importlib.import_module(module))
    return found


def fail_by_name(what: str, error: BaseException) -> None:
    """Raises ModelError for an error in code of another package, and returns if it is of another kind. The traceback is
    in the log alone."""
    let_interrupts_pass(error)
    if not isinstance(error, HeadraceError):
        logger.error("%s failed", what, exc_info=error)
        raise ModelError(f"{what} failed: {error!r:.200}") from error


def _name_of(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


class CheckedWeights:
    """Reads one rank's weights from a source: checks each shape first, and records which tensors were used.

    Subclasses (`models.eager`, `cpu.weights`) turn declared things into the form that their ops take. Raises
    ModelError, naming the weight, where source and config disagree.
    """

    reader: ClassVar[Literal["eager_reader", "program_reader"]]
    """The field of `Declared` that names the reader for these ops."""

    def __init__(
        self, source: WeightSource, dtype: torch.dtype, device: torch.device, place: RankCoordinates = SINGLE
    ) -> None:
        self.dtype, self.device, self.place = dtype, device, place
        self.nbytes = 0
        """Memory of the weights read so far, in their final layout."""
        self.balanced: list[BalancedExperts] = []
        """Experts read so far that load balancing may move between ranks, in the order of their layers."""
        self._source = source
        self._names = source.names()
        logger.debug("rank %d reads %s", place.rank, source)
        self._used: set[str] = set()
        self.tied: dict[tuple[str, Declared], Any] = {}
        """What several layers share, by the prefix of the layer that has it in the checkpoint."""
        self._fused: tuple[Fused, ...] = ()
        self.adapters: AdapterLimits | None = None
        """None: no adapters change the model's layers."""
        self.adapter_tables: dict[str, AdapterTable] = {}
        """Of the linear layers read so far, by the name of each layer's first matrix."""

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def read(self, declared: Declared, prefix: str) -> Any:
        """The declared thing in the form that the subclass's ops take. Its names are relative to `prefix`."""
        path: Any = getattr(declared, self.reader)
        try:
            return _reader(path)(self, declared, prefix)
        except BaseException as error:
            if not str(path).startswith("headrace."):
                fail_by_name(f"the {self.reader} {path!r} of {_name_of(declared)}", error)
            raise

    def read_layer(self, spec: ArchSpec, layer: LayerSpec, prefix: str) -> LayerHeld:
        self._fused = spec.fused
        declaration = LayerDeclaration.of(spec, layer)
        mixer, ffn, norms, stream = (
            {key: self.read(declared, prefix) for key, declared in parts.items()}
            for parts in (declaration.mixer, declaration.ffn, declaration.norms, declaration.stream)
        )
        return LayerHeld(mixer, ffn, norms, stream)

    def _floats(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """Part of a weight, in the float dtype in which it is stored. Raises ModelError for integers."""
        tensor = self._source.get(name, rows=rows, columns=columns)
        if not tensor.is_floating_point():
            told = self._in_file(name)
            raise ModelError(f"the weight {told} is stored as {dtype_name(tensor.dtype)}; a type of floats is expected")
        return tensor

    def vector(self, name: str, size: int, offset: float = 0.0, take: slice | None = None) -> Tensor:
        """Elements `take` of a [size] vector, plus `offset`. float32, since norm weights take little memory."""
        self._check(name, (size,))
        tensor = self._floats(name, take).to(self.device, torch.float32) + offset
        self.nbytes += tensor.nbytes
        return tensor

    def values(self, declared: Vector, prefix: str) -> Tensor:
        """This rank's part of a `Vector`, [size of the part] float32."""
        name, size, own = prefix + declared.name, size_of(declared.size), own_part(declared.size, self.place)
        if declared.optional and name not in self:
            return torch.zeros(size, device=self.device)[own or slice(None)]
        if declared.stored == (None,):
            return self.vector(name, size, take=own)
        self._check(name, tuple(size if each is None else each for each in declared.stored))
        values = self._floats(name).reshape(-1)[own or slice(None)].to(self.device, torch.float32)
        self.nbytes += values.nbytes
        return values

    def filters(self, declared: Convolve, prefix: str) -> tuple[Tensor, Tensor | None]:
        """This rank's part of a `Convolve`: weights [channels, width] and biases [channels], float32."""
        weights, biases = [], []
        for name, channels in declared.matrices:
            own, size = own_part(channels, self.place), size_of(channels)
            self._check(f"{prefix}{name}.weight", (size, 1, declared.width))
            weights.append(self._floats(f"{prefix}{name}.weight", own)[:, 0].to(self.device, torch.float32))
            if declared.bias:
                biases.append(self.vector(f"{prefix}{name}.bias", size, take=own))
        weight = torch.cat(weights).contiguous()
        self.nbytes += weight.nbytes
        return weight, torch.cat(biases) if biases else None

    def distance_bias(self, declared: DistanceBias, prefix: str) -> Tensor:
        """[heads of this rank, 2 * (reach + BIAS_PADDING)] float32, by distance of key and query; 0 in the middle."""
        name, half = f"{prefix}{declared.name}.weight", declared.reach + BIAS_PADDING
        self._check(name, (declared.num_buckets, declared.heads.size))
        table = self._floats(name, None, own_part(declared.heads, self.place)).to(self.device, torch.float32)
        buckets = distance_buckets(torch.arange(-half, half), declared.num_buckets, declared.most_distance)
        found = table.T[:, buckets.to(self.device)].contiguous()
        self.nbytes += found.nbytes
        return found

    def sink_tokens(self, declared: SinkTokens, prefix: str) -> SinkRows:
        """Those of this rank's heads, with keys normed and values filled up with zeros."""
        heads, shape = own_part(declared.heads, self.place) or slice(None), (declared.count, declared.heads.size)
        self._check(prefix + declared.keys, (*shape, declared.head_dim))
        keys = self._floats(prefix + declared.keys)[:, heads].to(self.device, torch.float32, copy=True)
        keys[..., : declared.pairs] = keys[..., : declared.pairs].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        if (norm := declared.norm) is not None:
            weight = self.vector(f"{prefix}{norm.name}.{norm.weight_name}", declared.head_dim, norm.weight_offset)
            keys = keys * torch.rsqrt(keys.square().mean(-1, keepdim=True) + norm.eps) * weight
        values = torch.zeros_like(keys)
        if declared.values:
            self._check(prefix + declared.values, (*shape, declared.value_dim))
            values[..., : declared.value_dim] = self._floats(prefix + declared.values)[:, heads]
        self.nbytes += keys.nbytes + values.nbytes
        return SinkRows(keys.contiguous(), values)

    def matrix(self, name: str, rows: int, columns: int, take: slice | None = None) -> Tensor:
        """Rows `take` of a [rows, columns] matrix in the model's dtype, not packed."""
        self._check(name, (rows, columns))
        tensor = self._floats(name, take).to(self.device, self.dtype)
        self.nbytes += tensor.nbytes
        return tensor

    def exact_matrix(self, name: str, rows: int, columns: int, take: slice | None = None) -> Tensor:
        """Rows `take` of a [rows, columns] matrix in float32. name: complete."""
        self._check(name, (rows, columns))
        tensor = self._floats(name, take).to(self.device, torch.float32)
        self.nbytes += tensor.nbytes
        return tensor

    def integers(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A table of whole numbers, int32. Raises ModelError for floats, and for numbers that int32 has not."""
        self._check(name, shape)
        stored = self._source.get(name)
        if stored.is_floating_point():
            raise ModelError(f"the weight {name} is stored as {dtype_name(stored.dtype)}; whole numbers are expected")
        found = stored.to(self.device, torch.int32)
        if not torch.equal(found.to(stored.dtype), stored.to(self.device)):
            raise ModelError(f"the weight {name} holds numbers that int32 has not")
        self.nbytes += found.nbytes
        return found

    def expect_integers(self, name: str, values: Sequence[int]) -> None:
        """Checks whole numbers that a checkpoint may hold, and that the model computes with in any case. Raises
        ModelError for others."""
        if name not in self:
            return
        self._check(name, (len(values),))
        if (stored := self._source.get(name).tolist()) != list(values):
            raise ModelError(f"the weight {name} is {stored!s:.80}, and its config makes {list(values)!s:.80}")

    def exact(self, declared: Any, prefix: str) -> Tensor:
        """An `ExactMatrix`: [rows, columns] float32."""
        return self.exact_matrix(prefix + declared.name, declared.rows, declared.columns)

    def parts_of(self, linear: Linear, prefix: str) -> tuple[list[Part], slice | None, bool]:
        """This rank's share of a `Linear`: rows of each matrix, columns of all, and whether it adds the bias."""
        parts = [Part(prefix + name, size_of(rows), own_part(rows, self.place)) for name, rows in linear.matrices]
        adds_bias = linear.bias
        if linear.bias and isinstance(linear.columns, Axis) and self.place.tp_rank > 0:
            for part in parts:
                self._check(f"{part.name}.bias", (part.num_rows,))
            adds_bias = False
        return parts, own_part(linear.columns, self.place), adds_bias

    def own_experts(self, declared: ExpertStack, prefix: str) -> tuple[Sequence[int], slice | None]:
        """This rank's experts, and the slice of their inner columns (None: all). Weights of experts that only other
        ranks read are checked and recorded as used."""
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
        """For experts that are divided among ranks as wholes: the rank and index of each, and, with load balancing, the
        counters of tokens computed per expert of this rank, [own experts] int64. (None, None) for other experts."""
        place, count = self.place, len(declared.gates)
        if not place.has_whole_experts(count):
            return None, None
        places = ExpertPlaces.of(place.expert_placement(count), count, place.expert_ranks[0])
        return places, torch.zeros(len(place.experts(count)), dtype=torch.int64) if place.balances_experts else None

    @property
    def slot_limits(self) -> SlotLimits:
        """Of `adapters`, for ops that are given several adapters at once."""
        assert self.adapters is not None, "the caller has looked"
        most_used = most_of_request(self.adapters.max_loras)
        return SlotLimits(getattr(torch, self.adapters.dtype), self.adapters.slots, most_used, self.adapters.max_rank)

    def note_balanced(self, experts: MovableExperts, places: ExpertPlaces, loads: Tensor, deltas: Any = None) -> None:
        """Records experts that load balancing may move between ranks. deltas: their `MovableDeltas`, if adapters change
        them."""
        placement = self.place.expert_placement(len(places.replicas))
        self.balanced.append(BalancedExperts(experts, places, loads, [list(each) for each in placement], deltas))

    def expert_biases(self, declared: ExpertStack, prefix: str) -> tuple[Tensor, Tensor]:
        """Biases of this rank's experts, float32: [num_experts, 2 * inner] of gate and up, [num_experts, hidden] of
        down. Where ranks share each expert, only the first has the biases of down; the others have zeros."""
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
        """Raises ModelError if the source holds a tensor that was not read and is not ignorable."""
        self._fused, ignorable = spec.fused, _not_read(spec, self.place, prefix)
        rest = [n for n in sorted(self._names - self._used) if not any(re.search(p, n) for p in ignorable)]
        if rest := list(dict.fromkeys(map(self._in_file, rest))):
            shown = ", ".join(rest[:5]) + (f" and {len(rest) - 5} more" if len(rest) > 5 else "")
            raise ModelError(f"the checkpoint holds weights that this architecture has no place for: {shown}")

    def _check(self, name: str, expected: tuple[int, ...]) -> StoredTensor:
        if name not in self._names:
            told = self._in_file(name)
            part = f" in {expected[0]} of its rows" if told != name else ""
            raise ModelError(f"the checkpoint has no weight {told}; expected one of shape {list(expected)}{part}")
        stored = self._source.stored(name)
        if stored.shape != expected:
            told = self._in_file(name)
            subject = f"weight {name} has" if told == name else f"{stored.shape[0]} rows of weight {told} have"
            raise ModelError(f"{subject} shape {list(stored.shape)}, but the config needs {list(expected)}")
        self._used.add(name)
        return stored

    def _in_file(self, name: str) -> str:
        """The name of a declared weight in the checkpoint: that of the fused tensor, unless the parts are stored."""
        removed = {each for change in Weights.of(self._source).transformations for each in change.removes}
        for fused in self._fused:
            for part, _ in fused.parts:
                if (found := re.fullmatch(rf"(|.*\.){re.escape(part)}\.(weight|bias)", name)) is None:
                    continue
                start, kind = found.groups()
                apart = any(f"{start}{each}.weight" in self._names for each, _ in fused.parts)
                if not apart or f"{start}{fused.name}.weight" in removed:
                    return f"{start}{fused.name}.{kind}"
        return name


def _not_read(spec: ArchSpec, place: RankCoordinates, prefix: str) -> list[str]:
    """Patterns of tensors that a checkpoint may hold and this rank does not read."""
    names, own = spec.names, place.layers(spec.num_layers)
    excused = names.lm_heads if not (place.is_last_stage and spec.has_head) else ()
    complete: tuple[str, ...] = ()
    if not place.is_first_stage:
        firsts = (names.embedding, names.positions, names.token_types, names.embedding_norm, names.project_in)
        excused += tuple(prefix + name for name in firsts)
    if not place.is_last_stage:
        excused += tuple(prefix + name for name in (names.final_norm, names.project_out))
    if spec.ngrams is not None and not place.is_first_stage:
        complete += _complete({"ngrams": spec.ngrams}, prefix)
    if (stream := spec.stream) is not None and not place.is_first_stage:
        excused += () if stream.table is None else (prefix + stream.table.name,)
        complete += _complete(stream.declare_beginning(spec), prefix)
    if stream is not None and not place.is_last_stage:
        complete += _complete(stream.declare_end(spec), prefix)
    read = {spec.layer_prefix(prefix, i) for i in own}
    others = [at for i in range(spec.num_layers) if (at := names.layer(prefix, i)) not in read]
    patterns = [rf"^{re.escape(name)}\.(weight|bias)$" for name in excused]
    patterns += [rf"^{re.escape(name)}$" for name in complete]
    if spec.tied_head:  # a checkpoint may hold a copy of the embedding as its head: see `with_own_head`
        patterns += [rf"^{re.escape(name)}\.weight$" for name in names.lm_heads]
    if spec.classifier is not None:  # read by executor/pooling
        patterns += [rf"(^|\.){re.escape(name)}$" for each in spec.classifier.layers for name, _ in each.weights()]
    return [*names.ignorable, *patterns, *(f"^{re.escape(start)}" for start in others)]


def _complete(declared: Mapping[str, Declared], prefix: str) -> tuple[str, ...]:
    """The weights' full names."""
    return tuple(prefix + weight.name for each in declared.values() for weight in each.weights())
