"""The decoder's parts. Linear layers are tensor-parallel by construction: each reads its rows or columns alone.

What a weight looks like in memory is known only to the `LinearWeight` that the `linear` op packs; a layer calls
`apply`. Nothing here keeps state between steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from headrace import kernels
from headrace.executor.checkpoints.weights import WeightSource
from headrace.executor.models.arch import ArchSpec
from headrace.executor.parallel.rank_place import RankPlace
from headrace.ipc.failure import ModelError
from headrace.kernels.reference.rows import DenseLinear, LinearWeight

ChooseKernel = Callable[..., Callable[..., Any]]
"""(op's name, **facts) -> the function that serves; `kernels.choose` is one."""


@runtime_checkable
class FusableLinear(Protocol):
    """A `LinearWeight` whose kernel takes in what stands around it, up to some number of rows of x."""

    most_fused_rows: int

    def apply_fused(
        self,
        x: Tensor,
        norm: tuple[Tensor, float] | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """x [num_rows, in_features] -> RMS norm (weight [in_features] float32, eps), product and bias, the ops
        `activate_and_multiply` and addition, in this order and without what is None."""
        ...


def fusable(weights: Sequence[LinearWeight]) -> tuple[FusableLinear, ...]:
    """The weights, or none where one of them takes nothing in."""
    found = tuple(weight for weight in weights if isinstance(weight, FusableLinear))
    return found if len(found) == len(weights) else ()


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


class CheckedWeights:
    """Reads a source into tensors of the final dtype, checking each shape first and noting what was used."""

    def __init__(
        self, source: WeightSource, dtype: torch.dtype, device: torch.device, choose: ChooseKernel = kernels.choose
    ) -> None:
        self.dtype, self.device = dtype, device
        self._choose = choose
        self.nbytes = 0
        """Memory of what was read so far, in its final layout."""
        self._source = source
        self._names = source.names()
        self._used: set[str] = set()

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def vector(self, name: str, size: int, offset: float = 0.0, take: slice | None = None) -> Tensor:
        """Elements `take` of [size], float32, plus `offset`: norm weights stay wide, they cost nothing."""
        self._check(name, (size,))
        tensor = self._source.get(name, rows=take).to(self.device, torch.float32) + offset
        self.nbytes += tensor.nbytes
        return tensor

    def matrix(self, name: str, rows: int, columns: int, take: slice | None = None) -> Tensor:
        """Rows `take` of a [rows, columns] matrix as it is, in the model's dtype."""
        self._check(name, (rows, columns))
        tensor = self._source.get(name, rows=take).to(self.device, self.dtype)
        self.nbytes += tensor.nbytes
        return tensor

    def linear(self, parts: Sequence[Part], in_features: int, columns: slice | None, bias: bool) -> LinearWeight:
        """The parts' rows (and their `columns`) one below the other, packed for the kernel that serves here."""
        weight = self._stack([(f"{part.name}.weight", part) for part in parts], in_features, columns)
        biases = self._stack([(f"{part.name}.bias", part) for part in parts], None, None) if bias else None
        return self.pack(weight, biases)

    def kernel(self, op: str, **facts: Any) -> Callable[..., Any]:
        """The version of `op` that serves this model's device and dtype, and these facts."""
        return self._choose(op, device=self.device, dtype=self.dtype, **facts)

    def fused_kernel(self, op: str, **facts: Any) -> Callable[..., Any] | None:
        """As `kernel`; None where only the reference serves, which gains nothing over the ops that it is made of."""
        found = self.kernel(op, **facts)
        return None if found is kernels.choose_reference(op) else found

    def pack(self, weight: Tensor, bias: Tensor | None) -> LinearWeight:
        """weight [out, in] and bias [out] in the layout of the kernel that serves them."""
        packed: LinearWeight = self.kernel("linear", shape=tuple(weight.shape))(weight, bias)
        self.nbytes += packed.nbytes
        return packed

    def leave(self, name: str, size: int) -> None:
        """Checks a vector that another rank reads."""
        self._check(name, (size,))

    def check_all_used(self, ignorable: Sequence[str]) -> None:
        """Raises ModelError when the source holds a tensor that nothing read and no pattern excuses."""
        rest = [n for n in sorted(self._names - self._used) if not any(re.search(p, n) for p in ignorable)]
        if rest:
            shown = ", ".join(rest[:5]) + (f" and {len(rest) - 5} more" if len(rest) > 5 else "")
            raise ModelError(f"the checkpoint holds weights that this architecture has no place for: {shown}")

    def _stack(self, named: Sequence[tuple[str, Part]], in_features: int | None, columns: slice | None) -> Tensor:
        """[rows of all parts, columns], or [rows] where in_features is None."""
        tail = () if in_features is None else (in_features,)
        for name, part in named:
            self._check(name, (part.num_rows, *tail))
        if len(named) == 1:
            name, part = named[0]
            return self._source.get(name, rows=part.rows, columns=columns).to(self.device, self.dtype).contiguous()
        width = tail if columns is None else (columns.stop - columns.start,)
        stacked = torch.empty((sum(p.taken for _, p in named), *width), dtype=self.dtype, device=self.device)
        start = 0
        for name, part in named:
            stacked[start : start + part.taken].copy_(self._source.get(name, rows=part.rows, columns=columns))
            start += part.taken
        return stacked

    def _check(self, name: str, expected: tuple[int, ...]) -> None:
        if name not in self._names:
            raise ModelError(f"the checkpoint has no weight {name}; expected one of shape {list(expected)}")
        found = tuple(self._source.shape(name))
        if found != expected:
            raise ModelError(f"weight {name} has shape {list(found)}, but the config needs {list(expected)}")
        self._used.add(name)


class ColumnParallel:
    """y = x W^T + b with W's rows, and so y's columns, divided among the ranks."""

    def __init__(
        self, weights: CheckedWeights, name: str, in_features: int, out_features: int, bias: bool, place: RankPlace
    ) -> None:
        part = Part(name, out_features, place.share(out_features, f"{name}'s output") if place.tp_size > 1 else None)
        self.weight = weights.linear([part], in_features, None, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, in_features] -> [num_tokens, out_features / tp size]"""
        return self.weight.apply(x)


class MergedColumnParallel:
    """Several matrices of one input as one, each divided among the ranks: gate and up."""

    def __init__(
        self,
        weights: CheckedWeights,
        names: Sequence[str],
        in_features: int,
        out_features: int,
        bias: bool,
        place: RankPlace,
    ) -> None:
        rows = place.share(out_features, f"{names[0]}'s output") if place.tp_size > 1 else None
        self.weight = weights.linear([Part(name, out_features, rows) for name in names], in_features, None, bias)

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, in_features] -> [num_tokens, len(names) * out_features / tp size]"""
        return self.weight.apply(x)


@dataclass(frozen=True)
class Heads:
    """A model's attention heads, and how many of them one rank has."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def own_kv_heads(heads: Heads | ArchSpec, place: RankPlace) -> slice:
    """A rank's key/value heads; fewer heads than ranks are repeated."""
    first = place.tp_rank * heads.num_kv_heads // place.tp_size
    return slice(first, first + max(1, heads.num_kv_heads // place.tp_size))


class QKVParallel:
    """Query, key and value as one matrix, divided by heads; fewer key/value heads than ranks are repeated."""

    def __init__(
        self,
        weights: CheckedWeights,
        names: tuple[str, str, str],
        in_features: int,
        heads: Heads,
        bias: bool,
        place: RankPlace,
    ) -> None:
        query_rows = place.share(heads.num_heads, "attention heads")
        own = own_kv_heads(heads, place)
        self.num_heads = query_rows.stop - query_rows.start
        self.num_kv_heads = own.stop - own.start
        self.head_dim = heads.head_dim
        whole = heads.num_kv_heads * heads.head_dim
        kv_rows = slice(own.start * heads.head_dim, own.stop * heads.head_dim)
        query = Part(
            names[0],
            heads.num_heads * heads.head_dim,
            slice(query_rows.start * heads.head_dim, query_rows.stop * heads.head_dim),
        )
        parts = [query, Part(names[1], whole, kv_rows), Part(names[2], whole, kv_rows)]
        self.weight = weights.linear(parts, in_features, None, bias)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [num_tokens, in_features] -> query, key, value, each [num_tokens, this rank's heads, head_dim]"""
        return self.split(self.weight.apply(x))

    def split(self, joined: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the weight makes of x -> query, key, value, which are views of it."""
        heads = joined.view(len(joined), self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        query, key, value = heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        return query, key, value


class RowParallel:
    """y = x W^T + b with W's columns, and so x's, divided among the ranks; the partial sums are added."""

    def __init__(
        self, weights: CheckedWeights, name: str, in_features: int, out_features: int, bias: bool, place: RankPlace
    ) -> None:
        columns = place.share(in_features, f"{name}'s input") if place.tp_size > 1 else None
        self._place = place
        if bias and place.tp_rank > 0:
            weights.leave(f"{name}.bias", out_features)  # added once, by rank 0
        self.weight = weights.linear([Part(name, out_features)], in_features, columns, bias and place.tp_rank == 0)

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_tokens, in_features / tp size] -> [num_tokens, out_features]"""
        return self._place.all_reduce(self.weight.apply(x))


class VocabParallelEmbedding:
    """Token embeddings with the vocabulary divided among the ranks."""

    def __init__(
        self, weights: CheckedWeights, name: str, vocab_size: int, width: int, scale: float, place: RankPlace
    ) -> None:
        self._place = place
        self._rows = place.vocabulary(vocab_size)
        table = weights.matrix(f"{name}.weight", vocab_size, width, self._rows if place.tp_size > 1 else None)
        self.table: LinearWeight = DenseLinear(table, None)
        """A tied head puts its packed weight here, so that the table is in memory once."""
        self._num_rows = len(table)
        self._embed, self._scale_by = weights.fused_kernel("embed"), scale
        # Rounded to the model's dtype before it multiplies, as the models that have a scale were trained.
        self._scale = torch.tensor(scale, dtype=weights.dtype, device=weights.device) if scale != 1.0 else None

    def __call__(self, token_ids: Tensor) -> Tensor:
        """token_ids [num_tokens] int64 -> [num_tokens, width]"""
        if self._embed is not None and isinstance(self.table, DenseLinear):
            rows = self._embed(token_ids, self.table.weight, self._rows.start, self._scale_by)
            return rows if self._place.tp_size == 1 else self._place.all_reduce(rows)
        if self._place.tp_size == 1:
            rows = self.table.look_up(token_ids)
        else:
            local = token_ids - self._rows.start
            mine = (local >= 0) & (local < self._num_rows)
            rows = self.table.look_up(local * mine).masked_fill(~mine[:, None], 0)
            rows = self._place.all_reduce(rows)
        return rows if self._scale is None else rows * self._scale


class VocabParallelHead:
    """Logits over the whole vocabulary, each rank computing its own rows; tied heads share the embedding's table."""

    def __init__(
        self, weights: CheckedWeights, name: str, embedding: VocabParallelEmbedding | None, shape: tuple[int, int],
        place: RankPlace,
    ) -> None:  # fmt: skip
        self._place = place
        if embedding is not None:
            dense = embedding.table
            assert isinstance(dense, DenseLinear)  # it has just been read
            weights.nbytes -= dense.nbytes
            self.weight = embedding.table = weights.pack(dense.weight, None)
        else:
            rows = place.vocabulary(shape[0]) if place.tp_size > 1 else None
            self.weight = weights.linear([Part(name, shape[0], rows)], shape[1], None, bias=False)
        self._vocab_size = shape[0]

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [n, width] -> logits [n, vocab_size] in hidden's dtype"""
        logits = self.weight.apply(hidden)
        size = self._place.tp_size
        if size == 1:
            return logits
        missing = -(-self._vocab_size // size) - logits.shape[1]  # of a last rank's columns
        whole = self._place.all_gather(torch.nn.functional.pad(logits, (0, missing)))
        return whole if whole.shape[1] == self._vocab_size else whole[:, : self._vocab_size].contiguous()
